"""Grids of small images as one PNG."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

GAP = 2  # pixels between images, before enlarging
MARGIN_GREY = 255


def grid_png(images: np.ndarray, enlarge: int = 2) -> bytes:
    """Images [rows, columns, H, W, C] uint8 as one PNG, row by row."""
    rows, columns, height, width, channels = images.shape
    sheet = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), MARGIN_GREY, np.uint8)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (height + GAP), column * (width + GAP)
            image = images[row, column]
            sheet[top : top + height, left : left + width] = image if channels == 3 else image.repeat(3, axis=-1)
    picture = Image.fromarray(sheet).resize(
        (sheet.shape[1] * enlarge, sheet.shape[0] * enlarge), Image.Resampling.NEAREST
    )
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def class_grid(images: np.ndarray, labels: np.ndarray, classes: int, columns: int = 16) -> np.ndarray:
    """The first images of every class as rows; a class with too few is filled up with white."""
    out = np.full((classes, columns, *images.shape[1:]), MARGIN_GREY, np.uint8)
    for label in range(classes):
        found = images[labels == label][:columns]
        out[label, : len(found)] = found
    return out


def write_class_grid(images: np.ndarray, labels: np.ndarray, classes: int, path: Path) -> None:
    """A PNG file with a row of images per class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(grid_png(class_grid(images, labels, classes), enlarge=3))
