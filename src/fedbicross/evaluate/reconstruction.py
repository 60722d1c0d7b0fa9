"""Can a patient's image be rebuilt from tokens? A decoder as attacker, PSNR and SSIM, and controls (FALCON's Table 5).

The attacker owns other images of the same kind, encodes them with the public encoder and trains a decoder from tokens
to pixels. He then decodes what the hospital sent. For real tokens each image has its own reconstruction. Synthetic ones
belong to nobody, so that the paper takes, for each image, the best of all of them, which is a high score for any large
pile of plausible images. Hence the controls: the mean image, the best of as many decoded tokens of *other people*, and
real reconstructions held against the wrong image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbicross.seeds import stream_seed

PEAK_PSNR = 100.0  # dB; what two equal images count as, so that a mean stays a number
WINDOW, SIGMA = 11, 1.5  # of SSIM, as in Wang et al. 2004
C1, C2 = 0.01**2, 0.03**2


def psnr(first: Tensor, second: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of images [...,C,H,W] in [0,1], at most 100."""
    error = (first - second).square().mean((-3, -2, -1))
    return (-10 * error.clamp_min(1e-30).log10()).clamp_max(PEAK_PSNR)


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Structural similarity of images [n,C,H,W] in [0,1] (Wang et al. 2004): Gaussian window 11, σ 1.5, mean over it.

    Images smaller than the window get the largest odd window that fits. Windows lie wholly inside the image.
    """
    window = _window(min(first.shape[-2:]), first)
    mean_1, mean_2 = _blur(first, window), _blur(second, window)
    variance_1 = _blur(first.square(), window) - mean_1.square()
    variance_2 = _blur(second.square(), window) - mean_2.square()
    shared = _blur(first * second, window) - mean_1 * mean_2
    same_light = (2 * mean_1 * mean_2 + C1) / (mean_1.square() + mean_2.square() + C1)
    same_structure = (2 * shared + C2) / (variance_1 + variance_2 + C2)
    return (same_light * same_structure).mean((-3, -2, -1))


def _window(smallest: int, like: Tensor) -> Tensor:
    size = min(WINDOW, smallest if smallest % 2 else smallest - 1)
    offsets = torch.arange(size, dtype=like.dtype, device=like.device) - size // 2
    line = torch.exp(-offsets.square() / (2 * SIGMA**2))
    return line / line.sum()


def _blur(images: Tensor, line: Tensor) -> Tensor:
    """The window as two passes, along rows and along columns."""
    n, channels, height, width = images.shape
    flat = images.reshape(n * channels, 1, height, width)
    flat = F.conv2d(F.conv2d(flat, line.view(1, 1, -1, 1)), line.view(1, 1, 1, -1))
    return flat.view(n, channels, *flat.shape[-2:])


class Match(NamedTuple):
    """For each image the highest PSNR, the highest SSIM, and which candidate that was."""

    psnr: Tensor
    ssim: Tensor
    which: Tensor


def best_match(images: Tensor, candidates: Tensor) -> Match:
    """The best of all candidates for each image: the worst case of the paper's section 3.5."""
    found = []
    for image in images:
        same = image.expand_as(candidates)
        structure = ssim(same, candidates)
        found.append((psnr(same, candidates).max(), structure.max(), structure.argmax()))
    columns = list(zip(*found, strict=True))
    return Match(*(torch.stack(column) for column in columns))


class Nearest(NamedTuple):
    """For each image the distance to the nearest candidate, and which one that is."""

    distance: Tensor
    which: Tensor


def nearest(images: Tensor, candidates: Tensor) -> Nearest:
    """By ``distances``."""
    return Nearest(*distances(images, candidates).min(1))


