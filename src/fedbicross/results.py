"""What a run from Python gives back: the content of results.json, and what a person wants to see of it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup

from fedbicross import report
from fedbicross.atomic import write_atomic
from fedbicross.errors import ConfigError, RunError

if TYPE_CHECKING:
    import pandas


class Results(dict[str, Any]):
    """The results of a run: a dict with the content of results.json, which shows itself as a table and a verdict."""

    def __init__(self, content: Mapping[str, Any], folder: str | Path | None = None) -> None:
        super().__init__(content)
        self.folder = None if folder is None else Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> Results:
        """The results of a run that was kept in ``folder``."""
        return cls(report.write.load_results(Path(folder)), folder)

    @property
    def verdict(self) -> str:
        """In one sentence: was taking part worth it?"""
        return report.verdict.judge(self, report.summary.summarise(self)).headline

    def table(self, of: Literal["methods", "clients"] = "methods") -> pandas.DataFrame:
        """A pandas DataFrame: a line for each method, or for each method, seed, client, protocol and metric."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("no_pandas", "table() needs one more package: pip install pandas") from None
        text = report.tables.result_csv(self) if of == "methods" else report.tables.client_csv(self)
        return pandas.read_csv(io.StringIO(text), na_values=[report.text.NA])

    def report(self, to: str | Path | None = None) -> Path:
        """Write the report page to the file ``to``, or with its tables into the run's folder; returns where it is."""
        if to is None:
            if self.folder is None:
                raise ConfigError("no_folder", "this run was not kept in a folder: say where, report('report.html')")
            return report.write_report(self.folder)[0]
        try:
            write_atomic(Path(to), report.html.render(self, self.folder).encode("utf-8", "replace"))
        except OSError as error:
            raise RunError("cannot_write", f"{to} cannot be written: {error.strerror}") from None
        return Path(to)

    def track(self, to: Literal["tensorboard", "mlflow"], logs: str | Path | None = None) -> str:
        """Log to TensorBoard files in the folder ``logs``, or to MLflow at the address ``logs``; says where."""
        if to == "tensorboard":
            return str(report.track.to_tensorboard(self, Path(logs or "tensorboard")))
        return report.track.to_mlflow(self, None if logs is None else str(logs))

    def __repr__(self) -> str:
        return report.terminal.text(self)

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        *columns, _ = report.tables.header(self)  # the last one, a verdict for every row, is long
        head = Markup().join(Markup("<th>{}</th>").format(title) for title in columns)
        lines = Markup().join(
            Markup("<tr>{}</tr>").format(Markup().join(Markup("<td>{}</td>").format(cell) for cell in cells[:-1]))
            for cells in report.tables.result_table(self)
        )
        page = Markup("<p><b>{}</b></p><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>")
        return page.format(self.verdict, head, lines)
