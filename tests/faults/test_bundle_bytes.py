"""Family A: bytes that are no bundle. All are refused before a tensor is made; nothing is written; nothing hangs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from faults.toy_bundle import (
    ALLOWED,
    FEDERATION,
    RUN,
    by_hand,
    compact,
    entry,
    key,
    manifest_text,
    receive,
    refusal,
    toy,
    toy_upload,
    trained_like,
    with_tensors,
)
from fedbicross.bundle import UPLOAD, Limits, format, inspect, list_bundles, read_file, sign, unpack
from fedbicross.bundle.format import MANIFEST, check_digests, encode_header, pack
from fedbicross.bundle.sign import check_signer
from fedbicross.context import Task
from fedbicross.messages import Upload


class LoaderCalled(Exception):
    """Not an UploadError: it would fail every test here."""


@pytest.fixture(autouse=True)
def no_tensor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refusal the loader is never called: in this file it must not be called at all."""

    def called(*args: object, **options: object) -> None:
        raise LoaderCalled

    monkeypatch.setattr(format, "build_tensors", called)
    monkeypatch.setattr(format, "_view", called)
    monkeypatch.setattr(torch, "frombuffer", called)
    monkeypatch.setattr(torch, "load", called)
    monkeypatch.setattr("safetensors.torch.load", called)


def test_the_spy_would_notice() -> None:
    with pytest.raises(LoaderCalled):
        receive(toy())