def distances(images: Tensor, candidates: Tensor) -> Tensor:
    """The root of the mean squared difference of pixels [n,m], for images [n,C,H,W] and [m,C,H,W]."""
    values = images[0].numel() if len(images) else 1
    flat = images.flatten(1).double(), candidates.flatten(1).double()
    exact = "donot_use_mm_for_euclid_dist"  # by products of matrices equal images would lie apart
    apart: Tensor = torch.cdist(*flat, compute_mode=exact) / values**0.5
    return apart


class Decoder(nn.Module):
    """Tokens [n,L,D] to images [n,C,R,R] in [0,1]: two linear layers, then two convolutions with upsampling."""

    centre: Tensor
    spread: Tensor

    def __init__(self, inputs: int, channels: int, pixels: int, width: int = 64) -> None:
        super().__init__()
        self.pixels, self.side = pixels, max(1, -(-pixels // 4))
        self.register_buffer("centre", torch.zeros(inputs))
        self.register_buffer("spread", torch.ones(inputs))
        self.expand = nn.Sequential(
            nn.Linear(inputs, 512),
            nn.GELU(),
            nn.Linear(512, width * self.side**2),
            nn.Unflatten(1, (width, self.side, self.side)),
        )
        self.paint = nn.Sequential(
            nn.GELU(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(width, width // 2, 3, padding=1),
            nn.GELU(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(width // 2, channels, 3, padding=1),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Images in [0,1]."""
        x = (tokens.reshape(len(tokens), -1) - self.centre) / self.spread
        out: Tensor = self.paint(self.expand(x))[..., : self.pixels, : self.pixels]
        return torch.sigmoid(out)


@dataclass(frozen=True)
class AttackSettings:
    """How hard the attacker tries."""

    epochs: int = 200
    batch: int = 64
    lr: float = 1e-3
    held_out: float = 0.2  # of the attacker's own images: chooses the epoch, and stands in for "other people"
    seed: int = 0


class Attacker(NamedTuple):
    """A trained decoder, the rows of the attacker's images that it never trained on, and its losses there by epoch."""

    decoder: Decoder
    held_rows: Tensor
    losses: list[float]


def train_attacker(tokens: Tensor, images: Tensor, settings: AttackSettings, device: str = "cpu") -> Attacker:
    """Least squares on the attacker's own pairs, the loss that PSNR rewards; the best epoch on held-out pairs."""
    if len(tokens) != len(images) or len(tokens) < 5:
        raise ValueError(f"the attacker needs at least five pairs, got {len(tokens)} tokens and {len(images)} images")
    rng = torch.Generator().manual_seed(stream_seed(settings.seed, "reconstruction attack"))
    order = torch.randperm(len(tokens), generator=rng)
    held = max(1, round(settings.held_out * len(tokens)))
    held_rows, rows = order[:held], order[held:]
    with torch.device("meta"):  # torch's constructors would draw from the global random state
        decoder = Decoder(tokens[0].numel(), images.shape[1], images.shape[-1])
    decoder = decoder.to_empty(device="cpu")
    flat = tokens[rows].reshape(len(rows), -1).float()
    decoder.centre = flat.mean(0)
    decoder.spread = flat.std(0).clamp_min(1e-6)
    _initialise(decoder, rng)
    decoder = decoder.to(device)
    x, y = tokens.float().to(device), images.float().to(device)
    optimiser = torch.optim.Adam(decoder.parameters(), lr=settings.lr)
    losses: list[float] = []
    best: dict[str, Tensor] = {}
    for _ in range(settings.epochs):
        decoder.train()
        for chosen in torch.split(rows[torch.randperm(len(rows), generator=rng)], settings.batch):
            loss = F.mse_loss(decoder(x[chosen]), y[chosen])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        losses.append(float(F.mse_loss(decode(decoder, x[held_rows]), y[held_rows])))
        if losses[-1] == min(losses):
            best = {name: value.clone() for name, value in decoder.state_dict().items()}
    decoder.load_state_dict(best)
    return Attacker(decoder.eval(), held_rows, losses)


@torch.no_grad()
def _initialise(decoder: Decoder, rng: torch.Generator) -> None:
    """Uniform in ±1/√fan_in from the attack's own stream: torch's global state is nobody's to use."""
    for module in decoder.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            bound = module.weight[0].numel() ** -0.5
            for tensor in (module.weight, module.bias):
                if tensor is not None:
                    tensor.copy_((2 * torch.rand(tensor.shape, generator=rng) - 1) * bound)


@torch.no_grad()
def decode(decoder: Decoder, tokens: Tensor, batch: int = 512) -> Tensor:
    """Reconstructions, in evaluation mode."""
    decoder.eval()
    device = next(decoder.parameters()).device
    parts = [decoder(part.float().to(device)) for part in torch.split(tokens, batch)]
    return torch.cat(parts)


class Score(NamedTuple):
    """Means over the client's images."""

    psnr: float
    ssim: float


@dataclass(frozen=True)
class AttackResult:
    """Table 5 and its controls; ``pictures`` [rows,4,C,R,R]: original, from real tokens, best synthetic, mean image."""

    real: Score
    synthetic: Score
    shuffled: Score  # control: real reconstructions, each held against another image of the client
    mean_image: Score  # control: one image for all, no tokens
    others: Score  # control: the best of as many decoded tokens of people who are not at this client
    candidates: int  # how many reconstructions the best was taken of, for synthetic and others alike
    images: int
    pictures: Tensor

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        names = ("real", "synthetic", "shuffled", "mean_image", "others")
        scores = {name: dict(getattr(self, name)._asdict()) for name in names}
        return {**scores, "candidates": self.candidates, "images": self.images}


def attack(
    attacker: Attacker,
    own_tokens: Tensor,
    own_images: Tensor,
    real: Tensor,
    images: Tensor,
    synthetic: Tensor,
    seed: int = 0,
) -> AttackResult:
    """The attacker (with his ``own_`` pairs) against a client's ``images``, from its real and its synthetic tokens."""
    if len(images) < 2:
        raise ValueError("the attack compares images with each other: a client with one image cannot be measured")
    rng = torch.Generator().manual_seed(stream_seed(seed, "reconstruction attack", "choice"))
    device = next(attacker.decoder.parameters()).device
    images = images.float().to(device)
    count = min(len(synthetic), len(attacker.held_rows))
    chosen = synthetic[torch.randperm(len(synthetic), generator=rng)[:count]]
    strangers = own_tokens[attacker.held_rows[torch.randperm(len(attacker.held_rows), generator=rng)[:count]]]
    rebuilt = decode(attacker.decoder, real)
    invented = decode(attacker.decoder, chosen)
    best = best_match(images, invented)
    mean = own_images.float().mean(0, keepdim=True).to(device).expand_as(images)
    shifted = rebuilt.roll(1, 0)
    shown = slice(0, 8)
    columns = [images[shown], rebuilt[shown], invented[best.which[shown]], mean[shown]]
    return AttackResult(
        real=_score(images, rebuilt),
        synthetic=_mean_of(best),
        shuffled=_score(images, shifted),
        mean_image=_score(images, mean),
        others=_mean_of(best_match(images, decode(attacker.decoder, strangers))),
        candidates=count,
        images=len(images),
        pictures=torch.stack(columns, 1).cpu(),
    )


def _score(images: Tensor, rebuilt: Tensor) -> Score:
    return Score(float(psnr(images, rebuilt).mean()), float(ssim(images, rebuilt).mean()))


def _mean_of(match: Match) -> Score:
    return Score(float(match.psnr.mean()), float(match.ssim.mean()))


def to_unit_range(images: Tensor, pixels: int) -> Tensor:
    """uint8 [n,C,H,W] to [0,1], shrunk by area to at most ``pixels`` a side."""
    out = images.float() / 255
    return out if out.shape[-1] <= pixels else F.interpolate(out, size=(pixels, pixels), mode="area")
