"""The page: results in, one HTML string out, with nothing to fetch and nothing to run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fedbicross.report import classes, clients, rounds, sections
from fedbicross.report.metric import judged_by
from fedbicross.report.summary import summarise
from fedbicross.report.verdict import judge


def environment(*packages: str) -> Environment:
    """For templates of these packages, the first that has one; every value is escaped, and a missing one an error."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(results: Mapping[str, Any], run_dir: Path | None = None) -> str:
    """The report page. ``run_dir`` is only needed to embed the pictures that a method left there."""
    results = judged_by(results)

    def breakable(name: str) -> Markup:
        """A method name may be broken after its colon or an underscore; escaping has put neither into it."""
        return Markup(str(escape(name)).replace(":", ":<wbr>").replace("_", "_<wbr>"))

    templates = environment("fedbicross.report")
    templates.filters["breakable"] = breakable
    return templates.get_template("report.html.j2").render(context(results, run_dir)) + "\n"


def context(results: Mapping[str, Any], run_dir: Path | None) -> dict[str, Any]:
    """Everything that the template shows, in the order of the page."""
    summaries = summarise(results)
    verdict = judge(results, summaries)
    return {
        "head": sections.head(results),
        "verdict": verdict,
        "tiles": sections.tiles(summaries, verdict),
        "warnings": sections.warnings(results),
        "accuracy": sections.accuracy(results, summaries),
        "classes": classes.section(results, summaries, verdict),
        "rounds": rounds.section(results),
        "holdings": clients.holdings(results),
        "gains": clients.gains(results, summaries, verdict),
        "confusions": clients.confusions(results, summaries, verdict),
        "training": clients.training(results),
        "costs": sections.costs(summaries),
        "upload_summaries": sections.upload_summaries(summaries),
        "diagnoses": sections.diagnoses(results, run_dir),
        "provenance": sections.provenance(results),
    }
