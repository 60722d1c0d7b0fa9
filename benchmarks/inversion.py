"""What the batch-norm term of a synthesis weighs: `python -m benchmarks.inversion --data-dir DIR [--out FILE]`.

One network per architecture and initialisation, trained on Blood; then one batch is inverted from it with each way to
measure the distance of batch-norm statistics. Counted is what the network itself says of the finished images. A term
that means the same for every architecture and initialisation gives the same picture in every row.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, get_args

from fedbicross import models, seeds
from fedbicross.data import load_dataset
from fedbicross.engine.device import normalise, to_device
from fedbicross.engine.ensemble import Ensemble
from fedbicross.engine.norm import BNDistance
from fedbicross.engine.recipe import Training
from fedbicross.engine.train import train_together, training
from fedbicross.models import InitScheme
from fedbicross.runs.environment import versions
from fedbicross.steps.inversion import Inversion, InversionSettings, balanced_labels

ARCHITECTURES = ("resnet8", "vgg8")
RECIPE = Training(recipe="modern", epochs=6, batch_size=64)
SETTINGS = InversionSettings(steps=300, batch=64)
IMAGES = 4000


def measure(architecture: str, scheme: InitScheme, data: Any, seed: int) -> list[dict[str, Any]]:
    model = models.build(architecture, data.channels, len(data.classes), data.image_size)
    models.initialise(model, seeds.torch_rng(seed, "init"), scheme)
    split = data.train
    given = (model, architecture, split.images, split.labels, None, RECIPE)
    (trained,) = train_together([training(*given, seed=seed, stream=("inversion",))])
    model.load_state_dict(trained.state)
    real = normalise(to_device(data.test.images[:256], "cpu"))
    labels = balanced_labels(SETTINGS.batch, len(data.classes))
    rows = []
    for distance in get_args(BNDistance):
        ensemble = Ensemble([model], bn_distance=distance)
        shape = (data.channels, data.image_size, data.image_size)
        run = Inversion.start(ensemble, labels, shape, SETTINGS, seeds.torch_rng(seed, "synthesis"))
        losses = [run.step() for _ in range(SETTINGS.steps)]
        said = ensemble.logits(run.images)[0].argmax(1)
        rows.append(
            {
                "architecture": architecture,
                "init_scheme": scheme,
                "bn_distance": distance,
                "seed": seed,
                "validation": trained.history[trained.best_epoch - 1]["val_accuracy"],
                "term_of_noise": float(losses[0].batch_norm),
                "term_of_real_images": float(ensemble.logits_and_bn_loss(real)[1]),
                "term_at_the_end": float(losses[-1].batch_norm),
                "cross_entropy_at_the_end": float(losses[-1].cross_entropy),
                "loss_at_the_end": float(losses[-1].total),
                "recognised": float((said == labels).float().mean()),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inversion", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/inversion.json"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    data = load_dataset("bloodmnist", data_dir=given.data_dir, train_size=IMAGES, test_size=1000)
    began, rows = time.perf_counter(), []
    for architecture in ARCHITECTURES:
        for scheme in get_args(InitScheme):
            for seed in given.seeds:
                rows += measure(architecture, scheme, data, seed)
    settings = {"images": IMAGES, "training": RECIPE.model_dump(), "synthesis": vars(SETTINGS)}
    stored = {"settings": settings, "rows": rows, "versions": versions("cpu")}
    given.out.write_text(json.dumps(stored, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"{given.out}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
