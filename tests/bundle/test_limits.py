from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from fedbicross.bundle import OWN, REPLY, UPLOAD, Limits, inspect, pack
from fedbicross.bundle.limits import for_kind
from fedbicross.errors import UploadError
from fedbicross.messages import pack_states
from small import refuses


def test_what_travels_is_read_strictly() -> None:
    assert for_kind("upload") is UPLOAD and for_kind("reply") is REPLY
    assert for_kind("stage") is for_kind("predictor") is OWN
    assert Limits() == UPLOAD
    for field in fields(Limits):
        if isinstance(getattr(UPLOAD, field.name), int) and not isinstance(getattr(UPLOAD, field.name), bool):
            assert getattr(UPLOAD, field.name) <= getattr(REPLY, field.name) <= getattr(OWN, field.name)


DATA = pack("upload", {"a.b": torch.ones(2, 3), "c": torch.tensor(1)}, {"x": {"y": [1]}})
HEADER = int.from_bytes(DATA[:8], "little")


@pytest.mark.parametrize(
    ("limit", "enough", "code"),
    [
        ("max_bytes", len(DATA), "too_large"),
        ("max_header", HEADER, "header_length"),
        ("max_tensors", 2, "too_many_tensors"),
        ("max_name_length", 3, "tensor_name"),
        ("max_rank", 2, "shape"),
        ("max_elements", 6, "shape"),
        ("max_depth", 4, "no_manifest"),
    ],
)
def test_each_limit_to_the_last_unit(limit: str, enough: int, code: str) -> None:
    inspect(DATA, replace(UPLOAD, **{limit: enough}))
    with refuses(UploadError, code):
        inspect(DATA, replace(UPLOAD, **{limit: enough - 1}))


def test_the_ensemble_of_a_hundred_large_networks_fits_a_reply() -> None:
    """12,200 tensors with the names of a ResNet-18, one element each: the header is what matters."""
    names = [
        f"trunk.stage{s}.{b}.shortcut.bn.num_batches_tracked{i}" for s in range(4) for b in range(2) for i in range(16)
    ]
    states = [{name: torch.zeros(1) for name in names[:122]} for _ in range(100)]
    data = pack("reply", pack_states(states), {"architectures": ["resnet18"] * 100})
    assert len(inspect(data, REPLY).tensors) == 12_200
    with pytest.raises(UploadError):
        inspect(data, UPLOAD)
