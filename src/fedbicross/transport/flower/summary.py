"""What the server writes at the end of a run, and the operator's command reads. No import of Flower."""

from __future__ import annotations

from dataclasses import dataclass, field

SUMMARY = "flower.json"  # of the last run, in its folder at the server


@dataclass
class Summary:
    """What happened, by the names of the sites; written to the server's folder."""

    run: str
    flower_run: int
    missing: list[str] = field(default_factory=list)  # no upload
    unusable: dict[str, str] = field(default_factory=dict)  # an upload that is unlike most others, and in what
    late: list[str] = field(default_factory=list)  # an upload, but after the fusion had begun
    delivered: dict[str, str] = field(default_factory=dict)  # what each site did with its reply
    undelivered: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # codes of what was refused, in order
    declined: dict[str, str] = field(
        default_factory=dict
    )  # sites whose own policy refuses, or that the operator left out, and a code
    complete: bool = False
    error: str = ""  # what ended the run before that
