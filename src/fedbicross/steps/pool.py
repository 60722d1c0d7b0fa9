"""Replay memory of generated batches: tensors on the device, bounded, and the oldest leave first.

The authors of DENSE and Co-Boosting keep PNG files in a folder and read all of them back in every epoch (and with them
whatever an earlier run left there). ``uint8`` keeps what a PNG would: 256 levels a channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, assert_never

import torch
from torch import Tensor

Storage = Literal["uint8", "bf16", "fp32"]


def encode(images: Tensor, storage: Storage) -> Tensor:
    """Images in [-1, 1] as they are kept; ``uint8`` cuts off what lies outside."""
    if storage == "uint8":
        return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    if storage == "bf16":
        return images.to(torch.bfloat16)
    if storage == "fp32":
        return images.float()
    assert_never(storage)


def decode(kept: Tensor) -> Tensor:
    """Kept images as the clients see them."""
    return kept.float() / 127.5 - 1 if kept.dtype == torch.uint8 else kept.float()


class Pool:
    """Batches of images with their labels, and whatever else is known of each image (``extra``)."""

    def __init__(self, capacity: int, storage: Storage = "uint8") -> None:
        if capacity < 1:
            raise ValueError(f"a pool of {capacity} batches holds nothing")
        self.capacity, self.storage = capacity, storage
        self.batches: list[dict[str, Tensor]] = []
        self._joined: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """Batches held."""
        return len(self.batches)

    def add(self, images: Tensor, labels: Tensor, **extra: Tensor) -> None:
        """Keep a batch; beyond ``capacity`` the oldest is forgotten."""
        self.batches.append({"images": encode(images, self.storage), "labels": labels, **extra})
        self.batches = self.batches[-self.capacity :]
        self._joined = {}

    @property
    def images(self) -> int:
        """Images held."""
        return sum(len(batch["labels"]) for batch in self.batches)

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """The images of these numbers (0 is the oldest) decoded, with their labels and extras."""
        if not self._joined:
            self._join()
        taken = {key: value.index_select(0, rows) for key, value in self._joined.items()}
        return {**taken, "images": decode(taken["images"])}

    def _join(self) -> None:
        """One copy per epoch, so that a step is one gather; the batches become views of it and are held only once."""
        sizes = [len(batch["labels"]) for batch in self.batches]
        self._joined = {key: torch.cat([batch[key] for batch in self.batches]) for key in self.batches[0]}
        parts = {key: torch.split(value, sizes) for key, value in self._joined.items()}
        self.batches = [{key: part[index] for key, part in parts.items()} for index in range(len(sizes))]

    def batch(self, number: int) -> dict[str, Tensor]:
        """One batch as it was added, decoded."""
        found = self.batches[number]
        return {**found, "images": decode(found["images"])}

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        out = {f"{index}/{key}": value for index, batch in enumerate(self.batches) for key, value in batch.items()}
        return {**{name: value.cpu().clone() for name, value in out.items()}, "size": torch.tensor(len(self.batches))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.batches = [{} for _ in range(int(tensors["size"]))]
        for name, value in tensors.items():
            index, _, key = name.partition("/")
            if key:
                self.batches[int(index)][key] = value
        self._joined = {}
