"""Drawn cells of a site, its held-out images and strangers; networks that know them by heart, or not at all."""

from __future__ import annotations

from functools import cache

import numpy as np

from fedbicross.context import Context, Task
from fedbicross.data.cells import load_cells
from fedbicross.disclosure.effort import Effort, effort
from fedbicross.engine.recipe import Training
from fedbicross.messages import Client, Upload
from fedbicross.methods.ensemble import EnsembleMethod

SIZE = 8
TRAINED, HELD_OUT = 60, 120
CLASSES = 100
# By heart: one of a hundred labels drawn by lot, which nothing but memory can know; no augmentation, many passes.
BY_HEART = {"recipe": "modern", "epochs": 60, "batch_size": 16, "lr": 0.1, "augment": False, "weight_decay": 0.0}
SMALL: Effort = effort(quick=True, shadows=4, images=HELD_OUT, canaries=HELD_OUT, inverted=8, steps=3, epochs=60)


@cache
def people() -> dict[str, Client]:
    """Images to train on, images held out, and images of strangers, all of one kind."""
    cells = load_cells(SIZE, 0, TRAINED + 2 * HELD_OUT, 8)
    labels = np.random.default_rng(0).integers(0, CLASSES, len(cells.train.labels))
    ends = {"site": (0, TRAINED), "held out": (TRAINED, TRAINED + HELD_OUT), "strangers": (TRAINED + HELD_OUT, None)}
    return {name: Client("site", cells.train.images[slice(*rows)], labels[slice(*rows)]) for name, rows in ends.items()}


def context(**training: object) -> Context:
    task = Task(tuple(f"class-{number}" for number in range(CLASSES)), SIZE, 3, "cnn")
    return Context(task, Training(**{**BY_HEART, "validation": 0.0, **training}))  # type: ignore[arg-type]


def upload_of(who: str, ctx: Context) -> Upload:
    """The network that these people's images make, in the name of the site."""
    return EnsembleMethod(EnsembleMethod.Config()).upload(people()[who], ctx)
