"""The folder of a finished model: what it says of itself is what the model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedbicross
from fedbicross.context import Task
from fedbicross.deploy import compare
from fedbicross.deploy.folder import HUB_CARD, Finished, Origin, read_finished, write_model
from fedbicross.engine.device import normalise
from fedbicross.errors import ConfigError, RunError
from fedbicross.messages import Predictor
from fedbicross.transport.site_data import read_files

TASK = Task(("benign", "malign|ant<b>*x*</b>"), 8, 3, "resnet8")


def origin(**changes: Any) -> Origin:
    given: dict[str, Any] = {
        "kind": "federation", "client": "north\n# A headline", "run": "r+1", "method": "fedavg", "leaves": "Nothing.",
        "upload_bytes": None, "train_images": 5, "hold_out": 0.2, "seed": 0, "settings": {}, "training": {},
    }  # fmt: skip
    return Origin(**{**given, **changes})


def constant(*shares: float) -> Predictor:
    return Predictor(TASK, constant=torch.tensor(shares))


def test_a_folder_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    labels = np.array([0, 1, 1])
    scores = compare.both(np.eye(2)[[0, 1, 1]], np.eye(2)[[0, 0, 0]], labels)
    finished = Finished(constant(0.4, 0.6), origin(), constant(0.9, 0.1), 12, scores)
    write_model(tmp_path / "model", finished)
    back = read_finished(tmp_path / "model")
    assert back.settings() == finished.settings() == json.loads((tmp_path / "model" / "config.json").read_text())
    assert back.alone is not None and back.alone.pack() == constant(0.9, 0.1).pack()
    with pytest.raises(RunError, match="exists already"):
        write_model(tmp_path / "model", finished)
    write_model(tmp_path / "hub", Finished(constant(0.4, 0.6), origin()), HUB_CARD)
    assert "Not measured" in (tmp_path / "hub" / "README.md").read_text()
    with pytest.raises(ConfigError, match="no model that a site trained alone"):
        fedbicross.load_model(tmp_path / "hub", alone=True)
    with pytest.raises(ConfigError, match="no model that a site trained alone"):
        fedbicross.load_model(tmp_path / "hub" / "model.safetensors", alone=True)


def test_names_are_no_markup_in_the_card(tmp_path: Path) -> None:
    write_model(tmp_path / "model", Finished(constant(0.4, 0.6), origin()))
    card = (tmp_path / "model" / "MODEL_CARD.md").read_text()
    head, _, body = card.removeprefix("---\n").partition("---\n")
    assert "north" not in head and "malign" not in head, "nothing of a user in what a machine reads"
    assert "\n# A headline" not in body and "<b>" not in body and "malign\\|ant&lt;b&gt;" in body
    assert "not calibrated" in body


@pytest.mark.parametrize("channels", [1, 3])
def test_the_hub_s_words_for_the_preparation_say_what_is_done(tmp_path: Path, channels: int) -> None:
    """An image processor that follows preprocessor_config.json feeds the networks what we feed them."""
    task = Task(("a", "b"), 8, channels, "resnet8")
    write_model(tmp_path / "model", Finished(Predictor(task, constant=torch.tensor([0.5, 0.5])), origin()))
    words = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    shape = (21, 13) if channels == 1 else (21, 13, 3)
    Image.fromarray(np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)).save(tmp_path / "a.png")
    ours = normalise(torch.from_numpy(read_files([tmp_path / "a.png"], task)).permute(0, 3, 1, 2))[0]
    image = Image.open(tmp_path / "a.png").convert("RGB" if words["do_convert_rgb"] else "L")
    scale = words["size"]["shortest_edge"] / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), words["resample"])
    high, wide = words["crop_size"]["height"], words["crop_size"]["width"]
    left, top = (image.width - wide) // 2, (image.height - high) // 2
    pixels = np.asarray(image.crop((left, top, left + wide, top + high)), np.float64).reshape(high, wide, -1)
    values = (pixels * words["rescale_factor"] - np.array(words["image_mean"])) / np.array(words["image_std"])
    assert words["do_resize"] and words["do_center_crop"] and words["do_rescale"] and words["do_normalize"]
    assert np.allclose(values.transpose(2, 0, 1), ours.numpy(), atol=1e-6)
