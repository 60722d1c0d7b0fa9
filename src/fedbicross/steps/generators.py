"""Networks that turn latent vectors into images: the generators of DAFL, DENSE and Co-Boosting.

All three descend from one small network (linear, two nearest-neighbour doublings, convolutions) and differ in its last
layer, its first weights, and in whether it lives through the whole run or starts anew with every epoch. What comes out
is in the range that the clients were trained on, [-1, 1] (DENSE's authors feed [0, 1], DAFL's standardise).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from fedbicross.engine.device import autocast

Output = Literal["sigmoid", "tanh", "standardised"]
Augment = Literal["none", "flip", "crop_flip"]

LARGEST_START = 16  # pixels per side of the first feature map; above 64 px two doublings no longer suffice
PAD = 4  # pixels of black around an image before it is cropped back (authors of DENSE)
BLACK = -1.0


@dataclass(frozen=True)
class GeneratorSettings:
    """The numbers of a generator, with DENSE's values."""

    latent: int = 256  # length of z
    width: int = 128  # channels of the first convolution; the second has half of them
    output: Output = "sigmoid"
    eps: float = 1e-5  # of batch normalisation; DAFL's code has 0.8
    init: Literal["normal", "uniform"] = "normal"  # N(0, 0.02) as in DENSE's reset, or torch's default as in DAFL
    lr: float = 1e-3
    betas: tuple[float, float] = (0.5, 0.999)
    clip: float | None = None  # largest norm of the whole gradient


def start_size(image_size: int) -> tuple[int, int]:
    """(side of the first feature map, doublings): two doublings as in the papers, more above 64 px."""
    doublings = 2
    while math.ceil(image_size / 2**doublings) > LARGEST_START:
        doublings += 1
    return math.ceil(image_size / 2**doublings), doublings


class _Network(nn.Module):
    """z [B, latent] to images [B, channels, size, size]; batch normalisation always by the batch itself."""

    def __init__(self, settings: GeneratorSettings, channels: int, image_size: int) -> None:
        super().__init__()
        self.image_size, self.output = image_size, settings.output
        self.side, doublings = start_size(image_size)
        self.width, last = settings.width, max(settings.width // 2, 1)
        widths = [settings.width] * doublings + [last]
        self.start = nn.Linear(settings.latent, settings.width * self.side**2)
        self.start_norm = _norm(settings.width, settings.eps)
        pairs = list(pairwise(widths))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.norms = nn.ModuleList(_norm(b, settings.eps) for _, b in pairs)
        self.end = nn.Conv2d(last, channels, 3, padding=1)
        self.end_norm = None if settings.output == "sigmoid" else _norm(channels, 1e-5, affine=False)

    def forward(self, z: Tensor) -> Tensor:
        x = self.start_norm(self.start(z).unflatten(1, (self.width, self.side, self.side)))
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.leaky_relu(norm(convolution(F.interpolate(x, scale_factor=2.0))), 0.2)
        x = self.end(x)[..., : self.image_size, : self.image_size].float()
        if self.output == "sigmoid":
            return 2 * torch.sigmoid(x) - 1
        assert self.end_norm is not None
        out: Tensor = torch.tanh(self.end_norm(x)) if self.output == "tanh" else self.end_norm(torch.tanh(x))
        return out


def _norm(width: int, eps: float, affine: bool = True) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=eps, affine=affine, track_running_stats=False)


