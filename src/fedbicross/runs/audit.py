"""What the synthetic features of a finished run are worth and give away: FALCON's Tables 4 and 5, Fig. 5, section 3.6.

Everything is computed from the uploads as they lie in the run's folder, so that what is measured is what left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbicross import pipeline
from fedbicross.atomic import write_atomic
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Context, Progress, Silent, Task
from fedbicross.data import test_images
from fedbicross.disclosure import tokens
from fedbicross.disclosure.tokens import AuditSettings
from fedbicross.errors import ConfigError, RunError, nearest
from fedbicross.messages import Client, Upload, file_name
from fedbicross.methods.base import SyntheticFeatures
from fedbicross.report import text
from fedbicross.runs.config import RunConfig
from fedbicross.runs.runner import check_partition, make_clients, prepare, stored_config
from fedbicross.runs.store import RunFolder

SCHEMA = 1


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
        attacks: dict[str, tokens.Attack] = {}
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
                    features = tokens.as_sent(method, ctx.features(own, views))
                    attacks[key] = tokens.train_attacker(own, features, settings, ctx)
                row, pictures = tokens.measure(method, client, upload, attacks[key], settings, ctx)
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
