"""The trust boundary: how tensors and a manifest become one file, and how such a file is read back."""

from fedbicross.bundle.format import Tensors, join_groups, pack, take_group, unpack

__all__ = ["Tensors", "join_groups", "pack", "take_group", "unpack"]
