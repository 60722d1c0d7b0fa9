"""The page."""

from __future__ import annotations


def render(*arguments: object) -> str:
    """Soon."""
    raise NotImplementedError(arguments)
