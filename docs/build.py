"""The first half of ``make docs``: fill the generated blocks of the pages, draw the pictures, write the notebooks of
the examples and the page of all benched cells; Sphinx does the rest.

A block starts with ``<!-- generated: NAME -->`` and ends with ``<!-- end -->``; what stands between is replaced by
what ``docs.blocks`` makes of NAME. ``--check`` writes nothing and exits with 1 if a block or picture is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from docs import benched, blocks, notebooks, pictures

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- generated: (?P<name>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Every Markdown file that may hold blocks."""
    readmes = [ROOT / f"{folder}README.md" for folder in ("", "configs/", "results/")]
    return [*readmes, *sorted((ROOT / "docs").rglob("*.md"))]


def fill(text: str, page: Path) -> str:
    """The page's text with every block made anew."""
    return BLOCK.sub(lambda m: f"{m[1]}{blocks.make(m['name'], page, ROOT).strip()}\n{m[3]}", text)


def planned() -> dict[Path, str]:
    """What every page and picture should contain."""
    texts = {page: fill(page.read_text(encoding="utf-8"), page) for page in pages()}
    texts |= {ROOT / "docs" / "images" / name: text for name, text in pictures.all_pictures().items()}
    return texts | notebooks.all_notebooks(ROOT) | benched.page(ROOT)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything is stale")
    arguments = parser.parse_args()
    wanted = planned()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'stale' if arguments.check else 'updated'}: {path.relative_to(ROOT)}")
    if arguments.check:
        print("run `make docs`" if stale else "all generated blocks are up to date")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
