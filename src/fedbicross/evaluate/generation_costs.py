"""What a synthetic sample costs to make (FALCON's Fig. 5) and to send (its section 3.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from torch import nn


class UploadSize(NamedTuple):
    """Bytes of the two ways to send a client's synthetic data, and the cheaper one."""

    sequences: int
    generator: int
    cheaper: Literal["sequences", "generator"]


def sequence_bytes(count: int, length: int, width: int, item_bytes: int = 4) -> int:
    """``count`` sequences of ``length`` tokens of ``width`` numbers; 5 × 768 in 32 bits are 15 KiB each (the paper)."""
    return count * length * width * item_bytes


def module_bytes(module: nn.Module) -> int:
    """Parameters and buffers as stored."""
    return sum(t.numel() * t.element_size() for t in module.state_dict().values())


def break_even(generator_bytes: int, length: int, width: int, item_bytes: int = 4) -> int:
    """Up to so many sequences are no larger than the generator (the paper: about 9,850)."""
    return generator_bytes // sequence_bytes(1, length, width, item_bytes)


def upload_size(count: int, length: int, width: int, generator_bytes: int, item_bytes: int = 4) -> UploadSize:
    """Section 3.6: each client sends whichever is smaller, so that the generator bounds the cost."""
    sequences = sequence_bytes(count, length, width, item_bytes)
    return UploadSize(sequences, generator_bytes, "sequences" if sequences <= generator_bytes else "generator")


def flops_per_sample(generate: Callable[[int], object], count: int = 8) -> float:
    """Operations of the products and convolutions in ``generate(count)``, divided by ``count``.

    Element-wise work is not counted, as everywhere here; a sampler without any product (FedPFT's diagonal mixtures)
    has a formula of its own, `steps.mixtures.sampling_flops`.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        generate(count)
    return float(counter.get_total_flops()) / count
