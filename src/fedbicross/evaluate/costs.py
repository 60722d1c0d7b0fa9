"""What a method costs: bytes, operations and seconds in words, and the size of synthetic data (FALCON 3.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import nn

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


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
