"""What a method costs, in words: bytes, operations, seconds."""

from __future__ import annotations

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def training_flops(forward_flops: int, samples: int, epochs: int) -> int:
    """Operations to train on ``samples`` images for ``epochs``: 3 × the forward pass of each image.

    The backward pass of a convolution or linear layer is two products of the size of the forward one (the gradient
    of its input and of its weights), hence 1 + 2. Element-wise work and the optimiser are small beside them.
    """
    return 3 * forward_flops * samples * epochs


def format_bytes(count: float | None) -> str:
    """Such as ``44.7 MB`` (decimal prefixes, as disks and networks count)."""
    return _with_prefix(count, "B")


def format_flops(count: float | None) -> str:
    """Such as ``913 MFLOP``: operations, not operations a second."""
    return _with_prefix(count, "FLOP")


def format_seconds(seconds: float | None) -> str:
    """Such as ``250 ms``, ``4.2 s``, ``3 min 05 s`` or ``2 h 10 min``."""
    if seconds is None:
        return "n/a"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if round(seconds * 1000) < 1000:
        return f"{round(seconds * 1000)} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def _with_prefix(value: float | None, unit: str) -> str:
    """Three significant digits with the largest prefix that leaves at least 1; None is ``n/a``."""
    if value is None:
        return "n/a"
    if abs(value) < 999.5:  # 999.5 would print as 1000 with three digits: it belongs to the next prefix
        return f"{value:.3g} {unit}"
    scaled = float(value)
    for prefix in PREFIXES:
        if abs(scaled) < 999.5 or prefix == PREFIXES[-1]:
            break
        scaled /= 1000
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f} {prefix}{unit}"
