"""A suite is a data file: sweeps over data, partitions, clients, seeds and methods, and what papers report for them.

It expands to cells. A cell is one method on one federation: its data, partition, number of clients and seed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import resources
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fedbicross.bench import budgets
from fedbicross.engine.recipe import Training
from fedbicross.errors import ConfigError, nearest
from fedbicross.evaluate.summary import is_alone
from fedbicross.runs.config import DataSettings, PartitionSettings, RunConfig, merge
from fedbicross.settings import Settings, parse, read_toml

ALONE = ("local_only", "local_only:balanced", "local_only:both")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # of suites and data: they become names of folders
FIELDS = ("data", "partition", "alpha", "clients", "models", "seed", "method", "sweep")


def split_partition(text: str) -> tuple[str, float | None]:
    """``iid`` or ``dirichlet:0.1`` as a kind and its alpha."""
    kind, colon, alpha = text.partition(":")
    try:
        return kind, float(alpha) if colon else None
    except ValueError:
        raise ValueError(f"expected a partition such as iid or dirichlet:0.1, got {text!r}") from None


class DataEntry(DataSettings):
    """Which images. ``name`` is a known data set, or a folder, CSV or .npz file in the data folder; "": the key."""

    name: str = Field("", description="a known data set or the name of a folder in the data folder; none: the key")
    dir: None = Field(None, description="where data lie is said on the command line")
    title: str = Field("", description="as shown in tables")


class Sweep(Settings):
    """Everything times everything, in an order that gives a whole small table first: all methods of one federation."""

    name: str
    data: list[str] = Field(min_length=1)
    partitions: list[str] = Field(min_length=1, description="iid, dirichlet:0.1, …")
    clients: list[int] = Field(min_length=1)
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)
    methods: list[str]
    alone: list[str] = Field(
        default_factory=lambda: list(ALONE), min_length=1, description="ways of training alone, made first"
    )
    model: str | None = None
    client_models: list[str] = Field(default_factory=list)
    tag: str = Field("", pattern=r"[a-z0-9_]*", description="after the names of methods with settings of their own")
    ablation: bool = Field(False, description="parts of a method: in tables, not in charts of what methods gain")
    method: dict[str, dict[str, Any]] = Field(default_factory=dict, description="settings per method, over the budget")

    @field_validator("partitions")
    @classmethod
    def _readable(cls, value: list[str]) -> list[str]:
        for text in value:
            split_partition(text)
        return value

    @field_validator("alone")
    @classmethod
    def _really_alone(cls, value: list[str]) -> list[str]:
        for spec in value:
            if not is_alone(spec):
                raise ValueError(f"{spec!r} is no way of training alone")
        return value

    @model_validator(mode="after")
    def _settings_of_what_runs(self) -> Sweep:
        _all_run(self.method, {*self.alone, *self.methods}, f"sweep {self.name}")
        return self


def _all_run(settings: Iterable[str], specs: set[str], where: str) -> None:
    """Refuse settings for methods that are not among these."""
    known = {spec.partition(":")[0] for spec in specs} | specs
    for key in settings:
        if key not in known:
            raise ValueError(f"{where}: settings for {key!r}, which does not run{nearest(key, known)}")


class Published(Settings):
    """A table of a paper: a row of numbers for each method, one for each column."""

    table: str = Field(description="its number in the paper")
    page: int | None = Field(None, description="where the text at hand tells it")
    columns: list[str] = Field(
        min_length=1,
        description="data partition clients, e.g. bloodmnist dirichlet:0.1 5; a + between partitions: mean",
    )
    client_models: list[str] = Field(default_factory=list)
    metric: Literal["accuracy", "balanced_accuracy", "mmd", "psnr", "ssim"] = Field(
        "accuracy", description="cells hold the first two"
    )
    protocol: Literal["global", "matched", "label_set"] | None = Field(
        None, description="how the paper evaluates; none: it does not say, and all three are compared"
    )
    rows: dict[str, list[float]] = Field(description="by method; accuracies in percent")

    @model_validator(mode="after")
    def _rectangular(self) -> Published:
        for column in self.columns:
            words = column.split()
            if len(words) != 3 or not words[2].isdigit():
                raise ValueError(f"column {column!r}: expected data, partition and clients")
            for partition in words[1].split("+"):
                split_partition(partition)
        for method, values in self.rows.items():
            if len(values) != len(self.columns):
                raise ValueError(f"table {self.table}, {method}: {len(values)} numbers for {len(self.columns)} columns")
        return self


def _with_lists(sweep: Any, lists: dict[str, Any]) -> Any:
    methods = sweep.get("methods") if isinstance(sweep, dict) else None
    if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
        return sweep
    found: list[Any] = []
    for name in methods:
        if not name.startswith("@"):
            found.append(name)
        elif isinstance(lists.get(name[1:]), list):
            found += lists[name[1:]]
        else:
            raise ValueError(f"no list {name[1:]!r}{nearest(name[1:], [str(key) for key in lists])}")
    return {**sweep, "methods": found}


class Suite(Settings):
    """A whole file."""

    title: str
    paper: str = Field("", description="whose numbers these are")
    note: str = ""
    budget: str
    model: str = "resnet18"
    training: Training = Field(default_factory=lambda: Training(recipe="paper"))
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: int | None = None
    data: dict[str, DataEntry]
    lists: dict[str, list[str]] = Field(default_factory=dict, description="methods that sweeps call by @NAME")
    method: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="settings per method for all sweeps, over the budget and under the sweep's"
    )
    sweep: list[Sweep] = Field(min_length=1)
    published: list[Published] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, values: Any) -> Any:
        """Put the lists where sweeps name them; what is not of the right shape is refused field by field later."""
        sweeps = values.get("sweep") if isinstance(values, dict) else None
        lists = values.get("lists", {}) if isinstance(values, dict) else {}
        if not isinstance(sweeps, list) or not isinstance(lists, dict):
            return values
        return {**values, "sweep": [_with_lists(sweep, lists) for sweep in sweeps]}

    @field_validator("budget")
    @classmethod
    def _known_budget(cls, value: str) -> str:
        try:
            budgets.check_name(value)
        except ConfigError as error:
            raise ValueError(error.args[0]) from None
        return value

    @model_validator(mode="after")
    def _known_data(self) -> Suite:
        for name in self.data:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name for data")
        for sweep in self.sweep:
            for name in sweep.data:
                if name not in self.data:
                    raise ValueError(f"sweep {sweep.name}: no [data.{name}]{nearest(name, self.data)}")
        known = {spec for sweep in self.sweep for spec in (*sweep.alone, *sweep.methods)}
        _all_run(self.method, known, "the suite")
        return self


@dataclass(frozen=True)
class Cell:
    """One method on one federation, and the run that makes it: all ways of training alone, then this method."""

    suite: str
    budget: str
    sweep: str
    data: str
    title: str
    partition: str  # kind
    alpha: float | None
    clients: int
    models: str
    seed: int
    method: str  # as shown: a tag may stand behind it
    spec: str
    alone: tuple[str, ...]
    config: RunConfig
    ablation: bool = False  # a part of a method rather than one of those to choose from
    also: tuple[str, ...] = ()  # later sweeps that ask for it too

    @property
    def skew(self) -> str:
        """``iid`` or ``dirichlet:0.1``."""
        return self.partition if self.alpha is None else f"{self.partition}:{self.alpha:g}"

    @cached_property
    def federation(self) -> str:
        """The folder of all cells on the same federation."""
        return f"{self.data}-{self.skew.replace(':', '-')}-n{self.clients}-{self.models}-seed{self.seed}"

    @property
    def key(self) -> str:
        """What it is called: the path of its file, without the ending."""
        return f"{self.suite}/{self.budget}/{self.federation}/{self.method.replace(':', '+')}"

    @property
    def is_alone(self) -> bool:
        """Whether it is one of the ways of training alone that are made first."""
        return self.spec in self.alone

    def identity(self) -> dict[str, Any]:
        """Its place in the sweep, for the stored file."""
        names = ("suite", "budget", *FIELDS, "title")
        return {name: getattr(self, name) for name in names}


def builtin() -> dict[str, Path]:
    """The suites that come with the package, by name."""
    folder = Path(str(resources.files("fedbicross.bench") / "suites"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name: str | Path) -> tuple[str, Suite]:
    """A suite by its name, or the one in a TOML file; its name and its content."""
    known = builtin()
    text = str(name)
    if text in known:
        return text, parse(Suite, read_toml(known[text]), text)
    path = Path(name)
    if path.suffix != ".toml":
        raise ConfigError("unknown_suite", f"no suite {text!r}{nearest(text, known)}; or give a .toml file")
    if not NAME.fullmatch(path.stem):
        raise ConfigError("suite_name", f"{path.name!r} is no name for a suite: letters, digits, . _ - only")
    if path.stem in known:
        raise ConfigError("suite_name", f"{path.stem!r} is the name of a suite of the package; rename the file")
    return path.stem, parse(Suite, read_toml(path), path.stem)


def expand(name: str, suite: Suite, budget: str | None = None) -> list[Cell]:
    """All cells, each once, in the order in which they are made.

    Sweep by sweep; in a sweep seed by seed, then by number of clients, data and partition, and there training alone
    before the methods. Neighbours of one name are one sweep whose methods train alone in different ways. Wherever it
    is stopped, all methods of the federations before are there to be compared.
    """
    budget = budget or suite.budget
    budgets.check_name(budget)
    found: dict[str, Cell] = {}
    for _, members in groupby(suite.sweep, key=lambda sweep: sweep.name):
        together = [each for sweep in members for each in _sweep(name, suite, sweep, budget)]
        for _, cell in sorted(together, key=lambda each: each[0]):
            other = found.setdefault(cell.key, cell)
            if other is cell:
                continue
            if _definition(other) != _definition(cell):
                raise ConfigError("same_cell", f"{other.sweep} and {cell.sweep} make {cell.key} in different ways")
            ablation = other.ablation and cell.ablation  # what one sweep compares as a method is drawn as one
            found[cell.key] = replace(other, also=(*other.also, cell.sweep), ablation=ablation)
    return list(found.values())


def _definition(cell: Cell) -> tuple[Any, ...]:
    return cell.spec, cell.alone, cell.config


def _sweep(name: str, suite: Suite, sweep: Sweep, budget: str) -> Iterator[tuple[tuple[int, ...], Cell]]:
    """Cells with the place of their federation in the sweep."""
    model = sweep.model or suite.model
    for (s, seed), (n, clients), (d, data), (p, partition) in product(
        enumerate(sweep.seeds), enumerate(sweep.clients), enumerate(sweep.data), enumerate(sweep.partitions)
    ):
        kind, alpha = split_partition(partition)
        for spec in dict.fromkeys([*sweep.alone, *sweep.methods]):
            alone = spec in sweep.alone
            specs = sweep.alone if alone else [*sweep.alone, spec]
            entry = suite.data[data]
            config = RunConfig(
                name=name,
                data=DataSettings(**{**entry.model_dump(exclude={"title", "dir"}), "name": entry.name or data}),
                model=model,
                client_models=sweep.client_models,
                clients=clients,
                partition=PartitionSettings(kind=kind) if alpha is None else PartitionSettings(kind=kind, alpha=alpha),
                training=suite.training,
                methods=specs,
                baselines=[],
                method=_method_settings(suite, sweep, specs, budget, clients),
                seeds=[seed],
                device=suite.device,
                threads=suite.threads,
            )
            cell = Cell(
                name,
                budget,
                sweep.name,
                data,
                entry.title or data,
                kind,
                alpha,
                clients,
                "+".join(config.client_models) or config.model,
                seed,
                f"{spec}@{sweep.tag}" if sweep.tag and not alone else spec,
                spec,
                tuple(sweep.alone),
                config,
                sweep.ablation and not alone,
            )
            yield (s, n, d, p), cell


def _method_settings(
    suite: Suite, sweep: Sweep, specs: Sequence[str], budget: str, clients: int
) -> dict[str, dict[str, Any]]:
    """Budget, then the suite's, then the sweep's own; of the latter two only what concerns these methods."""
    found: dict[str, Any] = {}
    for spec in specs:
        mine = budgets.settings(budget, spec, clients)
        family = spec.partition(":")[0]
        own = {key: value for key, value in merge(suite.method, sweep.method).items() if key in (family, spec)}
        # A setting of the whole family also has to win over the budget of a variant.
        for key in mine:
            if key != family and family in own:
                mine[key] = merge(mine[key], own[family])
        found = merge(found, merge(mine, own))
    return found


def choose(cells: Iterable[Cell], wanted: str | None) -> list[Cell]:
    """The cells that a filter such as ``data=blood*,alpha=0.1|0.3,method=primum`` asks for.

    ``field=pattern`` each, all of which must fit; ``|`` separates alternatives, ``*`` and ``?`` stand for any letters.
    Training alone on the same federations always comes along: every row is measured against it.
    """
    everything = list(cells)
    if not wanted:
        return everything
    rules = [_rule(part) for part in re.split(r"[,\s]+", wanted.strip()) if part]
    hits = [cell for cell in everything if all(_fits(cell, field, patterns) for field, patterns in rules)]
    if not hits:
        raise ConfigError("no_cells", f"no cell fits {wanted!r}")
    needed = {(cell.federation, spec) for cell in hits for spec in cell.alone}
    picked = {cell.key for cell in hits}
    return [cell for cell in everything if cell.key in picked or (cell.federation, cell.spec) in needed]


def _rule(text: str) -> tuple[str, list[str]]:
    field, sign, patterns = text.partition("=")
    field = {"n": "clients", "N": "clients"}.get(field, field)
    if not sign or field not in FIELDS:
        raise ConfigError("bad_filter", f"--cells {text!r}: expected field=pattern{nearest(field, FIELDS)}")
    return field, patterns.split("|")


def _fits(cell: Cell, field: str, patterns: Sequence[str]) -> bool:
    if field == "sweep":
        return any(fnmatchcase(name, pattern) for name in (cell.sweep, *cell.also) for pattern in patterns)
    value = getattr(cell, field)
    text = "iid" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return any(fnmatchcase(text, pattern) for pattern in patterns)
