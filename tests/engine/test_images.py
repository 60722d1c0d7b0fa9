from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from fedbicross.engine.images import class_grid, grid_png, write_class_grid


def test_grid_places_images_row_by_row_and_repeats_grey() -> None:
    images = np.zeros((2, 3, 4, 5, 1), np.uint8)
    images[1, 2] = 200
    picture = np.asarray(Image.open(io.BytesIO(grid_png(images, enlarge=1))))
    assert picture.shape == (10, 19, 3)
    assert (picture[6:10, 14:19] == 200).all()
    assert (picture[:4, :5] == 0).all()
    assert (picture[4:6] == 255).all()


def test_class_grid_fills_up_rare_classes(tmp_path: Path) -> None:
    images = np.arange(3, dtype=np.uint8)[:, None, None, None].repeat(2, 1).repeat(2, 2)
    rows = class_grid(images, np.array([0, 1, 0]), 2, columns=2)
    assert rows[0, :, 0, 0, 0].tolist() == [0, 2]
    assert rows[1, :, 0, 0, 0].tolist() == [1, 255]
    write_class_grid(images, np.array([0, 1, 0]), 2, tmp_path / "a" / "b.png")
    assert (tmp_path / "a" / "b.png").stat().st_size > 0
