"""What a run has to say: one self-contained page, and tables to paste into a paper or a spreadsheet."""

from __future__ import annotations

from pathlib import Path


def write_report(run_dir: Path) -> list[Path]:
    """Read ``run_dir/results.json``, write the page and the tables beside it, and return their paths."""
    from fedbicross.report.write import write_report as write  # the templates are only loaded when a page is asked for

    return write(run_dir)


__all__ = ["write_report"]
