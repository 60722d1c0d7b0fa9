"""The trust boundary: how tensors and a manifest become one file, and how such a file is read back."""

from fedbicross.bundle.format import Tensors, pack, unpack

__all__ = ["Tensors", "pack", "unpack"]
