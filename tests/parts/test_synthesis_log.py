from __future__ import annotations

import torch

from fedbicross.parts.synthesis_log import first_of_each_class


def test_one_image_of_each_class_is_shown() -> None:
    images = torch.arange(5.0).view(5, 1, 1, 1)
    shown = first_of_each_class(images, torch.tensor([2, 0, 2, 0, 3]), 4)
    assert shown.flatten().tolist() == [1.0, 1.0, 0.0, 4.0], "class 1 has none and is white"
