"""What the synthetic features of a finished run are worth and give away: FALCON's Tables 4 and 5, Fig. 5, section 3.6.

Everything is computed from the uploads as they lie in the run's folder, so that what is measured is what left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedbicross import pipeline, steps
from fedbicross.atomic import write_atomic
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Context, Progress, Silent, Task
from fedbicross.data import test_images
from fedbicross.engine.images import grid_png
from fedbicross.errors import ConfigError, RunError, nearest
from fedbicross.evaluate import mmd, reconstruction
from fedbicross.messages import Client, Upload, file_name
from fedbicross.methods.base import SyntheticFeatures
from fedbicross.report import text
from fedbicross.runs.config import RunConfig
from fedbicross.runs.runner import check_partition, make_clients, prepare, stored_config
from fedbicross.runs.store import RunFolder

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SCHEMA = 1
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


def audit(
    out: Path,
    methods: Sequence[str] = (),
    clients: Sequence[str] = (),
    settings: AuditSettings | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the run in ``out`` and write audit.json, tables/audit.md and audit/*.png into it.

    Without names, every method of the run that sends synthetic features, and of each the client with most images.
    """
    settings, progress = settings or AuditSettings(), progress or Silent()
    config = stored_config(out)
    chosen = _methods(config, methods)
    with RunFolder(out) as folder:
        prepared = prepare(config)
        check_partition(folder, prepared)
        seed = config.seeds[0]
        dataset, partition = prepared.dataset, prepared.partitions[seed]
        task = Task(tuple(dataset.classes), dataset.image_size, dataset.channels, config.model)
        everyone, _ = make_clients(dataset, partition)
        own = test_images(dataset, partition)
        attacks: dict[str, Attack] = {}
        rows: list[dict[str, Any]] = []
        for spec, method in chosen.items():
            scope = f"seed-{seed}/{spec.replace(':', '+')}"
            ctx = Context(
                task, config.training, seed, prepared.device, scope=scope, store=folder.store, progress=progress
            )
            views = method.views(task.image_size)
            key = canonical_json([views.as_json(), method.pools_tokens])
            for client in _clients(everyone, clients):
                progress.say(f"== {spec}, {client.name}")
                upload, size = _upload(folder, scope, client)
                pipeline.check_upload(config.build(spec), upload, task)
                if key not in attacks:
                    tokens = _as_sent(method, ctx.features(own, views))
                    attacks[key] = _attacker(own, tokens, settings, ctx)
                row, pictures = measure(method, client, upload, attacks[key], settings, ctx)
                rows.append({"method": spec, "seed": seed, "client": client.name, "upload_bytes": size, **row})
                if pictures:
                    write_atomic(out / "audit" / f"{scope.partition('/')[2]}-{file_name(client.name)}.png", pictures)
        results = {"schema": SCHEMA, "settings": vars(settings), "rows": rows}
        write_atomic(out / "audit.json", canonical_json(results).encode())
        write_atomic(out / "tables" / "audit.md", markdown(results).encode())
    return results


def _methods(config: RunConfig, names: Sequence[str]) -> dict[str, SyntheticFeatures]:
    built = {spec: config.build(spec) for spec in config.all_methods()}
    able = {spec: method for spec, method in built.items() if isinstance(method, SyntheticFeatures)}
    for name in names:
        if name not in able:
            what = "sends no synthetic features" if name in built else "is no method of this run"
            raise ConfigError("audit_method", f"{name!r} {what}{nearest(name, able)}")
    if not able:
        raise ConfigError("audit_method", "no method of this run sends synthetic features (falcon, fedpft)")
    return {spec: method for spec, method in able.items() if not names or spec in names}


def _clients(everyone: Sequence[Client], names: Sequence[str]) -> list[Client]:
    known = {client.name: client for client in everyone}
    for name in names:
        if name not in known:
            raise ConfigError("audit_client", f"no client {name!r} in this run{nearest(name, known)}")
    return [known[name] for name in names] or [max(everyone, key=lambda client: len(client.labels))]


def _upload(folder: RunFolder, scope: str, client: Client) -> tuple[Upload, int]:
    data = folder.store.load(f"uploads/{scope}/{file_name(client.name)}.safetensors")
    if data is None:
        raise RunError("no_upload", f"{folder.path} holds no upload of {client.label!r}; resume the run first")
    return Upload.unpack(data), len(data)


def _attacker(own: np.ndarray, tokens: Tensor, settings: AuditSettings, ctx: Context) -> Attack:
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
    real, labels = _as_sent(method, tokens), torch.from_numpy(client.labels)
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


def _as_sent(method: SyntheticFeatures, tokens: Tensor) -> Tensor:
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


HEADER = (
    "method",
    "client",
    "MMD² ×1000",
    "within classes",
    "real halves",
    "PSNR / SSIM from real tokens",
    "best synthetic",
    "best of other people",
    "mean image",
    "wrong image",
    "cosine > 0.999 (strangers)",
    "per sample",
    "upload",
)


def table(results: Mapping[str, Any]) -> list[list[str]]:
    """A row of text for each measured client."""
    return [_cells(row) for row in results["rows"]]


def _cells(row: Mapping[str, Any]) -> list[str]:
    distance = [row["mmd"][key] for key in ("synthetic", "within_classes", "real_halves")]
    attack = row["attack"] or {}
    scores = [attack.get(key) for key in ("real", "synthetic", "others", "mean_image", "shuffled")]
    copies = row["copies"]
    return [
        row["method"],
        row["client"],
        *("n/a" if value is None else f"{1000 * value:.3f}" for value in distance),
        *("n/a" if score is None else f"{score['psnr']:.1f} dB / {score['ssim']:.3f}" for score in scores),
        f"{copies['above_0.999']} ({copies['strangers_above_0.999']})",
        text.flops(row["cost"].get("flops_per_sample")),
        text.size(row["upload_bytes"]),
    ]


def markdown(results: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    rows = [HEADER, ["---"] * len(HEADER), *table(results)]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |\n" for row in rows)
