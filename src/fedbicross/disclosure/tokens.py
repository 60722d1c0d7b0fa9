"""What synthetic features in an upload are worth and give away: FALCON's Tables 4 and 5, Fig. 5, section 3.6."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedbicross import steps
from fedbicross.context import Context
from fedbicross.engine.images import grid_png
from fedbicross.evaluate import mmd, reconstruction
from fedbicross.messages import Client, Upload
from fedbicross.methods.base import SyntheticFeatures

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

COPY = 0.999  # cosine from which a synthetic token counts as a copy of a real one


@dataclass(frozen=True)
class AuditSettings:
    """How much is measured."""

    sequences: int = 2000  # at most, on each side of the MMD
    images: int = 200  # of a client, at most, that the attacker tries to rebuild
    pixels: int = 32  # per side of what the attacker rebuilds
    epochs: int = 100  # of the attacker's training
    seed: int = 0


@dataclass(frozen=True)
class Attack:
    """The attacker with one encoder: his decoder, and the images and tokens of his own."""

    attacker: reconstruction.Attacker
    tokens: Tensor
    images: Tensor


def train_attacker(own: np.ndarray, tokens: Tensor, settings: AuditSettings, ctx: Context) -> Attack:
    """The attacker owns the test images: of the same kind, and nobody trained on them."""
    images = _pixels(own, settings)
    ctx.progress.say(f"training the attacker's decoder on {len(own)} images of his own")
    attack = reconstruction.AttackSettings(epochs=settings.epochs, seed=settings.seed)
    return Attack(reconstruction.train_attacker(tokens, images, attack, ctx.device), tokens, images)


def _pixels(images: np.ndarray, settings: AuditSettings) -> Tensor:
    return reconstruction.to_unit_range(torch.from_numpy(images).permute(0, 3, 1, 2), settings.pixels)


def measure(
    method: SyntheticFeatures, client: Client, upload: Upload, attack: Attack, settings: AuditSettings, ctx: Context
) -> tuple[dict[str, Any], bytes]:
    """One client's numbers, and a picture of the attack."""
    synthetic, made = method.synthetic_tokens(upload, ctx)
    synthetic, made = synthetic.cpu().float(), made.cpu()
    tokens = ctx.features(client, method.views(ctx.task.image_size))
    real, labels = as_sent(method, tokens), torch.from_numpy(client.labels)
    rng = torch.Generator().manual_seed(settings.seed)
    rows = torch.randperm(len(real), generator=rng)[: settings.images]
    found: dict[str, Any] = {
        "real_sequences": len(real),
        "synthetic_sequences": len(synthetic),
        "mmd": _mmd(real, labels, synthetic, made, settings.sequences, rng),
        "copies": _copies(synthetic, real, attack.tokens),
        "cost": _cost(method, upload, synthetic),
    }
    found["attack"], pictures = None, b""
    if len(real) > 1 and len(synthetic):
        result = reconstruction.attack(
            attack.attacker,
            attack.tokens,
            attack.images,
            real[rows],
            _pixels(client.images[rows.numpy()], settings),
            synthetic,
            settings.seed,
        )
        found["attack"], pictures = result.as_json(), _png(result.pictures)
    return found, pictures


def as_sent(method: SyntheticFeatures, tokens: Tensor) -> Tensor:
    """Real tokens in the form in which the method models them: sequences, or one pooled feature per image."""
    return tokens.mean(1, keepdim=True) if method.pools_tokens else tokens


def _mmd(real: Tensor, labels: Tensor, synthetic: Tensor, made: Tensor, most: int, rng: Any) -> dict[str, Any]:
    """Table 4, within classes too, and as its floor the same between two halves of the real sequences."""
    order = torch.randperm(len(real), generator=rng)[:most]
    real, labels = real[order], labels[order]
    drawn = torch.randperm(len(synthetic), generator=rng)[:most]
    synthetic, made = synthetic[drawn], made[drawn]
    bandwidth = mmd.median_distance(real)
    enough = len(real) > 3 and len(synthetic) > 1
    half = len(real) // 2
    return {
        "bandwidth": bandwidth,
        "synthetic": mmd.mmd_squared(real, synthetic, bandwidth) if enough else None,
        "within_classes": mmd.mmd_within_classes(real, labels, synthetic, made, bandwidth),
        "real_halves": mmd.mmd_squared(real[:half], real[half:], bandwidth) if enough else None,
    }


def _copies(synthetic: Tensor, real: Tensor, strangers: Tensor) -> dict[str, Any]:
    """How close a synthetic token comes to a real one of the client; beside it, how close strangers' tokens come."""

    def closest_to_real(tokens: Tensor) -> list[Tensor]:
        places = range(real.shape[1] if len(synthetic) else 0)
        return [steps.tokens.nearest_cosine(tokens[:, i : i + 1].double(), real[:, i].double()) for i in places]

    closest, others = closest_to_real(synthetic), closest_to_real(strangers[: len(synthetic)])
    return {
        "above_0.999": sum(int((cosine > COPY).sum()) for cosine in closest),
        "highest_cosine": max((float(cosine.max()) for cosine in closest), default=None),
        "strangers_above_0.999": sum(int((cosine > COPY).sum()) for cosine in others),
        "strangers_highest_cosine": max((float(cosine.max()) for cosine in others), default=None),
    }


def _cost(method: SyntheticFeatures, upload: Upload, synthetic: Tensor) -> dict[str, Any]:
    """Fig. 5 and section 3.6: each client sends whichever is smaller, so that the generator bounds the cost."""
    count, length, width = synthetic.shape
    each = 4 * length * width  # bytes: 15 KiB for the paper's 5 tokens of 768 numbers
    found: dict[str, Any] = {"sequences_bytes": count * each, "flops_per_sample": method.sample_flops(upload)}
    generator = method.generator_of(upload)
    if generator is not None:
        size = sum(value.numel() * value.element_size() for value in generator.state_dict().values())
        found |= {
            "generator_bytes": size,
            "break_even_sequences": size // each,
            "cheaper": "sequences" if count * each <= size else "generator",
            "sent": upload.extra.get("form"),
        }
    return found


def _png(pictures: Tensor) -> bytes:
    """Columns: original, from real tokens, the best from synthetic ones, the mean image."""
    return grid_png((pictures.clamp(0, 1) * 255).round().byte().permute(0, 1, 3, 4, 2).numpy())
