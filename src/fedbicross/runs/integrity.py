"""Is everything in a run's folder what the run wrote? Reads all of it, changes nothing."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from fedbicross import sums
from fedbicross.atomic import TEMPORARY, read_plain
from fedbicross.errors import RunError
from fedbicross.runs.store import OBJECTS, RunFolder

# Made from the results, again and again; the lock; and the log, whose lines carry their own digests.
_NOT_LISTED = ("report.html", "tables", "audit", "audit.json", ".lock", "events.jsonl", sums.NAME)

_DROPPED = re.compile(r"^stages/|/round-\d+/")  # checkpoints of work that is done, and rounds that are over


@dataclass
class Checked:
    """How many files were compared, and a line about each that is not as it was written."""

    files: int = 0
    differences: list[str] = field(default_factory=list)


def check_run(out: Path) -> Checked:
    """Compare every file of a run with what was written, and results.json with the rows it is made of."""
    if not (out / "config.toml").is_file():
        raise RunError("not_a_run", f"{out} holds no run (no config.toml)")
    written, found = sums.Sums(out), Checked()
    if not written:
        written.check("config.toml", b"")  # says why nothing can be compared
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.is_dir() or name.partition("/")[0] in _NOT_LISTED or path.name.startswith(TEMPORARY):
            continue
        found.files += 1
        try:
            data = read_plain(path)
            if name.startswith(f"{OBJECTS}/"):
                if hashlib.sha256(data).hexdigest() != path.name:
                    found.differences.append(f"{name}: its content is not what its name says")
            elif not written.lists(name):
                found.differences.append(f"{name}: the run did not write it")
            else:
                written.check(name, data)
        except OSError as error:
            found.differences.append(f"{name}: {error.strerror}")
        except RunError:
            found.differences.append(f"{name}: not what was written")
    _find_missing(out, written, found)
    try:
        RunFolder(out).events()
    except RunError as error:
        found.differences.append(str(error.args[0]))
    _compare_rows(out, found)
    return found


def _find_missing(out: Path, written: sums.Sums, found: Checked) -> None:
    """What a run wrote and did not drop itself."""
    gone = [name for name in written.names() if not (out / name).exists() and not _DROPPED.search(name)]
    found.differences += [f"{name}: missing" for name in gone]


def _compare_rows(out: Path, found: Checked) -> None:
    """Whether results.json says what the rows say, and every row of it is there."""
    if not (out / "results.json").exists():
        return  # said above, or the run is not that far
    try:
        results = json.loads(read_plain(out / "results.json"))
        if results["rows_sha256"] != sums.rows_digest(results["rows"]):
            found.differences.append("results.json: a row was changed")
        for row in results["rows"]:
            name = f"rows/seed-{row['seed']}/{row['method'].replace(':', '+')}.json"
            kept = json.loads(read_plain(out / name))
            if sums.rows_digest([row]) != sums.rows_digest([kept]):
                found.differences.append(f"results.json: its row of {row['method']} is not {name}")
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        found.differences.append(f"results.json and rows/ do not fit together ({error})")
