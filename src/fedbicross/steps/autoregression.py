"""FALCON's generator of token sequences: multi-scale autoregression with a mixture density head (Eqs. 2-5).

``p(s | y) = p(s0 | y) · Π_l p(s_l | y, s0)``, every factor a mixture of K diagonal Gaussians. Input and mask of the
three schemes, for a sequence s0 (whole image), s1 … sL (windows):

=======  ==================================  ==========================================================
scheme   inputs at positions 0 … L           who sees whom
=======  ==================================  ==========================================================
``mar``  y, s0, s0, … s0                     y sees itself; windows see y and each other's copy of s0
``ar``   y, s0, s1, … s(L-1)                 every position sees itself and those before it
``nar``  y, y, … y                           everybody sees everybody, and nobody sees a token
=======  ==================================  ==========================================================

Position t predicts token t. Positions are told apart by a sinusoidal code.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

Scheme = Literal["mar", "ar", "nar"]

LEAST = 16  # images of a class whose mean and spread may be told: of fewer a mean would give too much away
DRAWS, LEAST_DRAWS = 4, 1000  # drawn sequences per real one, and per class, whose mean and spread are compared
MOST_GAIN = 10.0  # and its inverse: by how much a spread is changed at most


def attention_mask(scheme: Scheme, length: int) -> Tensor:
    """Who sees whom: [length, length] booleans, row t true where position t may look."""
    if scheme == "nar":
        return torch.ones(length, length, dtype=torch.bool)
    block = torch.arange(length) if scheme == "ar" else (torch.arange(length) > 0).long()
    return block.unsqueeze(1) >= block.unsqueeze(0)


class TokenMixture(NamedTuple):
    """A mixture of K diagonal Gaussians per position: log weights [..., K], means and log-variances [..., K, dim]."""

    log_weights: Tensor
    means: Tensor
    log_variances: Tensor

    def log_density(self, tokens: Tensor) -> Tensor:
        """log Σ_k π_k N(s | μ_k, Σ_k) of tokens [..., dim] (Eqs. 3 and 4)."""
        difference = tokens.unsqueeze(-2) - self.means
        exponent = difference.square() * torch.exp(-self.log_variances) + self.log_variances
        each = -0.5 * (exponent.sum(-1) + tokens.shape[-1] * math.log(2 * math.pi))
        return torch.logsumexp(self.log_weights + each, dim=-1)

    def sample(self, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
        """One token per position: a component by its weight, then a point of it; temperature scales its spread."""
        flat = self.log_weights.flatten(0, -2)
        # Gumbel's maximum: an exact draw from the weights in one pass, for any number of positions.
        uniform = torch.rand(flat.shape, generator=generator, device=flat.device).clamp(1e-20, 1 - 1e-7)
        chosen = (flat - torch.log(-torch.log(uniform))).argmax(-1)
        rows = torch.arange(len(chosen), device=chosen.device)
        mean = self.means.flatten(0, -3)[rows, chosen]
        spread = torch.exp(0.5 * self.log_variances.flatten(0, -3)[rows, chosen])
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        return (mean + temperature * spread * noise).view(*self.log_weights.shape[:-1], mean.shape[-1])


def bounded(values: Tensor, low: float, high: float) -> Tensor:
    """Values kept between two bounds smoothly, so that the gradient never dies at a bound."""
    return low + F.softplus(high - F.softplus(high - values) - low)


def positions(length: int, width: int) -> Tensor:
    """The sinusoidal code of positions 0 … length-1, [length, width] (Vaswani et al., 2017)."""
    place = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    code = torch.zeros(length, width)
    code[:, 0::2] = torch.sin(place * rate)
    code[:, 1::2] = torch.cos(place * rate)[:, : width // 2]
    return code


class Block(nn.Module):
    """A pre-normalised transformer block."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Hidden states [n, T, width]."""
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        out: Tensor = x + self.contract(F.gelu(self.expand(self.norm2(x))))
        return out


