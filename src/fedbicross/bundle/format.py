"""One plain safetensors file: tensors, and a canonical JSON manifest in its metadata.

The manifest names the kind of the bundle and holds the SHA-256 of every tensor. A bundle has exactly one encoding:
a reader takes the header apart, writes it again from what it understood, and refuses the file if a single byte
differs. So the manifest, the digests in it and the signature over it leave no bit of the file unaccounted for.
Never pickle, never zip, tensors and strings only.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

from fedbicross.bundle.limits import DTYPES, UPLOAD, Limits, for_kind
from fedbicross.errors import MethodError, UploadError
from fedbicross.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]

FORMATS = {"upload": 2, "reply": 2}  # of what travels: since 2 with the agreement that it was made under; others 1
MANIFEST, SIGNER, SIGNATURE = "fedbicross", "signer", "signature"  # the keys of the file's metadata
_TORCH_NAMES = {
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_ORDER = {dtype: rank for rank, dtype in enumerate(DTYPES)}
_PLAIN_NAME = re.compile(r"(?!__)[A-Za-z0-9_-]+(?:[.|](?!__)[A-Za-z0-9_-]+)*", re.ASCII)


@dataclass(frozen=True)
class TensorInfo:
    """One line of the tensor table; ``start`` and ``end`` count from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """All that a bundle says before its tensors: read, bounded and checked, but no tensor has been touched."""

    kind: str
    manifest: dict[str, Any]
    tensors: dict[str, TensorInfo]
    digests: dict[str, str]
    text: str  # the canonical manifest as it stands in the file: what a signature covers
    signer: str | None
    signature: str | None


# --- writing ------------------------------------------------------------------------------------------------------


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 over type, shape and raw bytes."""
    plain = tensor.detach().cpu().contiguous()
    return _digest(_dtype_name(plain), tuple(plain.shape), _raw(plain))


def pack(kind: str, tensors: Tensors, manifest: Mapping[str, Any], finite: bool = True) -> bytes:
    """Encode tensors and a JSON-able manifest as one safetensors file.

    NaN and infinity are refused, so that no file of ours ever holds them; ``finite=False`` is for tests that forge.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if finite:
        for name, tensor in plain.items():
            if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, tensor.aminmax())):
                hint = "a training diverged; lower its learning rate"
                raise MethodError("non_finite", f"{kind} not written: tensor {name!r} holds NaN or infinity; {hint}")
    table = {name: (_dtype_name(tensor), tuple(tensor.shape)) for name, tensor in plain.items()}
    raw = {name: _raw(tensor) for name, tensor in plain.items()}
    digests = {name: _digest(*table[name], raw[name]) for name in plain}
    values = {"format": FORMATS.get(kind, 1), "kind": kind, "tensors": digests, "manifest": dict(manifest)}
    text = canonical_json(json.loads(canonical_json(values)))  # twice: keys that are numbers sort otherwise as text
    head, ordered = encode_header({MANIFEST: text}, table)
    return b"".join([head, *(raw[name] for name in ordered)])


