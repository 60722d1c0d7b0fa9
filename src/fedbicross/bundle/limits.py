"""How large and how strange a bundle may be. Every limit is checked before memory is taken for what it bounds."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 1 << 20, 1 << 30

# Bytes per element, in the order in which the safetensors library lays tensors out (largest alignment first).
DTYPES: dict[str, int] = {
    "I64": 8,
    "F64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class Limits:
    """What a reader accepts. The defaults are for an upload: one file of one stranger."""

    max_bytes: int = 2 * GIB  # of the whole file
    max_header: int = 1 * MIB  # of the JSON header; ResNet-34 needs 0.06 MiB
    max_tensors: int = 10_000
    max_name_length: int = 256
    max_rank: int = 8
    max_elements: int = 1 << 30  # of one tensor
    max_depth: int = 16  # of nested lists and objects in header and manifest
    dtypes: frozenset[str] = frozenset(DTYPES)  # what a method's own check narrows down further
    plain_names: bool = True  # words of letters, digits, _ and -, joined by . or |
    empty_tensors: bool = False  # tensors with no element


UPLOAD = Limits()
# A reply may hold every client's network: the ensemble of a hundred ResNet-18 is 4.5 GB in 12,200 tensors.
REPLY = Limits(max_bytes=16 * GIB, max_header=8 * MIB, max_tensors=100_000)
# Files that this machine wrote for itself: checkpoints, client models, predictions, final models.
OWN = Limits(
    max_bytes=64 * GIB,
    max_header=32 * MIB,
    max_tensors=1_000_000,
    max_name_length=4096,
    max_elements=1 << 40,
    max_rank=64,
    max_depth=64,
    plain_names=False,
    empty_tensors=True,
)


def for_kind(kind: str) -> Limits:
    """The limits for a kind of bundle: strict for the two that travel."""
    return {"upload": UPLOAD, "reply": REPLY}.get(kind, OWN)


# Of a model: the odds that an image would have to pass to be referred for a class which is not seldom.
NOT_REFERRED = 1e4