class Scale(nn.Module):
    """The scale on which tokens are modelled, z = (s - shift) / scale, by class, position and feature; measured.

    With ``calibrated`` there is a second one for drawn tokens: z <- offset + gain z, while still on the model's scale.
    """

    def __init__(self, classes: int, length: int, dim: int, calibrated: bool = False) -> None:
        super().__init__()
        self.calibrated = calibrated
        for name, value in {"shift": 0.0, "scale": 1.0, **({"offset": 0.0, "gain": 1.0} if calibrated else {})}.items():
            self.register_buffer(name, torch.full((classes, length, dim), value))

    def fill(self, generator: torch.Generator) -> None:
        """Tokens as they are."""
        for name, buffer in self.named_buffers():
            buffer.fill_(1 if name in ("scale", "gain") else 0)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Tokens [n, T, dim] on the model's scale."""
        return (tokens - self.get_buffer("shift")[labels]) / self.get_buffer("scale")[labels]

    def inverse(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Drawn tokens back to the encoder's scale."""
        if self.calibrated:
            tokens = tokens * self.get_buffer("gain")[labels] + self.get_buffer("offset")[labels]
        return tokens * self.get_buffer("scale")[labels] + self.get_buffer("shift")[labels]

    @torch.no_grad()
    def measure(self, tokens: Tensor, labels: Tensor, by_class: bool = True, least: int = LEAST) -> None:
        """Mean and spread of tokens [n, T, dim], by class where it has ``least`` images, else over all classes.

        With fewer in all, tokens are left as they are.
        """
        if len(tokens) < least:
            return
        shift, scale = self.get_buffer("shift"), self.get_buffer("scale")
        for label in range(len(shift)):
            own = tokens[labels == label] if by_class else tokens
            chosen = own if len(own) >= least else tokens
            shift[label] = chosen.mean(0)
            spread = chosen.std(0)
            # A dead feature stays (nearly) constant.
            scale[label] = spread.maximum(1e-2 * spread.square().mean().sqrt().clamp_min(1e-6))


class TokenGenerator(nn.Module):
    """g(·; θ): a transformer with a mixture density head over token sequences, conditioned on the class."""

    def __init__(
        self,
        dim: int,
        length: int,
        classes: int,
        *,
        scheme: Scheme = "mar",
        width: int = 768,
        layers: int = 4,
        heads: int = 16,
        hidden: int = 768,
        components: int = 20,
        log_variance: tuple[float, float] = (-4.0, 6.0),
        calibrated: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.length, self.classes, self.scheme = dim, length, classes, scheme
        self.components, self.log_variance = components, log_variance
        self.scale = Scale(classes, length, dim, calibrated)
        self.condition = nn.Linear(classes, width)
        self.embed = nn.Identity() if dim == width else nn.Linear(dim, width)
        self.blocks = nn.ModuleList([Block(width, heads, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.mixture = nn.Linear(width, components * (1 + 2 * dim))
        self.width = width

    def forward(self, tokens: Tensor, labels: Tensor) -> TokenMixture:
        """The mixtures at every position, given tokens [n, T, dim] on the model's scale and classes [n].

        The position of a token never sees the token itself; tokens that no position may look at yet can be anything.
        """
        hidden = self._inputs(tokens, labels) + positions(self.length, self.width).to(tokens.device)
        mask = attention_mask(self.scheme, self.length).to(tokens.device)
        for block in self.blocks:
            hidden = block(hidden, mask)
        raw = self.mixture(self.norm(hidden)).float()
        weights, means, log_variances = raw.split(
            [self.components, self.components * self.dim, self.components * self.dim], dim=-1
        )
        shape = (*raw.shape[:2], self.components, self.dim)
        return TokenMixture(
            F.log_softmax(weights, dim=-1),
            means.reshape(shape),
            bounded(log_variances.reshape(shape), *self.log_variance),
        )

    def _inputs(self, tokens: Tensor, labels: Tensor) -> Tensor:
        condition: Tensor = self.condition(F.one_hot(labels, self.classes).to(tokens.dtype)).unsqueeze(1)
        if self.length == 1:
            return condition
        if self.scheme == "nar":
            return condition.expand(-1, self.length, -1)
        seen = tokens[:, :-1] if self.scheme == "ar" else tokens[:, :1].expand(-1, self.length - 1, -1)
        return torch.cat([condition, self.embed(seen)], dim=1)

    def nll(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Eq. 5 for each sequence [n], on the model's scale: -log p(s0|y) - Σ_l log p(s_l | y, s0)."""
        scaled: Tensor = self.scale(tokens, labels)
        mixture: TokenMixture = self(scaled, labels)
        return -mixture.log_density(scaled).sum(-1)

    @torch.no_grad()
    def sample(self, labels: Tensor, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
        """Sequences [n, T, dim] for classes [n]; the token s0 for which windows were drawn stays in their sequence."""
        out: Tensor = self.scale.inverse(self._sample(labels, generator, temperature), labels)
        return out

    def _sample(self, labels: Tensor, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
        """The same on the model's scale."""
        tokens = torch.zeros(len(labels), self.length, self.dim, device=labels.device)
        if self.scheme == "nar":
            tokens = self(tokens, labels).sample(generator, temperature)
        else:
            blocks = [(t, t + 1) for t in range(self.length)] if self.scheme == "ar" else [(0, 1), (1, self.length)]
            for start, stop in blocks:
                if start < stop:
                    drawn = self(tokens, labels).sample(generator, temperature)
                    tokens[:, start:stop] = drawn[:, start:stop]
        return tokens

    @torch.no_grad()
    def calibrate(self, tokens: Tensor, labels: Tensor, generator: torch.Generator, chunk: int = 2048) -> int:
        """Give drawn tokens the mean and spread of real ones [n, T, dim]; by class, position and feature.

        Windows are drawn for a drawn s0, a little off the real ones, and so their mean drifts; the likelihood of Eq. 5,
        in which windows see the real s0, cannot notice. Returns how many sequences were drawn.
        """
        offset, gain = self.scale.get_buffer("offset"), self.scale.get_buffer("gain")
        scaled, drawn = self.scale(tokens, labels), 0
        for label in range(self.classes):
            real = scaled[labels == label]
            if len(real) < LEAST:
                continue
            asked = labels.new_full((max(DRAWS * len(real), LEAST_DRAWS),), label)
            made = torch.cat([self._sample(part, generator) for part in torch.split(asked, chunk)])
            gain[label] = (real.std(0) / made.std(0).clamp_min(1e-6)).clamp(1 / MOST_GAIN, MOST_GAIN)
            offset[label] = real.mean(0) - gain[label] * made.mean(0)
            drawn += len(made)
        return drawn

    def draw(self, labels: Tensor, generator: torch.Generator, chunk: int = 2048) -> Tensor:
        """``sample`` for any number of classes, in pieces that fit in memory; the result is on the CPU."""
        place = self.mixture.weight.device
        return torch.cat([self.sample(part.to(place), generator).cpu() for part in torch.split(labels, chunk)])

    @property
    def flops(self) -> int:
        """Operations of one pass over one sequence."""
        place = self.mixture.weight.device
        tokens, label = torch.zeros(1, self.length, self.dim, device=place), torch.zeros(1, device=place).long()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self(tokens, label)
        return int(counter.get_total_flops())

    @property
    def sampling_flops(self) -> int:
        """Operations of one synthetic sequence: one pass for each block of positions."""
        return self.flops * {"nar": 1, "mar": min(2, self.length), "ar": self.length}[self.scheme]
