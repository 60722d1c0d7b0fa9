"""The result table as Markdown, CSV and LaTeX, and every per-client number in long form."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from fedbicross.evaluate.names import CHOICES
from fedbicross.report.metric import NAMES, judged_by
from fedbicross.report.summary import Summary, clients_of, result_rows, summarise
from fedbicross.report.text import (
    NA,
    PROTOCOL_NAMES,
    PROTOCOLS,
    Stat,
    clean,
    fixed,
    mapping,
    number,
    percent_sd,
    sequence,
    short,
    size,
)
from fedbicross.report.verdict import row_verdict

CLIENT_HEADER = ("method", "role", "seed", "client", "protocol", "metric", "value")
CLIENT_METRICS = (
    "accuracy",
    "balanced_accuracy",
    "macro_auc",
    "macro_f1",
    "ece",
    "gain_over_local",
    "test_images",
)
CLIENT_COSTS = ("harmed", "clearly_harmed", "upload_bytes", "reply_bytes")

MARKDOWN_ESCAPES = str.maketrans(
    {c: f"\\{c}" for c in "\\`*[]|~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;", "$": "\\$"}
)
LATEX_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        # A row that starts with [ or * would be read as an argument of the \\ before it.
        "[": "{[}",
        "*": "{*}",
        "\u2212": "$-$",
        "±": r"$\pm$",
        "…": r"\ldots{}",
        "–": "--",
    }
    | {c: f"\\{c}" for c in "&%$#_{}"}
)


def header(results: Mapping[str, Any]) -> tuple[str, ...]:
    """The titles of the result table; a metric is named where it is not accuracy."""
    metric = str(judged_by(results)["judged_by"])
    what = "%" if metric == "accuracy" else f"{NAMES[metric]} %"
    return (
        "method",
        *(f"{PROTOCOL_NAMES[protocol]} {what}" for protocol in PROTOCOLS),
        f"worst client (matched) {what}",
        "harms",
        "upload per client",
        "reply per client",
        "seconds",
        "verdict",
    )


def harms(item: Summary) -> str:
    """``3 of 5``, summed over seeds; where more are lower, but by chance, ``3 of 5 (4 lower)``."""
    if item.harmed is None or item.lower is None or item.is_local:
        return NA
    return f"{item.harmed} of {item.judged}" + (f" ({item.lower} lower)" if item.lower > item.harmed else "")


def result_cells(item: Summary) -> list[str]:
    """One line of the result table, in the order of ``header``."""
    return [
        short(item.method),
        *(percent_sd(item.score[protocol]) for protocol in PROTOCOLS),
        percent_sd(item.worst),
        harms(item),
        size(item.upload.mean),
        size(item.reply.mean),
        fixed(item.seconds.mean),
        "; ".join(row_verdict(item)),
    ]


def result_table(results: Mapping[str, Any]) -> list[list[str]]:
    """The result table, one line a method, aggregated over seeds."""
    return [result_cells(item) for item in summarise(results)]


def markdown(results: Mapping[str, Any]) -> str:
    """A GitHub-flavoured table with the numbers to the right."""
    titles = header(results)
    left = {0, len(titles) - 1}
    rule = [":---" if index in left else "---:" for index in range(len(titles))]
    lines = [list(titles), rule, *([_markdown_cell(cell) for cell in row] for row in result_table(results))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _markdown_cell(text: str) -> str:
    escaped = text.translate(MARKDOWN_ESCAPES)
    # Underscores inside words are literal in GitHub's dialect; only those at an edge would open emphasis.
    parts = escaped.split("_")
    joined = parts[0]
    for before, after in pairwise(parts):
        inside = before[-1:].isalnum() and after[:1].isalnum()
        joined += ("_" if inside else "\\_") + after
    return joined


def latex(results: Mapping[str, Any]) -> str:
    """A booktabs tabular; put it into a table environment of your own."""
    titles = header(results)
    columns = "l" + "r" * (len(titles) - 2) + "l"
    lines = [
        "% written by fedbicross; needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}",
        f"\\begin{{tabular}}{{{columns}}}",
        "\\toprule",
        _latex_row(titles),
        "\\midrule",
        *(_latex_row(row) for row in result_table(results)),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cell.translate(LATEX_ESCAPES) for cell in cells) + r" \\"


def csv_text(value: object) -> str:
    """Text for a spreadsheet: what would start a formula gets an apostrophe in front."""
    text = clean(value)
    return f"'{text}" if text[:1] in tuple("=+-@\u2212＝＋－＠") else text


def csv_number(value: object) -> str:
    """A number exactly as stored, or n/a. Negative numbers stay numbers: they cannot hold a formula."""
    found = number(value)
    if found is None:
        return NA
    return str(value) if isinstance(value, int) else repr(found)


def result_csv(results: Mapping[str, Any]) -> str:
    """The result table for programs: means and standard deviations in columns of their own, unrounded."""
    named = [f"{protocol}_percent" for protocol in PROTOCOLS] + ["worst_client_matched_percent"]
    named += [f"matched_{metric}_percent" for metric in CHOICES]
    header = ["method", "role", "seeds", "metric"]
    header += [column for name in named for column in (name, f"{name}_sd")]
    header += ["gain_over_local_points", "gain_over_local_points_sd", "harmed_clients", "clearly_harmed_clients"]
    header += ["judged_clients"]
    header += ["upload_bytes_per_client", "reply_bytes_per_client", "seconds", "verdict"]
    lines = []
    for item in summarise(results):
        line = [csv_text(item.method), csv_text(item.role), str(item.seeds), item.metric]
        beside = [item.scores[metric]["matched"] for metric in CHOICES]
        for value in (*(item.score[protocol] for protocol in PROTOCOLS), item.worst, *beside, item.gain):
            line += _hundredfold(value)
        line += [csv_number(None if item.is_local else value) for value in (item.lower, item.clearly_harmed)]
        line.append(csv_number(item.judged or None))
        line += [csv_number(value.mean) for value in (item.upload, item.reply, item.seconds)]
        lines.append([*line, csv_text("; ".join(row_verdict(item)))])
    return csv_file(header, lines)


def _hundredfold(value: Stat) -> list[str]:
    # Rounded far below any meaning, so that 96.1 does not read 96.10000000000001.
    return [csv_number(None if part is None else round(100 * part, 10)) for part in (value.mean, value.sd)]


def client_csv(results: Mapping[str, Any]) -> str:
    """Long form: one line per method, seed, client, protocol and metric."""
    return csv_file(CLIENT_HEADER, _client_lines(results))


def _client_lines(results: Mapping[str, Any]) -> Iterable[list[str]]:
    for row in result_rows(results):
        for client in clients_of(row):
            start = [csv_text(row["method"]), csv_text(row.get("role")), csv_text(row.get("seed"))]
            start.append(csv_text(client.get("client")))
            for protocol in PROTOCOLS:
                for metric in CLIENT_METRICS:
                    values = client.get(metric)
                    value = values.get(protocol) if isinstance(values, Mapping) else None
                    yield [*start, protocol, metric, csv_number(value)]
            for metric, value in against_alone(client).items():
                yield [*start, "matched", metric, csv_number(value)]
            for metric in CLIENT_COSTS:
                value = client.get(metric)
                yield [*start, "", metric, csv_number(int(value) if isinstance(value, bool) else value)]


def against_alone(client: Mapping[str, Any]) -> dict[str, object]:
    """Images won and lost against training alone and the interval of the difference, under names for a table."""
    found = mapping(client.get("against_alone"))
    low, high = [*sequence(found.get("interval")), None, None][:2]
    return {"lost": found.get("lost"), "won": found.get("won"), "gain_low": low, "gain_high": high}


def csv_file(header: Iterable[str], lines: Iterable[list[str]]) -> str:
    """Lines as a file."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return stream.getvalue()
