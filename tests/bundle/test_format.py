from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from fedbicross.bundle import OWN, inspect, pack, unpack
from fedbicross.bundle.format import DTYPES, build_tensors, join_groups, take_group, tensor_digest
from fedbicross.errors import MethodError, UploadError
from small import refuses

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.count": torch.tensor(7),
    "h": torch.ones(3).bfloat16(),
}
ALL_TYPES = [
    torch.int64, torch.float64, torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip


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


def test_the_bytes_are_those_that_the_safetensors_library_writes_and_reads() -> None:
    """Any other tool can read a bundle; and the order of types, names and fields is the library's own."""
    tensors = {f"{t}.{str(d).removeprefix('torch.')}": torch.ones(2, 3).to(d) for d in ALL_TYPES for t in "ba"}
    text = 'quotes " \\ \n \x01 \x7f é 🏥 \u2028'
    data = pack("upload", tensors, {"client": text})
    assert len(DTYPES) == len(ALL_TYPES)
    assert bytes(save(tensors, metadata={"fedbicross": inspect(data).text})) == data
    assert all(torch.equal(value, tensors[name]) for name, value in load(data).items())


def test_digests_are_plain_sha256() -> None:
    """What a reader with another language has to compute."""
    value = torch.tensor([[1.0, 2.0]])
    slow = hashlib.sha256(b"torch.float32(1, 2)" + bytes.fromhex("0000803f00000040")).hexdigest()
    assert inspect(pack("x", {"v": value}, {})).digests == {"v": slow} == {"v": tensor_digest(value)}
    assert tensor_digest(torch.tensor(3)) == hashlib.sha256(b"torch.int64()" + bytes([3] + [0] * 7)).hexdigest()


def test_tensors_are_writable_and_independent_of_the_bytes() -> None:
    data = pack("x", TENSORS, {})
    kept = bytes(bytearray(data))
    first, second = unpack(data, "x")[0], unpack(data, "x")[0]
    first["b.weight"] += 1
    assert data == kept and torch.equal(second["b.weight"], TENSORS["b.weight"])
    first["a.count"].zero_()
    assert torch.equal(first["h"], TENSORS["h"]), "neighbours in one buffer do not overlap"


def test_keys_that_are_numbers_become_text_in_one_order() -> None:
    data = pack("x", {}, {"table": {10: "a", 9: "b"}})
    assert unpack(data, "x")[1] == {"table": {"10": "a", "9": "b"}}


def test_own_files_may_hold_what_travelling_ones_may_not() -> None:
    odd = {"a name/é": torch.ones(1), "empty": torch.zeros(0, 4)}
    assert unpack(pack("stage", odd, {}), "stage")[0]["empty"].shape == (0, 4)
    with pytest.raises(UploadError):
        unpack(pack("upload", odd, {}), "upload")
    assert set(inspect(pack("upload", odd, {}), OWN).tensors) == set(odd)


def test_types_that_no_bundle_holds() -> None:
    with pytest.raises(TypeError, match="complex64"):
        pack("x", {"v": torch.ones(1, dtype=torch.complex64)}, {})
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack("x", {}, {"v": float("nan")})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nothing_that_is_not_finite_is_written(bad: float, dtype: torch.dtype) -> None:
    tensors = {"empty": torch.zeros(0), "good": torch.ones(2), "bad": torch.tensor([1.0, bad, 2.0], dtype=dtype)}
    with refuses(MethodError, "non_finite", "'bad' holds NaN or infinity"):
        pack("stage", tensors, {})


names = st.from_regex(r"[A-Za-z0-9]{1,8}([.|][a-z0-9][a-z0-9_-]{0,7}){0,2}", fullmatch=True)
shapes = st.lists(st.integers(1, 4), max_size=4)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100)
@given(st.dictionaries(names, st.tuples(st.sampled_from(ALL_TYPES), shapes), max_size=6), values)
def test_anything_that_is_packed_is_read_back(table: dict[str, Any], value: Any) -> None:
    if len({name.casefold() for name in table}) != len(table):
        return
    tensors = {name: torch.ones(shape).to(dtype) for name, (dtype, shape) in table.items()}
    data = pack("upload", tensors, {"value": value})
    back, manifest = unpack(data, "upload")
    assert manifest == {"value": value}
    assert {n: (t.dtype, t.shape) for n, t in back.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}
    assert pack("upload", back, manifest) == data


def test_unlisted_tensor_is_refused() -> None:
    data = pack("upload", TENSORS, {})
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    smuggled = save({**load(data), "extra": torch.ones(1)}, metadata=metadata)
    with refuses(UploadError, "tensor_list"):
        unpack(bytes(smuggled), "upload")


def test_inspect_tells_where_everything_is() -> None:
    data = pack("upload", TENSORS, {"a": 1})
    header = inspect(data)
    assert (header.kind, header.manifest, header.signer, header.signature) == ("upload", {"a": 1}, None, None)
    weight = header.tensors["b.weight"]
    assert (weight.dtype, weight.shape) == ("F32", (2, 3))
    assert data[weight.start : weight.end] == TENSORS["b.weight"].numpy().tobytes()
    assert torch.equal(build_tensors(data, header)["b.weight"], TENSORS["b.weight"])


def test_groups() -> None:
    joined = join_groups(a={"x": torch.ones(1)}, b={"x": torch.zeros(1)})
    assert set(joined) == {"a|x", "b|x"}
    assert torch.equal(take_group(joined, "b")["x"], torch.zeros(1))
    unpack(pack("upload", joined, {}), "upload")
