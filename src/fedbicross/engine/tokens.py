"""Hierarchical scale encoding (FALCON 2.3): images as sequences of tokens, coarse to fine, computed once per image.

Token 0 is the whole image, resized to the encoder's input. Then come square windows at full resolution, row by row;
where the stride does not divide what is left, a last window lies flush with the border, so that no pixel is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fedbicross.bundle import pack, unpack
from fedbicross.bundle.format import canonical_json
from fedbicross.errors import ConfigError
from fedbicross.models.encoders import EncoderSpec, load_encoder

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.context import Store
    from fedbicross.models.encoders.base import Encoder


class Box(NamedTuple):
    """A square part of an image, in pixels."""

    top: int
    left: int
    side: int


def boxes(image_size: int, window: int | None, stride: int | None = None) -> list[Box]:
    """The views of one image: all of it, then its windows row by row. Without a window, all of it only."""
    whole = Box(0, 0, image_size)
    if window is None:
        return [whole]
    stride = window if stride is None else stride
    if not 1 <= window < image_size or not 1 <= stride <= window:
        raise ConfigError(
            "windows",
            f"a window of {window} px with stride {stride} does not fit images of {image_size} px: "
            "the window must be smaller than the image, the stride no larger than the window",
        )
    starts = [*range(0, image_size - window, stride), image_size - window]
    return [whole, *(Box(top, left, window) for top in starts for left in starts)]


def token_sequences(
    images: np.ndarray,
    spec: EncoderSpec,
    device: str = "cpu",
    store: Store | None = None,
    on_view: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """s = f_HSE(x): tokens [n, 1 + L, dim] float32 on the CPU for uint8 images [n, H, W, C].

    With a store, every feature is kept under the hash of its image, its view and its encoder; methods share them.
    """
    encoder = load_encoder(spec.name, device, spec.size)
    views = boxes(images.shape[1], spec.window, spec.stride)
    hashes = image_hashes(images) if store is not None else None
    tokens = []
    for number, box in enumerate(views):
        tokens.append(_one_view(images, box, encoder, hashes, store))
        on_view(number + 1, len(views))
    return torch.stack(tokens, dim=1)


def image_hashes(images: np.ndarray) -> np.ndarray:
    """SHA-256 of every image, uint8 [n, 32]."""
    head = str(images.shape[1:]).encode()
    digests = [hashlib.sha256(head + np.ascontiguousarray(image).tobytes()).digest() for image in images]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(images), 32)


def _encode(images: np.ndarray, box: Box, encoder: Encoder) -> Tensor:
    part = images[:, box.top : box.top + box.side, box.left : box.left + box.side]
    return encoder(np.ascontiguousarray(part))


def _one_view(images: np.ndarray, box: Box, encoder: Encoder, hashes: np.ndarray | None, store: Store | None) -> Tensor:
    """Features [n, dim] of one view; those in the store are read, the others computed and added to it."""
    if store is None or hashes is None:
        return _encode(images, box, encoder)
    parts = {"encoder": encoder.name, "digest": encoder.digest, "size": encoder.size, "box": list(box)}
    folder = f"features/{hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]}"
    index = _Index(store, folder)
    wanted = [row.tobytes() for row in hashes]
    first = {key: row for row, key in reversed(list(enumerate(wanted))) if key not in index.places}
    if first:
        missing = np.array(sorted(first.values()))
        index.add(hashes[missing], _encode(images[missing], box, encoder))
    return index.gather(wanted, encoder.dim)


class _Index:
    """Which file ("shard") of the store holds which image's feature, and in which row."""

    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder
        data = store.load(f"{folder}/index.safetensors")
        tensors, info = ({}, {"shards": []}) if data is None else unpack(data, "feature_index")
        self.shards: list[str] = list(info["shards"])
        self.hashes = tensors.get("hashes", torch.zeros(0, 32, dtype=torch.uint8)).numpy()
        self.sizes: list[int] = info.get("sizes", [])
        rows = [(shard, row) for shard, size in enumerate(self.sizes) for row in range(size)]
        self.places = dict(zip((key.tobytes() for key in self.hashes), rows, strict=True))

    def add(self, hashes: np.ndarray, features: Tensor) -> None:
        """A new shard first, then the index that names it: a kill in between loses the shard, never the order."""
        name = hashlib.sha256(hashes.tobytes()).hexdigest()[:32]
        self.store.save(f"{self.folder}/{name}.safetensors", pack("features", {"features": features}, {}))
        self.places |= {key.tobytes(): (len(self.shards), row) for row, key in enumerate(hashes)}
        self.shards.append(name)
        self.sizes.append(len(hashes))
        self.hashes = np.concatenate([self.hashes, hashes])
        info = {"shards": self.shards, "sizes": self.sizes}
        tensors = {"hashes": torch.from_numpy(self.hashes)}
        self.store.save(f"{self.folder}/index.safetensors", pack("feature_index", tensors, info))

    def gather(self, wanted: list[bytes], dim: int) -> Tensor:
        """The features of these images, in their order."""
        out = torch.zeros(len(wanted), dim)
        places = [self.places[key] for key in wanted]
        for shard in sorted({place[0] for place in places}):
            data = self.store.load(f"{self.folder}/{self.shards[shard]}.safetensors") or b""
            features = unpack(data, "features")[0]["features"]
            rows = [(to, place[1]) for to, place in enumerate(places) if place[0] == shard]
            out[[to for to, _ in rows]] = features[[row for _, row in rows]]
        return out