@contextlib.contextmanager
def at_most(memory: int) -> Iterator[None]:
    """Tracing ends whatever happens: left on, it slows down every test that follows."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()


def flipped(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def real_bundle(architecture: str, classes: int, size: int) -> bytes:
    task = Task(tuple(f"class-{c}" for c in range(classes)), size, 3, architecture)
    state, agreed = trained_like(architecture, classes, 3, size), FEDERATION.agreement
    return sign(Upload("north", task, state, run_id=RUN, agreement=agreed).pack(), key("north"))


@pytest.fixture(scope="module")
def resnet18() -> bytes:
    return real_bundle("resnet18", 8, 28)


# --- 1, 2: flipped bits -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_single_bit_flip_of_a_toy_bundle() -> None:
    data = toy()
    assert len(data) > 1500
    for bit in range(8 * len(data)):
        refusal(lambda bit=bit: receive(flipped(data, bit)))


@pytest.mark.slow
def test_sampled_flips_of_a_real_bundle(resnet18: bytes) -> None:
    """3,000 in length and header, where strings, manifest and signature lie; 7,000 in data, spread over all tensors."""
    assert 44e6 < len(resnet18) < 46e6
    rng = random.Random(2)
    data, start = bytearray(resnet18), 8 + int.from_bytes(resnet18[:8], "little")
    header = inspect(resnet18)

    def header_only() -> None:
        check_signer(inspect(data), ALLOWED)

    for position in [*range(8), *(rng.randrange(8, start) for _ in range(2992))]:
        data[position] ^= (mask := 1 << rng.randrange(8))
        refusal(header_only)
        data[position] ^= mask
    tensors = list(header.tensors.items())
    for number in range(7000):
        name, info = tensors[number % len(tensors)]
        part = replace(header, tensors={name: info})
        position, mask = rng.randrange(info.start, info.end), 1 << rng.randrange(8)
        data[position] ^= mask
        assert refusal(lambda part=part: check_digests(data, part)) == "digest"
        data[position] ^= mask
    assert data == resnet18
    for _ in range(10):
        data[(position := rng.randrange(start, len(data)))] ^= 1
        assert refusal(lambda: receive(bytes(data))) == "digest"
        data[position] ^= 1


# --- 3, 4: too little, too much -----------------------------------------------------------------------------------


def test_every_truncation_of_a_toy_bundle() -> None:
    data = toy()
    for length in range(len(data)):
        refusal(lambda length=length: receive(data[:length]))


@pytest.mark.slow
def test_truncations_of_a_real_bundle(resnet18: bytes) -> None:
    """Each of the last 1,024 lengths, and sampled page boundaries and their neighbours, from long to short."""
    size = len(resnet18)
    pages = random.Random(3).sample(range(4096, size - 1024, 4096), 100)
    lengths = {page + off for page in pages for off in (-1, 0, 1)} | set(range(size - 1024, size))
    data = bytearray(resnet18)
    for length in sorted(lengths, reverse=True):
        del data[length:]
        refusal(lambda: inspect(data))


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("payload.txt", "hello")
    return buffer.getvalue()


OTHER = {
    "one": b"\0",
    "eight": bytes(8),
    "kilobyte": bytes(1024),
    "space": b" ",
    "newline": b"\n",
    "zip": zip_bytes(),
    "elf": b"\x7fELF" + bytes(60),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(32),
    "bundle": toy(),
    "bom": b"\xef\xbb\xbf",
}


@pytest.mark.parametrize("case", OTHER)
def test_added_before_after_and_inside(case: str) -> None:
    data, more = toy(), OTHER[case]
    start = 8 + int.from_bytes(data[:8], "little")
    refusal(lambda: receive(data + more))
    refusal(lambda: receive(more + data))
    refusal(lambda: receive(data[:start] + more + data[start:]))
    inside = data[8:start] + more
    refusal(lambda: receive(len(inside).to_bytes(8, "little") + inside + data[start:]))


@pytest.mark.parametrize("size", range(9))
def test_nearly_nothing(size: int) -> None:
    for byte in (0, 1, 255):
        refusal(lambda byte=byte: receive(bytes([byte]) * size))


# --- 5: the declared length ---------------------------------------------------------------------------------------


LENGTHS = [0, 1, 7, "size-8", "size", "size+1", 10**8, 10**8 + 1, 2**31, 2**32, 2**63, 2**64 - 1]


@pytest.mark.parametrize("length", LENGTHS)
def test_declared_header_length(length: int | str) -> None:
    data = toy()
    number = int(eval_length(length, len(data)))
    with at_most(16 << 20):
        refusal(lambda: receive(struct.pack("<Q", number) + data[8:]))


def eval_length(length: int | str, size: int) -> int:
    return length if isinstance(length, int) else size + int(length.removeprefix("size") or 0)


def test_a_header_over_the_limit_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *a, **k: pytest.fail("parsed"))
    big = b"[" * (UPLOAD.max_header + 1)
    assert refusal(lambda: inspect(by_hand(big))) == "header_length"


# --- 6: header JSON -----------------------------------------------------------------------------------------------

META = f'"__metadata__":{compact({MANIFEST: manifest_text()})}'
W = '"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
BAD_JSON: dict[str, tuple[str | bytes, str]] = {
    "empty object": ("{}", "no_manifest"),
    "empty": ("", "header"),
    "array": ("[]", "header"),
    "number": ("5", "header"),
    "text": ('"x"', "header"),
    "null metadata": ('{"__metadata__":null}', "no_manifest"),
    "no manifest": ('{"__metadata__":{"format":"pt"}}', "no_manifest"),
    "metadata not text": ('{"__metadata__":{"fedbicross":5}}', "metadata"),
    "duplicate metadata": ("{" + META + "," + META + "}", "header"),
    "duplicate tensor": ("{" + META + "," + W + "," + W + "}", "header"),
    "duplicate field": ("{" + META + ',"w":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "header"),
    "20,000 deep": ("[" * 20_000 + "]" * 20_000, "header"),
    "500 deep": ("{" + META + ',"w":' + "[" * 500 + "]" * 500 + "}", "header"),
    "20,000 objects deep": ('{"a":' * 20_000 + "1" + "}" * 20_000, "header"),
    "NaN": ("{" + META + ',"w":NaN}', "header"),
    "Infinity": ("{" + META + ',"w":-Infinity}', "header"),
    "1e999": ("{" + META + ',"w":1e999}', "header"),
    "a million digits": ("{" + META + ',"w":' + "9" * 1_000_000 + "}", "header"),
    "BOM": (b"\xef\xbb\xbf{" + META.encode() + b"}", "header"),
    "invalid UTF-8": (b'{"\xff\xfe":1}', "header"),
    "overlong UTF-8": (b'{"\xc0\xaf":1}', "header"),
    "encoded surrogate": (b'{"\xed\xa0\x80":1}', "header"),
    "UTF-16": (("{" + META + "}").encode("utf-16"), "header"),
    "lone surrogate in a name": (
        "{" + META + ',"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        "tensor_name",
    ),
    "lone surrogate in the manifest": ('{"__metadata__":{"fedbicross":"\\ud800"}}', "no_manifest"),
    "trailing text": ("{" + META + "}x", "header"),
    "comment": ("{" + META + "}//", "header"),
    "trailing comma": ("{" + META + ",}", "header"),
    "control character": ('{"\x01":1}', "header"),
    "leading space": (" {" + META + "}", "not_canonical"),
    "inner space": ("{ " + META + "}", "not_canonical"),
    "too much padding": ("{" + META + "}" + " " * (8 + -(len(META) + 2) % 8), "not_canonical"),
    "one space less": ("{" + META + "}" + " " * ((-(len(META) + 2) - 1) % 8), "not_canonical"),
    "padding of tabs": ("{" + META + "}" + "\t" * (-(len(META) + 2) % 8 or 8), "not_canonical"),
    "escaped letter": ("{" + META.replace("fedbicross", "f\\u0065dbicross", 1) + "}", "not_canonical"),
    "a 1 MiB name": ("{" + META + ',"' + "n" * 1_000_000 + '":{}}', "tensor_name"),
    "100,000 short lists": ("{" + META + ',"w":[' + "[]," * 100_000 + "[]]}", "tensor_entry"),
    "manifest is an array": (compact({"__metadata__": {MANIFEST: "[]"}}), "no_manifest"),
    "manifest with two kinds": (
        compact({"__metadata__": {MANIFEST: manifest_text().replace('"kind":', '"kind":"x","kind":')}}),
        "no_manifest",
    ),
    "manifest deep": (compact({"__metadata__": {MANIFEST: "[" * 20_000}}), "no_manifest"),
    "manifest with spaces": (compact({"__metadata__": {MANIFEST: manifest_text() + " "}}), "not_canonical"),
    "manifest with NaN": (
        compact({"__metadata__": {MANIFEST: manifest_text().replace('"manifest":{}', '"manifest":{"x":NaN}')}}),
        "no_manifest",
    ),
    "manifest 2.0 for 2": (
        compact({"__metadata__": {MANIFEST: manifest_text().replace('"format":2', '"format":2.0')}}),
        "format_version",
    ),
    "manifest true for 2": (
        compact({"__metadata__": {MANIFEST: manifest_text().replace('"format":2', '"format":true')}}),
        "format_version",
    ),
    "manifest of format 1": (compact({"__metadata__": {MANIFEST: manifest_text(format=1)}}), "format_version"),
    "manifest of format 3": (compact({"__metadata__": {MANIFEST: manifest_text(format=3)}}), "format_version"),
    "manifest kind 5": (compact({"__metadata__": {MANIFEST: manifest_text(kind=5)}}), "no_manifest"),
    "manifest inner list": (compact({"__metadata__": {MANIFEST: manifest_text(manifest=[])}}), "no_manifest"),
    "manifest tensors list": (compact({"__metadata__": {MANIFEST: manifest_text(tensors=[])}}), "tensor_list"),
    "manifest extra field": (compact({"__metadata__": {MANIFEST: manifest_text(extra=1)}}), "no_manifest"),
    "unknown metadata key": (compact({"__metadata__": {MANIFEST: manifest_text(), "note": "x"}}), "metadata"),
    "half a signature": (compact({"__metadata__": {MANIFEST: manifest_text(), "signer": "x"}}), "metadata"),
    "listed but absent": (compact({"__metadata__": {MANIFEST: manifest_text(["w"])}}), "tensor_list"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_header_json(case: str) -> None:
    header, code = BAD_JSON[case]
    raw = header if isinstance(header, bytes) else header.encode("utf-8")
    with at_most(64 << 20):
        assert refusal(lambda: inspect(by_hand(raw, b"\0" if W in str(header) else b""))) == code


def test_too_many_tensors() -> None:
    entries = {f"t{i}": entry("U8", [1], i, i + 1) for i in range(10_001)}
    data = by_hand({"__metadata__": {MANIFEST: "{}"}, **entries}, bytes(10_001))
    roomy = replace(UPLOAD, max_header=16 << 20)
    text = compact({"__metadata__": {MANIFEST: manifest_text()}, **entries})
    assert refusal(lambda: inspect(by_hand(text, bytes(10_001)), roomy)) == "too_many_tensors"
    assert refusal(lambda: inspect(data, roomy)) == "no_manifest"


# --- 7, 8, 9: the table of tensors --------------------------------------------------------------------------------

BAD_TABLES: dict[str, tuple[dict[str, Any], int, str]] = {
    "negative size": ({"w": entry("F32", [-1], 0, 4)}, 4, "shape"),
    "two negative sizes": ({"w": entry("F32", [-1, -1], 0, 4)}, 4, "shape"),
    "overflow": ({"w": entry("F32", [2**40, 2**40], 0, 4)}, 4, "shape"),
    "overflow to 4 bytes": ({"w": entry("F32", [2**47, 2**47], 0, 4)}, 4, "shape"),
    "huge size": ({"w": entry("F32", [2**70], 0, 4)}, 4, "shape"),
    "zero-sized": ({"w": entry("F32", [0], 0, 0)}, 0, "shape"),
    "zero times huge": ({"w": entry("F32", [0, 2**40], 0, 0)}, 0, "shape"),
    "65 dimensions": ({"w": entry("F32", [1] * 65, 0, 4)}, 4, "shape"),
    "float size": ({"w": entry("F32", [1.0], 0, 4)}, 4, "shape"),
    "true for one": ({"w": entry("F32", [True], 0, 4)}, 4, "shape"),
    "text size": ({"w": entry("F32", ["1"], 0, 4)}, 4, "shape"),
    "shape of lists": ({"w": entry("F32", [[1]], 0, 4)}, 4, "shape"),
    "shape not a list": ({"w": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, 4, "shape"),
    "too few bytes": ({"w": entry("F32", [2], 0, 4)}, 4, "tensor_size"),
    "too many bytes": ({"w": entry("F32", [1], 0, 8)}, 8, "tensor_size"),
    "backwards": ({"w": entry("F32", [1], 4, 0)}, 4, "tensor_size"),
    "gap at the start": ({"w": entry("F32", [1], 4, 8)}, 8, "offsets"),
    "gap between": ({"v": entry("F32", [1], 0, 4), "w": entry("F32", [1], 8, 12)}, 12, "offsets"),
    "overlap": ({"v": entry("F32", [1], 0, 4), "w": entry("F32", [1], 2, 6)}, 6, "offsets"),
    "same bytes twice": ({"v": entry("F32", [1], 0, 4), "w": entry("F32", [1], 0, 4)}, 4, "offsets"),
    "inside another": ({"v": entry("F32", [2], 0, 8), "w": entry("F32", [1], 0, 4)}, 8, "offsets"),
    "out of the file": ({"w": entry("F32", [100], 0, 400)}, 4, "file_size"),
    "bytes left over": ({"w": entry("F32", [1], 0, 4)}, 8, "file_size"),
    "negative offset": ({"w": entry("F32", [1], -4, 0)}, 4, "offsets"),
    "huge offset": ({"w": entry("F32", [1], 2**64, 2**64 + 4)}, 4, "offsets"),
    "one offset": ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, 4, "offsets"),
    "three offsets": ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, 4, "offsets"),
    "float offsets": ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}, 4, "offsets"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [1]}}, 4, "tensor_entry"),
    "an extra field": ({"w": entry("F32", [1], 0, 4) | {"note": 1}}, 4, "tensor_entry"),
    "null entry": ({"w": None}, 0, "tensor_entry"),
    "other order": ({"w": entry("F32", [1], 0, 4), "v": entry("F32", [1], 4, 8)}, 8, "not_canonical"),
    "other order of types": ({"w": entry("U8", [8], 0, 8), "v": entry("F32", [1], 8, 12)}, 12, "not_canonical"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_table_of_tensors(case: str) -> None:
    entries, size, code = BAD_TABLES[case]
    assert refusal(lambda: inspect(with_tensors(entries, bytes(size)))) == code


FOREIGN = ["F8_E4M3", "F8_E5M2", "F4", "C64", "C128", "U16", "U32", "U64", "f32", "F32 ", "float32", "O", "", "F16\0"]


@pytest.mark.parametrize("dtype", [*FOREIGN, None, 5, True, ["F32"], {"a": 1}])
def test_unknown_types(dtype: Any) -> None:
    entries = {"w": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}
    assert refusal(lambda: inspect(with_tensors(entries, bytes(4)))) == "dtype"


@pytest.mark.parametrize("dtype", ["F64", "F16", "BF16", "BOOL", "I64"])
def test_types_can_be_narrowed_down(dtype: str) -> None:
    size = {"F64": 8, "F16": 2, "BF16": 2, "BOOL": 1, "I64": 8}[dtype]
    only = replace(UPLOAD, dtypes=frozenset({"F32"}))
    assert refusal(lambda: inspect(with_tensors({"w": entry(dtype, [1], 0, size)}, bytes(size)), only)) == "dtype"


BAD_NAMES = [
    "../../x", "/x", "/etc/passwd", "C:\\x", "..", ".", "", "a..b", ".a", "a.", "a/b", "a\\b", "a\0b", "a\nb", "a b",
    "\u202eabc", "é", "ａ", "__class__", "w.__init__", "__metadata", "a:b", "a*", "~", "$(x)", "<script>", "a" * 257,
    "w|", "|w", "w||v", "n\u0301", "\u200bw", "%2e%2e", "-\t",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_names(name: str) -> None:
    assert refusal(lambda: inspect(with_tensors({name: entry("F32", [1], 0, 4)}, bytes(4)))) == "tensor_name"


def test_names_equal_but_for_case() -> None:
    entries = {"Head": entry("F32", [1], 0, 4), "head": entry("F32", [1], 4, 8)}
    assert refusal(lambda: inspect(with_tensors(entries, bytes(8)))) == "tensor_name"


def test_the_name_of_the_metadata_is_no_tensor() -> None:
    assert refusal(lambda: inspect(by_hand({"__metadata__": entry("F32", [1], 0, 4)}, bytes(4)))) == "no_manifest"


# --- 10: pickles in disguise --------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it would create a file."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.reduced = (call, args)

    def __reduce__(self) -> Any:
        return self.reduced


def bombs(sentinel: str) -> dict[str, bytes]:
    text = f"open({sentinel!r}, 'w').close()"
    objects = {
        "exec": Bomb(exec, text),
        "eval": Bomb(eval, text.removesuffix(".close()")),
        "open": Bomb(open, sentinel, "w"),
        "system": Bomb(os.system, f"touch {sentinel}"),
        "mkdir": Bomb(os.mkdir, sentinel),
        "nested": {"state_dict": [Bomb(exec, text)]},
    }
    out = {f"pickle {name} {p}": pickle.dumps(obj, protocol=p) for name, obj in objects.items() for p in (2, 5)}
    for zipped in (True, False):
        buffer = io.BytesIO()
        torch.save({"w": torch.ones(2), "x": Bomb(exec, text)}, buffer, _use_new_zipfile_serialization=zipped)
        out[f"torch zip {zipped}"] = buffer.getvalue()
    array = np.array([Bomb(exec, text)], dtype=object)
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    out["npy"] = buffer.getvalue()
    buffer = io.BytesIO()
    np.savez(buffer, w=array)
    out["npz"] = buffer.getvalue()
    return out


def test_pickles_in_disguise(tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    disguises = bombs(str(sentinel))
    assert len(disguises) == 16
    pickle.loads(disguises["pickle exec 5"])
    assert sentinel.exists(), "the bombs must be live"
    sentinel.unlink()
    for number, (name, bomb) in enumerate(disguises.items()):
        path = tmp_path / f"{number}.safetensors"
        for data in (bomb, by_hand(bomb), with_tensors({"w": entry("U8", [len(bomb)], 0, len(bomb))}, bomb)):
            path.write_bytes(data)
            refusal(lambda path=path: receive(read_file(path, UPLOAD)))
            assert not sentinel.exists(), name


# --- 12: fuzz -----------------------------------------------------------------------------------------------------


JUNK: list[Any] = [
    None, True, 0, 1, -1, 4, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e300, "", "F32", "F64", "I64", "U8", "x" * 300,
    "é", "\0", [], [0], [0, 4], [[1]], [-1], {}, {"a": 1}, {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
]  # fmt: skip


def rewritten(rng: random.Random, data: bytes) -> bytes:
    """The header taken apart, one value in it replaced, removed, renamed or doubled, and written with its length."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    inner = rng.random() < 0.5
    root = json.loads(header["__metadata__"][MANIFEST]) if inner else header
    place, parents = root, []
    while isinstance(place, dict | list) and place and (not parents or rng.random() < 0.75):
        at = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        parents.append((place, at))
        place = place[at]
    parent, at = parents[-1]
    action = rng.randrange(4)
    if action == 0:
        del parent[at]
    elif action == 1 and isinstance(parent, dict):
        parent[rng.choice(["", "x", "w.y", "__metadata__", "signature", at + "x"])] = parent.pop(at)
    elif action == 2 and isinstance(parent, list):
        parent.append(rng.choice(JUNK))
    else:
        parent[at] = rng.choice(JUNK)
    if inner:
        header["__metadata__"][MANIFEST] = compact(dict(sorted(root.items())))
    text = compact(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[start:]


def mangled(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut, copied, or replaced by words of the format; the declared length often kept honest."""
    words = [
        b"__metadata__",
        b"fedbicross",
        b"dtype",
        b"shape",
        b"data_offsets",
        b"F32",
        b"I64",
        b'"',
        b"{",
        b"[",
        b"-",
    ]
    out, kind, grown = bytearray(data), rng.randrange(6), 0
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at, length, before = rng.randrange(len(out)), rng.randrange(1, 40), len(out)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at : at + length]
        elif kind == 2:
            out[at:at] = out[(other := rng.randrange(len(out))) : other + length]
        elif kind == 3:
            out[at:at] = rng.choice(words)
        elif kind == 4:
            out[at : at + 1] = str(rng.choice([0, 1, -1, 2**31, 2**63, 2**64, 10**30])).encode()
        else:
            out[at : at + length] = rng.randbytes(length)
        grown += len(out) - before
        out = out or bytearray(b"x")
    if rng.random() < 0.5:
        out[:8] = max(0, int.from_bytes(data[:8], "little") + grown).to_bytes(8, "little")
    return bytes(out)


def mutations(rng: random.Random, seeds: list[bytes]) -> Iterator[bytes]:
    """Half of them keep the header's JSON whole, so that they get past the parser."""
    while True:
        data, kind = rng.choice(seeds), rng.randrange(10)
        if kind == 0:
            yield rng.randbytes(rng.randrange(2000))
        elif kind == 1:
            yield by_hand(rng.randbytes(rng.randrange(300)))
        else:
            yield rewritten(rng, data) if kind < 6 else mangled(rng, data)


def test_ten_thousand_fuzzed_inputs() -> None:
    seeds = [toy(), toy_upload(client="south").pack(), pack("reply", {"w": torch.ones(1)}, {"a": [1, 2.5, None]})]
    cases = (case for case in mutations(random.Random(12), seeds) if case not in seeds)
    codes = Counter(refusal(lambda: receive(next(cases))) for _ in range(10_000))
    assert len(codes) >= 15, f"the fuzz must reach deep into the reader: {codes}"


# --- 13, 14: files ------------------------------------------------------------------------------------------------


def test_the_bytes_verified_are_the_bytes_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # here the loader may run
    path = tmp_path / "upload.safetensors"
    path.write_bytes(toy())
    data = read_file(path, UPLOAD)
    path.write_bytes(b"something else entirely")
    assert receive(data).pack() == toy_upload().pack()


def test_size_limit_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "terabyte.safetensors"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with at_most(1 << 20):
        assert refusal(lambda: read_file(path)) == "too_large"
    small = tmp_path / "small.safetensors"
    small.write_bytes(toy())
    assert refusal(lambda: read_file(small, Limits(max_bytes=len(toy()) - 1))) == "too_large"
    assert refusal(lambda: inspect(toy(), Limits(max_bytes=len(toy()) - 1))) == "too_large"
    assert read_file(small, Limits(max_bytes=len(toy()))) == toy()


@pytest.mark.parametrize("written", [0, 4096])
def test_a_hole_within_the_limit(written: int, tmp_path: Path) -> None:
    path = tmp_path / "hole.safetensors"
    with path.open("wb") as file:
        file.write(b"x" * written)
        file.truncate(1 << 30)
    with path.open("rb") as file:
        if os.lseek(file.fileno(), 0, os.SEEK_HOLE) >= 1 << 30:
            pytest.skip("this file system has no holes")
    with at_most(1 << 20):
        assert refusal(lambda: read_file(path)) == "sparse"


@pytest.mark.timeout(20)
def test_what_is_not_a_regular_file(tmp_path: Path) -> None:
    real = tmp_path / "real.safetensors"
    real.write_bytes(toy())
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "link.safetensors").symlink_to(real)
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "absent")
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    (tmp_path / "to_fifo.safetensors").symlink_to(tmp_path / "fifo.safetensors")
    cases = {
        "fifo": "not_a_file",
        "folder": "not_a_file",
        "link": "symlink",
        "dangling": "symlink",
        "loop": "symlink",
        "to_fifo": "symlink",
        "absent": "cannot_read",
    }
    before = sorted(tmp_path.iterdir())
    for name, code in cases.items():
        assert refusal(lambda name=name: read_file(tmp_path / f"{name}.safetensors")) == code, name
    for device in ("/dev/zero", "/dev/null", "/dev/tty"):
        if Path(device).exists():
            assert refusal(lambda device=device: read_file(device)) in ("not_a_file", "cannot_read")
    for strange in ("\0", "x" * 300, str(real) + "/x"):
        assert refusal(lambda strange=strange: read_file(strange)) == "cannot_read"
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"
    assert read_file(real) == toy()
    os.link(real, tmp_path / "second.safetensors")
    assert (
        refusal(lambda: read_file(real)) == refusal(lambda: read_file(tmp_path / "second.safetensors")) == "hard_link"
    )


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "growing.safetensors"
    path.write_bytes(toy())
    for change in (len(toy()) - 10, len(toy()) + 10):
        real = os.fstat

        def stat_then_change(handle: int, change: int = change, real: Any = real) -> Any:
            found = real(handle)
            path.write_bytes((toy() * 2)[:change])
            return found

        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", stat_then_change)
            assert refusal(lambda: read_file(path)) == "changing"
        path.write_bytes(toy())


