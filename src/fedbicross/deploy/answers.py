"""Probabilities of image files as CSV: a batch at a time, whatever the files are (PNG, JPEG, DICOM, NIfTI, …)."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedbicross.context import Progress, Silent
from fedbicross.parts import class_mix
from fedbicross.report.tables import csv_text
from fedbicross.transport import site_data

if TYPE_CHECKING:
    from fedbicross.messages import Predictor

BATCH = 256  # images read and answered at a time


def as_csv(
    predictor: Predictor,
    paths: Sequence[Path],
    device: str = "cpu",
    progress: Progress | None = None,
    adapt_prior: bool = False,
) -> str:
    """One line an image, or a slice of a volume: its path, the likeliest class, and the probability of each class.

    ``adapt_prior``: under the class mix of these very images, for models that can be given one.
    """
    places = site_data.pictures_in(paths)
    if adapt_prior:
        predictor = class_mix.adapt_prior(predictor, site_data.read_files(places, predictor.task), device)
    classes = predictor.task.classes
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(csv_text, ("image", "predicted", *classes)))
    update = (progress or Silent()).start("predicting", len(places))
    for start in range(0, len(places), BATCH):
        part = places[start : start + BATCH]
        probabilities = predictor.probabilities(site_data.read_files(part, predictor.task), device)
        for (path, index), row in zip(part, probabilities, strict=True):
            answer = classes[int(row.argmax())]
            name = str(path) if index is None else f"{path} (slice {index})"
            writer.writerow([csv_text(name), csv_text(answer), *(f"{value:.6f}" for value in row)])
        update(start + len(part), "")
    return stream.getvalue()
