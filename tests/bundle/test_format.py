from __future__ import annotations

import json

import pytest
import torch

from fedbicross.bundle import pack, unpack
from fedbicross.errors import UploadError

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.count": torch.tensor(7),
    "h": torch.ones(3).bfloat16(),
}


def test_round_trip_and_same_bytes() -> None:
    data = pack("upload", TENSORS, {"client": "ä <b>", "n": 3})
    assert data == pack("upload", dict(reversed(TENSORS.items())), {"n": 3, "client": "ä <b>"})
    tensors, manifest = unpack(data, "upload")
    assert manifest == {"client": "ä <b>", "n": 3}
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())


def test_no_tensors_is_fine() -> None:
    assert unpack(pack("reply", {}, {}), "reply") == ({}, {})


def test_non_contiguous_tensors_keep_their_values() -> None:
    value = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(unpack(pack("x", {"v": value}, {}), "x")[0]["v"], value)


def test_every_flipped_data_bit_is_noticed() -> None:
    data = pack("upload", {"v": torch.arange(8, dtype=torch.float32)}, {})
    start = 8 + int.from_bytes(data[:8], "little")
    for position in range(start, len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[position] ^= 1 << bit
            with pytest.raises(UploadError):
                unpack(bytes(broken), "upload")


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 40, -1])
def test_truncation(cut: int) -> None:
    with pytest.raises(UploadError):
        unpack(pack("upload", TENSORS, {})[:cut], "upload")


def test_wrong_kind_format_and_header() -> None:
    data = pack("upload", TENSORS, {})
    cases = {
        "wrong_kind": (data, "reply"),
        "header_length": ((1 << 40).to_bytes(8, "little") + data[8:], "upload"),
        "no_manifest": ((2).to_bytes(8, "little") + b"{}", "upload"),
    }
    for code, (bytes_, kind) in cases.items():
        with pytest.raises(UploadError) as caught:
            unpack(bytes_, kind)
        assert caught.value.code == code


def test_unlisted_tensor_is_refused() -> None:
    from safetensors.torch import load, save

    data = pack("upload", TENSORS, {})
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    smuggled = save({**load(data), "extra": torch.ones(1)}, metadata=metadata)
    with pytest.raises(UploadError) as caught:
        unpack(bytes(smuggled), "upload")
    assert caught.value.code == "tensor_list"