def test_a_folder_of_strange_things(tmp_path: Path) -> None:
    good = ["a.safetensors", "b-2.x_y.safetensors", "_c.safetensors"]
    bad = [
        ".hidden.safetensors", "half.safetensors.part", "half.safetensors.tmp", "~a.safetensors", "notes.txt",
        "a b.safetensors", "é.safetensors", "a\nb.safetensors", "x" * 200 + ".safetensors", "-rf.safetensors",
        "a;rm.safetensors", ".tmp-abc",
    ]  # fmt: skip
    for name in good + bad:
        (tmp_path / name).write_bytes(toy())
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "fifo.safetensors")
    found = list_bundles(tmp_path)
    assert [path.name for path in found.bundles] == sorted(good)
    assert len(found.ignored) == len(bad) + 3
    assert all(len(line.splitlines()) == 1 for line in found.ignored)
    assert refusal(lambda: list_bundles(tmp_path / "absent")) == "cannot_read"
    assert refusal(lambda: list_bundles(tmp_path / "a.safetensors")) == "cannot_read"


def test_a_folder_with_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbicross.bundle.read.MAX_ENTRIES", 3)
    for number in range(4):
        (tmp_path / f"{number}.safetensors").touch()
    assert refusal(lambda: list_bundles(tmp_path)) == "too_many_files"


# --- manifests that parse but are not an upload's -----------------------------------------------------------------


def test_a_valid_safetensors_file_of_anybody() -> None:
    assert refusal(lambda: receive(bytes(save({"w": torch.ones(2)})))) == "no_manifest"
    assert refusal(lambda: receive(bytes(save({"w": torch.ones(2)}, metadata={"format": "pt"})))) == "no_manifest"


def test_a_digest_that_is_no_digest() -> None:
    good = hashlib.sha256(b"torch.uint8(1,)" + b"\0").hexdigest()
    for digest in ("", "0" * 64, good.upper(), good[:32], None, 5, [good], {}):
        text = manifest_text(tensors={"w": digest})
        data = by_hand(encode_header({MANIFEST: text}, {"w": ("U8", (1,))})[0][8:], b"\0")
        assert refusal(lambda data=data: unpack(data, "upload")) == "digest"
