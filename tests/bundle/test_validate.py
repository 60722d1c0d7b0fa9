"""The equations of the checks; what they refuse is in tests/faults/test_bundle_weights.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from faults.toy_bundle import trained_like
from fedbicross import models
from fedbicross.bundle import validate
from fedbicross.context import Task
from fedbicross.errors import UploadError
from fedbicross.messages import Predictor
from fedbicross.models import MODELS
from fedbicross.settings import Settings
from small import refuses


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("channels", "classes", "size"), [(1, 2, 28), (3, 9, 64), (3, 5, 96)])
def test_expected_tensors_are_those_of_the_network_built(name: str, channels: int, classes: int, size: int) -> None:
    built = models.build(name, channels, classes, size).state_dict()
    expected = validate.model_tensors(name, channels, classes, size)
    assert list(expected) == list(built)
    assert expected == {key: (value.dtype, tuple(value.shape)) for key, value in built.items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_network_passes_once_it_has_seen_a_batch(name: str) -> None:
    validate.check_model_state(trained_like(name), name, 3, 3, 12)


def test_asking_for_a_huge_network_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: pytest.fail("allocated"))
    largest = validate.model_tensors("cnn", 3, 100_000, validate.MAX_IMAGE_SIZE)
    assert sum(torch.Size(shape).numel() for _, shape in largest.values()) > 10**7
    with pytest.raises(UploadError):
        validate.model_tensors("cnn", 3, 10, validate.MAX_IMAGE_SIZE + 1)


def test_values_at_the_edge() -> None:
    state = dict(trained_like("resnet8"))
    edge = {
        "head.weight": torch.full_like(state["head.weight"], validate.MAX_WEIGHT),
        "trunk.stem.bn.running_var": torch.full((16,), 1e-38),
        "trunk.stem.bn.running_mean": torch.full((16,), -validate.MAX_WEIGHT),
        "trunk.stem.bn.num_batches_tracked": torch.tensor(validate.MAX_BATCHES),
    }
    validate.check_model_state({**state, **edge}, "resnet8", 3, 3, 12)


def test_check_finite_looks_at_every_kind_of_number() -> None:
    validate.check_finite(
        {"a": torch.ones(2).half(), "b": torch.tensor([True]), "c": torch.zeros(0), "d": torch.tensor(3)}
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        with pytest.raises(UploadError, match="'x'"):
            validate.check_finite({"x": torch.tensor([0, float("nan")], dtype=dtype)})


class Manifest(Settings):
    name: str
    sizes: list[int] | None


def test_manifests_have_exactly_their_fields_and_types() -> None:
    assert validate.read_manifest(Manifest, {"name": "a", "sizes": [1]}) == Manifest(name="a", sizes=[1])
    for bad in (
        {"name": "a"},
        {"name": 1, "sizes": None},
        {"name": "a", "sizes": [1.0]},
        {"name": "a", "sizes": None, "x": 1},
    ):
        with refuses(UploadError, "manifest"):
            validate.read_manifest(Manifest, bad)


def consensus(**changes: Any) -> Predictor:
    state = models.build("resnet8", 3, 3, 12).state_dict()
    weights, prior = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([0.0, -1e4, -2.0])
    made = Predictor(Task(("a", "b", "c"), 12, 3, "resnet8"), ("resnet8",), (state,), "consensus", weights)
    return replace(made, **{"log_prior": prior, **changes})


def test_a_class_mix_beside_the_networks_passes() -> None:
    validate.check_predictor(consensus())
    validate.check_predictor(consensus(log_prior=None))
    validate.check_log_prior(torch.zeros(3, dtype=torch.float64), 3)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"log_prior": torch.tensor([0.0, -1.0])}, "tensor_shape"),
        ({"log_prior": torch.zeros(1, 3)}, "tensor_shape"),
        ({"log_prior": torch.zeros(3, dtype=torch.int64)}, "tensor_shape"),
        ({"log_prior": torch.tensor([0.0, 0.1, -1.0])}, "magnitude"),
        ({"log_prior": torch.tensor([0.0, -torch.inf, -1.0])}, "non_finite"),
        ({"log_prior": torch.tensor([0.0, torch.nan, -1.0])}, "non_finite"),
        ({"class_weights": None}, "missing_tensor"),
        ({"class_weights": torch.tensor([[1.0, -0.5, 0.0]])}, "magnitude"),
        ({"class_weights": torch.ones(2, 3)}, "tensor_shape"),
    ],
)
def test_a_class_mix_or_weights_that_make_no_sense_are_refused(changes: dict[str, Any], code: str) -> None:
    with refuses(UploadError, code):
        validate.check_predictor(consensus(**changes))


@pytest.mark.parametrize("marks", [[1e4, 2.5, 1e4], [-700.0, 3.0, 1e4], [0.0, 1e4, 1e4]])
def test_a_referral_beside_the_networks_passes(marks: list[float]) -> None:
    validate.check_predictor(consensus(referral=torch.tensor(marks)))
    validate.check_referral(torch.tensor(marks, dtype=torch.float64), 3)


@pytest.mark.parametrize(
    ("referral", "code"),
    [
        (torch.tensor([1e4, 2.5]), "tensor_shape"),
        (torch.tensor([1e4, 2.5, 1e4, 1e4]), "tensor_shape"),
        (torch.tensor([[1e4, 2.5, 1e4]]), "tensor_shape"),
        (torch.tensor(2.5), "tensor_shape"),
        (torch.tensor([10_000, 2, 10_000]), "tensor_shape"),
        (torch.tensor([1e4, torch.inf, 2.0]), "non_finite"),
        (torch.tensor([1e4, -torch.inf, 2.0]), "non_finite"),
        (torch.tensor([1e4, torch.nan, 2.0]), "non_finite"),
        (torch.tensor([1e4, 1e4, 1e4]), "magnitude"),  # no class: never a referral
        (torch.tensor([2.5, 1.0, 0.0]), "magnitude"),  # every class: nothing to compare with
        (torch.tensor([1e4, 2.5, 1e5]), "magnitude"),
    ],
)
def test_a_referral_that_makes_no_sense_is_refused(referral: torch.Tensor, code: str) -> None:
    with refuses(UploadError, code, "referral"):
        validate.check_predictor(consensus(referral=referral))