def encode_header(
    metadata: Mapping[str, str], table: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[bytes, list[str]]:
    """Length prefix and header as the safetensors library writes them, and the order of the tensors after it."""
    ordered = sorted(table, key=lambda name: (_ORDER[table[name][0]], name))
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name in ordered:
        dtype, shape = table[name]
        end = offset + DTYPES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False, check_circular=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ordered


def with_metadata(data: bytes, header: Header, signer: str | None, signature: str | None) -> bytes:
    """The same bundle with this signature, or with none."""
    table = {name: (info.dtype, info.shape) for name, info in header.tensors.items()}
    head, _ = encode_header(_metadata(replace(header, signer=signer, signature=signature)), table)
    return b"".join([head, memoryview(data)[_data_start(data) :]])


# --- reading ------------------------------------------------------------------------------------------------------


def inspect(data: bytes, limits: Limits = UPLOAD) -> Header:
    """Read and check everything but the tensors' content; no tensor is made and no memory is taken for one."""
    if len(data) > limits.max_bytes:
        raise UploadError("too_large", f"{len(data):,} bytes are over the limit of {limits.max_bytes:,}")
    if len(data) < 8:
        raise UploadError("too_short", f"{len(data)} bytes are no bundle")
    start = _data_start(data)
    if start > len(data) or start - 8 > limits.max_header:
        raise UploadError("header_length", f"declared header of {start - 8} bytes is over the limit or the file")
    entries = _object(_parse(data[8:start], "the header", limits), "header", "the header")
    metadata = _object(entries.pop("__metadata__", None), "no_manifest", "the file's metadata")
    text, signer, signature = _split_metadata(metadata)
    outer = _object(_parse(text.encode("utf-8", "surrogatepass"), "the manifest", limits), "no_manifest", "manifest")
    if outer.keys() != {"format", "kind", "manifest", "tensors"}:
        raise UploadError("no_manifest", "the file carries no fedbicross manifest")
    if not isinstance(outer["kind"], str):
        raise UploadError("no_manifest", "the kind of the bundle is not a text")
    wanted = FORMATS.get(outer["kind"], 1)
    if type(outer["format"]) is not int or outer["format"] != wanted:
        raise UploadError("format_version", f"this is not a bundle of format {wanted}: update the older side")
    manifest = _object(outer["manifest"], "no_manifest", "the inner manifest")
    digests = _object(outer["tensors"], "tensor_list", "the list of tensors")
    table = _tensor_table(entries, start, len(data), limits)
    if table.keys() != digests.keys():
        raise UploadError("tensor_list", "the tensors in the file are not those that its manifest lists")
    header = Header(outer["kind"], manifest, table, digests, text, signer, signature)
    _check_canonical(data, header, outer)
    return header


def check_digests(data: bytes, header: Header) -> None:
    """Every tensor's bytes against the manifest; hashed where they lie, without a copy."""
    view = memoryview(data)
    for name, info in header.tensors.items():
        if _digest(info.dtype, info.shape, view[info.start : info.end]) != header.digests[name]:
            raise UploadError("digest", f"tensor {name!r} does not match its SHA-256: the file is damaged")


def unpack(data: bytes, kind: str, limits: Limits | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Decode and verify what ``pack`` made; anything else is an ``UploadError``."""
    header = inspect(data, limits or for_kind(kind))
    check_kind(header, kind)
    check_digests(data, header)
    return build_tensors(data, header), header.manifest


def check_kind(header: Header, kind: str) -> None:
    """An upload is no reply, and neither is a checkpoint."""
    if header.kind != kind:
        raise UploadError("wrong_kind", f"this is a bundle of kind {header.kind[:32]!r}; {kind!r} is expected")


def build_tensors(data: bytes, header: Header) -> dict[str, Tensor]:
    """The tensors of an inspected bundle: writable views of one copy of its data, so that memory is twice the file."""
    start = _data_start(data)
    buffer = bytearray(memoryview(data)[start:])
    return {name: _view(buffer, info, start) for name, info in header.tensors.items()}


# --- groups of tensors --------------------------------------------------------------------------------------------


def join_groups(**groups: Tensors) -> dict[str, Tensor]:
    """Several dicts of tensors as one: ``student|head.weight`` and so on."""
    return {f"{group}|{name}": value for group, tensors in groups.items() for name, value in tensors.items()}


def take_group(tensors: Tensors, group: str) -> dict[str, Tensor]:
    """One of the dicts that ``join_groups`` put together."""
    prefix = f"{group}|"
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


# --- parts of writing ---------------------------------------------------------------------------------------------


def _dtype_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    for dtype, known in _TORCH_NAMES.items():
        if known == name:
            return dtype
    raise TypeError(f"a bundle cannot hold tensors of type {name}")


def _raw(tensor: Tensor) -> memoryview:
    """The tensor's own memory as bytes."""
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _digest(dtype: str, shape: tuple[int, ...], raw: memoryview) -> str:
    """SHA-256 over type, shape and bytes."""
    digest = hashlib.sha256(f"torch.{_TORCH_NAMES[dtype]}{shape}".encode())
    digest.update(raw)
    return digest.hexdigest()


def _metadata(header: Header) -> dict[str, str]:
    values = {MANIFEST: header.text, SIGNER: header.signer, SIGNATURE: header.signature}
    return {key: value for key, value in values.items() if value is not None}


# --- parts of reading ---------------------------------------------------------------------------------------------


def _data_start(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def _parse(raw: bytes, what: str, limits: Limits) -> Any:
    """JSON without what JSON parsers disagree about: duplicate keys, NaN, huge numbers, deep nesting."""
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_refuse, parse_float=_finite
        )
        if _depth(value, limits.max_depth) > limits.max_depth:
            raise ValueError(f"nested deeper than {limits.max_depth}")
    except (ValueError, RecursionError) as error:
        code = "no_manifest" if what == "the manifest" else "header"
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:120]
        raise UploadError(code, f"{what} is not plain JSON: {reason!r}") from None
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def _depth(value: Any, stop: int) -> int:
    """How deep lists and objects are nested, counted up to just over ``stop``; no recursion."""
    level, depth = [value], 0
    while depth <= stop:
        inner: Iterable[Any] = chain.from_iterable(
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        )
        if not any(isinstance(item, dict | list) for item in level):
            return depth
        level, depth = list(inner), depth + 1
    return depth


def _object(value: Any, code: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UploadError(code, f"{what} is not a JSON object")
    return value


def _split_metadata(metadata: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    """Manifest, signer and signature; any other key would be a field that nobody signed."""
    if MANIFEST not in metadata:
        raise UploadError("no_manifest", "the file carries no fedbicross manifest")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise UploadError("metadata", "the file's metadata holds something other than text")
    if metadata.keys() not in ({MANIFEST}, {MANIFEST, SIGNER, SIGNATURE}):
        raise UploadError("metadata", "the file's metadata has a key that no bundle has, or half a signature")
    return metadata[MANIFEST], metadata.get(SIGNER), metadata.get(SIGNATURE)


def _tensor_table(entries: Mapping[str, Any], start: int, size: int, limits: Limits) -> dict[str, TensorInfo]:
    """The table of tensors: known types, whole numbers, no gap, no overlap, nothing before or after."""
    if len(entries) > limits.max_tensors:
        raise UploadError("too_many_tensors", f"{len(entries):,} tensors are over the limit of {limits.max_tensors:,}")
    if len({name.casefold() for name in entries}) != len(entries) and limits.plain_names:
        raise UploadError("tensor_name", "two tensors have the same name but for upper and lower case")
    table: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        table[name] = _tensor_info(name, entry, start, limits)
    end = start
    for name, info in sorted(table.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != end:
            raise UploadError("offsets", f"tensor {name!r} leaves a gap in the file or lies over another")
        end = info.end
    if end != size:
        raise UploadError("file_size", f"the tensors end at byte {end:,}, the file at {size:,}: cut off or added to")
    return table


def _tensor_info(name: str, entry: Any, start: int, limits: Limits) -> TensorInfo:
    if len(name) > limits.max_name_length or (limits.plain_names and not _PLAIN_NAME.fullmatch(name)):
        raise UploadError("tensor_name", f"{name[:64]!r} is no name for a tensor")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UploadError("tensor_entry", f"the entry of tensor {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES or dtype not in limits.dtypes:
        raise UploadError("dtype", f"tensor {name!r} has type {str(dtype)[:16]!r}, which is not accepted")
    if not _whole_numbers(shape) or len(shape) > limits.max_rank:
        raise UploadError("shape", f"tensor {name!r} has a shape that is no list of at most {limits.max_rank} sizes")
    elements = math.prod(shape)
    if elements > limits.max_elements or (elements == 0 and not limits.empty_tensors):
        raise UploadError("shape", f"tensor {name!r} is empty or has more than {limits.max_elements:,} elements")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise UploadError("offsets", f"tensor {name!r} has no start and end")
    if offsets[1] - offsets[0] != elements * DTYPES[dtype]:
        raise UploadError("tensor_size", f"tensor {name!r} does not have the bytes that its type and shape need")
    return TensorInfo(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_canonical(data: bytes, header: Header, outer: Mapping[str, Any]) -> None:
    """The header must be what this module would have written, to the byte: one bundle, one encoding."""
    table = {name: (info.dtype, info.shape) for name, info in header.tensors.items()}
    try:
        same_text = canonical_json(outer) == header.text
        head, _ = encode_header(_metadata(header), table)
    except ValueError:  # a lone surrogate has no encoding
        same_text, head = False, b""
    if not same_text or memoryview(data)[: len(head)] != head or len(head) != _data_start(data):
        raise UploadError("not_canonical", "the header is not written as a bundle's header is: the file was altered")


def _view(buffer: bytearray, info: TensorInfo, start: int) -> Tensor:
    """The one place where bytes from outside become a tensor."""
    dtype = getattr(torch, _TORCH_NAMES[info.dtype])
    if info.start == info.end:
        return torch.empty(info.shape, dtype=dtype)
    count = (info.end - info.start) // DTYPES[info.dtype]
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=info.start - start).reshape(info.shape)