class ImageGenerator:
    """A generator with its Adam, in place on one device; with ``learn_latent`` its latent vectors are learned too.

    Everything that a step changes is in ``in_place``, so that a step can be recorded (`engine.fast.Captured`).
    """

    def __init__(
        self,
        settings: GeneratorSettings,
        image_shape: tuple[int, int, int],
        batch: int,
        device: str = "cpu",
        precision: str = "fp32",
        learn_latent: bool = False,
    ) -> None:
        self.settings, self.device, self.precision, self.learn_latent = settings, device, precision, learn_latent
        with torch.device("meta"):  # torch's constructors then draw no random numbers
            network = _Network(settings, image_shape[0], image_shape[1])
        self.network = network.to_empty(device=device)
        self.params = {name: p.detach().requires_grad_(True) for name, p in self.network.named_parameters()}
        self.latent = torch.zeros((batch, settings.latent), device=device, requires_grad=learn_latent)
        self.first = [torch.zeros_like(p) for p in self._learned]
        self.second = [torch.zeros_like(p) for p in self._learned]
        self.count = torch.zeros((), device=device)

    @property
    def _learned(self) -> list[Tensor]:
        return [*self.params.values(), *([self.latent] if self.learn_latent else [])]

    @property
    def in_place(self) -> list[Tensor]:
        """Every tensor that ``step`` changes."""
        return [*self._learned, *self.first, *self.second, self.count]

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """New weights from a CPU generator (one seed is the same network on every device), and a new optimiser."""
        for name, module in self.network.named_modules():
            weight = self.params.get(f"{name}.weight")
            if weight is None:
                continue
            bias = self.params[f"{name}.bias"]
            if self.settings.init == "normal":
                drawn = torch.randn(weight.shape, generator=generator) * 0.02
                weight.copy_(drawn + 1 if isinstance(module, nn.BatchNorm2d) else drawn)
                bias.zero_()
            elif self.settings.init == "uniform":
                if isinstance(module, nn.BatchNorm2d):
                    weight.fill_(1)
                    bias.zero_()
                    continue
                bound = 1 / math.sqrt(weight[0].numel())
                for tensor in (weight, bias):
                    tensor.copy_((2 * torch.rand(tensor.shape, generator=generator) - 1) * bound)
            else:
                assert_never(self.settings.init)
        for moment in (*self.first, *self.second, self.count):
            moment.zero_()

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """New latent vectors z ~ N(0, 1), from a CPU generator."""
        self.latent.copy_(torch.randn(self.latent.shape, generator=generator))

    def images(self, z: Tensor | None = None) -> Tensor:
        """Images in [-1, 1] ("standardised": mean 0 and variance 1) of ``z``, or of the stored latent vectors."""
        with autocast(self.device, self.precision):
            out: Tensor = functional_call(self.network, self.params, (self.latent if z is None else z,))
        return out.float()

    def step(
        self, loss_of: Callable[[Tensor], Sequence[Tensor]], z: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """One Adam step on the first tensor that ``loss_of(images)`` gives.

        Returns, detached, the images as they were before the step and everything that ``loss_of`` gave.
        """
        with torch.enable_grad():
            images = self.images(z)
            terms = loss_of(images)
            gradients = torch.autograd.grad(terms[0], self._learned)
        self._adam(gradients)
        return images.detach(), [term.detach() for term in terms]

    @torch.no_grad()
    def _adam(self, gradients: Sequence[Tensor]) -> None:
        """Adam in place, as `torch.optim.Adam`; nothing here waits for the device."""
        settings, moved, gradients = self.settings, self._learned, list(gradients)
        if settings.clip is not None:
            gradients = clipped(gradients, settings.clip)
        beta1, beta2 = settings.betas
        torch._foreach_mul_(self.first, beta1)
        torch._foreach_add_(self.first, gradients, alpha=1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - beta2)
        self.count += 1
        # 1 - beta^t without losing digits in float32.
        first_scale = -torch.expm1(self.count * math.log(beta1)) if beta1 else torch.ones_like(self.count)
        second_scale = -torch.expm1(self.count * math.log(beta2))
        down = torch._foreach_sqrt(torch._foreach_div(self.second, second_scale))
        torch._foreach_add_(down, 1e-8)
        step = torch._foreach_div(self.first, down)
        torch._foreach_mul_(step, settings.lr / first_scale)
        torch._foreach_sub_(moved, step)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a killed run needs to go on to the same bytes."""
        names = [*self.params, *(["latent"] if self.learn_latent else [])]
        out = {"latent": self.latent, "count": self.count, **{f"params/{n}": p for n, p in self.params.items()}}
        out |= {f"first/{n}": m for n, m in zip(names, self.first, strict=True)}
        out |= {f"second/{n}": m for n, m in zip(names, self.second, strict=True)}
        return {name: value.detach().cpu().clone() for name, value in out.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what ``tensors`` gave."""
        names = [*self.params, *(["latent"] if self.learn_latent else [])]
        self.latent.copy_(tensors["latent"])
        self.count.copy_(tensors["count"])
        for name, value in self.params.items():
            value.copy_(tensors[f"params/{name}"])
        for name, first, second in zip(names, self.first, self.second, strict=True):
            first.copy_(tensors[f"first/{name}"])
            second.copy_(tensors[f"second/{name}"])


def clipped(gradients: Sequence[Tensor], largest: float) -> list[Tensor]:
    """Gradients scaled down to a common norm of at most ``largest``, as `torch.nn.utils.clip_grad_norm_`."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    scale = (largest / (norm + 1e-6)).clamp_max(1)
    return list(torch._foreach_mul(list(gradients), scale))


class Changes:
    """The random crops and mirror images of many batches, drawn up-front so that any batch can be made alone."""

    def __init__(self, kind: Augment, batches: int, batch: int, generator: torch.Generator) -> None:
        self.kind, device = kind, generator.device
        self.flips = torch.rand((batches, batch), generator=generator, device=device) < 0.5
        self.offsets = torch.randint(0, 2 * PAD + 1, (batches, batch, 2), generator=generator, device=device)

    def of(self, number: int) -> tuple[Tensor, Tensor]:
        """What happens to batch ``number``."""
        return self.flips[number], self.offsets[number]


def changed(x: Tensor, kind: Augment, flips: Tensor, offsets: Tensor) -> Tensor:
    """Each image mirrored where ``flips`` [B] says so, and cropped at ``offsets`` [B,2] out of a black margin."""
    if kind == "none":
        return x
    x = torch.where(flips.view(-1, 1, 1, 1), x.flip(-1), x)
    if kind == "flip":
        return x
    if kind == "crop_flip":
        height, width = x.shape[-2:]
        padded = F.pad(x, (PAD, PAD, PAD, PAD), value=BLACK)
        rows = (offsets[:, 0, None] + torch.arange(height, device=x.device)).view(-1, 1, height, 1)
        columns = (offsets[:, 1, None] + torch.arange(width, device=x.device)).view(-1, 1, 1, width)
        padded = padded.gather(2, rows.expand(-1, x.shape[1], -1, padded.shape[-1]))
        return padded.gather(3, columns.expand(-1, x.shape[1], height, -1))
    assert_never(kind)


@cache
def forward_flops(settings: GeneratorSettings, channels: int, image_size: int) -> int:
    """Operations of making one image; counted on meta tensors, so nothing is computed."""
    with torch.device("meta"):
        network = _Network(settings, channels, image_size)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(torch.empty(2, settings.latent))  # batch normalisation needs two
    return int(counter.get_total_flops()) // 2
