"""Keep the raw results of a finished run under ``results/`` for the tables of the documentation.

``python -m docs.store runs/demo`` copies results.json to ``results/demo/``; ``--screenshot`` also photographs the
run's report with a Chromium that is on the PATH. Then run ``make docs``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fedbicross.runs.store import json_text

ROOT = Path(__file__).parents[1]
LIMIT = 500_000  # bytes; larger files do not belong in a repository
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs.store", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--name", help="folder under results/ (default: the run's name)")
    parser.add_argument("--screenshot", action="store_true", help="also write docs/images/report.png")
    arguments = parser.parse_args()
    results = json.loads((arguments.run / "results.json").read_text(encoding="utf-8"))
    if not results["complete"]:
        print("the run is not complete: resume it first", file=sys.stderr)
        return 1
    target = ROOT / "results" / (arguments.name or results["name"]) / "results.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(trimmed(results), encoding="utf-8")
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size:,} bytes")
    if arguments.screenshot:
        picture = ROOT / "docs" / "images" / "report.png"
        photograph(arguments.run / "report.html", picture)
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes")
    return 0


def trimmed(results: dict[str, object]) -> str:
    """The results as text; only where they are too large, without diagnosis and curves, which no table needs."""
    text = json_text(results) + "\n"
    if len(text.encode()) < LIMIT:
        return text
    rows = [{key: value for key, value in row.items() if key != "diagnosis"} for row in results["rows"]]  # type: ignore[attr-defined]
    short = {**results, "rows": rows, "training": {}, "trimmed": ["rows[].diagnosis", "training"]}
    text = json.dumps(short, sort_keys=True) + "\n"
    if len(text.encode()) >= LIMIT:
        raise SystemExit(f"the results are larger than {LIMIT:,} bytes even without diagnosis and curves")
    return text


def photograph(page: Path, picture: Path) -> None:
    """The top of the report as a PNG."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"no browser found: install one of {', '.join(BROWSERS)}")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars"
    flags += " --disable-background-networking --disable-component-update --disable-sync --window-size=1280,1500"
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *flags.split(), f"--user-data-dir={profile}", f"--screenshot={picture.resolve()}"]
        subprocess.run([*command, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    sys.exit(main())
