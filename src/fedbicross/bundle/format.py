"""One plain safetensors file: tensors, and a canonical JSON manifest in its metadata.

The manifest names the kind of the bundle and holds the SHA-256 of every tensor, so that a flipped bit
anywhere is noticed. The same tensors and manifest always give the same bytes. Never pickle, never zip.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedbicross.errors import UploadError

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]

FORMAT = 1
MAX_HEADER = 4 << 20  # bytes; checked before the header is parsed
_KEY = "fedbicross"  # a single metadata key: safetensors does not promise an order among several


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 over dtype, shape and raw bytes."""
    import torch

    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + raw.tobytes()).hexdigest()


def pack(kind: str, tensors: Tensors, manifest: Mapping[str, Any]) -> bytes:
    """Encode tensors and a JSON-able manifest as one safetensors file."""
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    digests = {name: tensor_digest(tensor) for name, tensor in plain.items()}
    text = canonical_json({"format": FORMAT, "kind": kind, "tensors": digests, "manifest": dict(manifest)})
    return bytes(save(plain, metadata={_KEY: text}))


def unpack(data: bytes, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Decode and verify what ``pack`` made; anything else is an ``UploadError``."""
    manifest, digests = _read_manifest(data, kind)
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UploadError("bad_tensors", f"not a readable safetensors file: {error}") from None
    if tensors.keys() != digests.keys():
        raise UploadError("tensor_list", "the tensors in the file are not those that its manifest lists")
    for name, tensor in tensors.items():
        if tensor_digest(tensor) != digests[name]:
            raise UploadError("digest", f"tensor {name!r} does not match its SHA-256: the file is damaged")
    return tensors, manifest


def join_groups(**groups: Tensors) -> dict[str, Tensor]:
    """Several dicts of tensors as one: ``student|head.weight`` and so on."""
    return {f"{group}|{name}": value for group, tensors in groups.items() for name, value in tensors.items()}


def take_group(tensors: Tensors, group: str) -> dict[str, Tensor]:
    """One of the dicts that ``join_groups`` put together."""
    prefix = f"{group}|"
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _read_manifest(data: bytes, kind: str) -> tuple[dict[str, Any], dict[str, str]]:
    if len(data) < 8:
        raise UploadError("too_short", f"{len(data)} bytes are no bundle")
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER, len(data) - 8):
        raise UploadError("header_length", f"declared header of {length} bytes is over the limit or the file")
    try:
        text = json.loads(data[8 : 8 + length])["__metadata__"][_KEY]
        outer = json.loads(text)
        found, manifest, digests = outer["kind"], outer["manifest"], outer["tensors"]
        version = outer["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UploadError("no_manifest", "the file carries no fedbicross manifest") from None
    if version != FORMAT:
        raise UploadError("format_version", f"bundle format {version!r} is not {FORMAT}")
    if found != kind:
        raise UploadError("wrong_kind", f"this is a {found!r} bundle where a {kind!r} is expected")
    if not isinstance(manifest, dict) or not isinstance(digests, dict):
        raise UploadError("no_manifest", "the manifest is not an object")
    return manifest, digests
