"""The configuration of a run: defaults < TOML file < its case < ``--quick`` < flags < ``--set``. Torch-free."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from fedbicross import data, models, privacy
from fedbicross.engine.recipe import Training
from fedbicross.errors import ConfigError, nearest
from fedbicross.methods import create
from fedbicross.methods.base import Method, check_private_training, mixed_models_problem
from fedbicross.settings import Settings, parse, read_toml

QUICK: dict[str, Any] = {  # what --quick stands for: minutes on two cores; results are indicative only
    "model": "resnet8",
    "data": {"train_size": 4000, "test_size": 1000},
    "training": {"recipe": "modern", "epochs": 8, "batch_size": 32},
}


class DataSettings(Settings):
    """Which images."""

    name: str = Field("cells", description="a known data set, or the path of a folder, CSV manifest or .npz file")
    dir: str | None = Field(None, description="where .npz files lie")
    image_size: int = Field(28, ge=8, le=1024, description="pixels per side")
    train_size: int | None = Field(None, ge=1, description="use at most so many training images (cells: draw so many)")
    test_size: int | None = Field(None, ge=1, description="use at most so many test images (cells: draw so many)")
    test_fraction: float = Field(0.2, gt=0, lt=1, description="held out where the data bring no test set")
    seed: int = Field(0, description="seed of drawing, subsampling and splitting; the same for all run seeds")
    accept: list[str] = Field(
        default_factory=list, description="findings of `fedbicross check` that shall not stop the run, by code"
    )


class PartitionSettings(Settings):
    """How the training images are dealt out to clients."""

    kind: str = Field("dirichlet", description="see `fedbicross list partitions`")
    alpha: float = Field(0.1, description="Dirichlet concentration; smaller is more skewed")
    classes_per_client: int = Field(2, description="for pathological")
    min_samples: int = Field(10, ge=0, description="smallest client that the repair step accepts")
    strength: float = Field(1.0, ge=0, description="for scanner: how different the scanners are")
    seed: int | None = Field(None, description="none: the run's seed")
    file: str | None = Field(None, description="reuse a saved partition.json")


class RunConfig(Settings):
    """Everything that determines a run's results."""

    name: str = Field("run", description="shown in the report")
    data: DataSettings = Field(default_factory=DataSettings)
    model: str = Field(
        "resnet18", description="architecture of the server's students, and of clients without their own"
    )
    client_models: list[str] = Field(
        default_factory=list,
        description="architectures of the clients in the order of their names, repeated as needed; []: all `model`",
    )
    clients: int = Field(5, description="number of simulated hospitals, N")
    partition: PartitionSettings = Field(default_factory=PartitionSettings)
    training: Training = Field(default_factory=lambda: Training(recipe="paper"))
    methods: list[str] = Field(
        default_factory=lambda: ["local_only", "fedavg", "ensemble"], description="name or name:variant, each"
    )
    baselines: list[str] = Field(
        default_factory=lambda: ["majority", "local_only", "ensemble", "centralised"],
        description="always shown beside the methods, with the ways of training alone that methods use; [] for none",
    )
    method: dict[str, dict[str, Any]] = Field(default_factory=dict, description="settings per method")
    metric: Literal["accuracy", "balanced_accuracy", "macro_auc"] = Field(
        "accuracy", description="what the verdict goes by; the others stand beside it"
    )
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1, description="one row per method and seed")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="auto: a GPU if there is one")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 on a GPU, else fp32")
    deterministic: bool = Field(
        False, description="plain path and reproducible convolutions on a GPU too: slower, and nearer to the same twice"
    )
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; none: torch's choice")
    quick: bool = Field(False, description="small settings were asked for")

    @field_validator("model")
    @classmethod
    def _one_name(cls, value: str) -> str:
        return models.ALIASES.get(value, value)  # an unknown name is refused in `check`, with a hint

    @field_validator("client_models")
    @classmethod
    def _own_names(cls, value: list[str]) -> list[str]:
        return [models.ALIASES.get(name, name) for name in value]

    def architectures(self) -> list[str]:
        """Every architecture that a client may have, each once."""
        return list(dict.fromkeys(self.client_models or [self.model]))

    def models_of(self, clients: Sequence[str]) -> dict[str, str]:
        """The architecture of each client: ``client_models`` in the order of the names, over and over."""
        if not self.client_models:
            return {}
        self.check_models_for(len(clients))
        return dict(zip(sorted(clients), cycle(self.client_models), strict=False))

    def check_models_for(self, clients: int) -> None:
        """At most one architecture a client."""
        if len(self.client_models) > clients:
            have = f"{len(self.client_models)} architectures for {clients} clients"
            raise ConfigError("client_models", f"client_models: {have}; name at most one each")

    def all_methods(self) -> list[str]:
        """Baselines first, then the methods asked for, each once.

        A method that has its clients trained in another way has to beat that training alone as well.
        """
        if not self.baselines:
            return list(dict.fromkeys(self.methods))
        specs = dict.fromkeys([*self.baselines, *self.methods])
        same = {"local_only:balanced"} if self.training.balanced else set()  # local_only is trained so already
        ways = [way for spec in specs for way in self.build(spec).local_baselines if way not in same]
        after = self.baselines.index("local_only") + 1 if "local_only" in self.baselines else len(self.baselines)
        return list(dict.fromkeys([*self.baselines[:after], *ways, *self.baselines[after:], *self.methods]))

    def build(self, spec: str) -> Method[Any]:
        """The method of this name with this run's settings."""
        return create(spec, self.method, self.quick)


def load_config(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
    quick: bool = False,
    case: str | None = None,
    *,
    check_machine: bool = True,
) -> RunConfig:
    """Resolve and check a configuration; any mistake is a one-line ``ConfigError``.

    A file may describe several runs: each ``[case.NAME]`` holds what its run has over the rest of the file. Without
    ``check_machine`` nobody asks whether it can run here: whether there are such data, methods and encoders.
    """
    values: dict[str, Any] = {} if file is None else read_toml(file)
    tables, common = _cases(values), values.get("method", {})
    values = {key: value for key, value in values.items() if key != "case"}
    if case is not None:
        if case not in tables:
            raise ConfigError("unknown_case", f"no case {case!r} in the file{nearest(case, tables) if tables else ''}")
        values = merge(values, {"name": case, **tables[case]})
    elif tables:
        raise ConfigError("choose_case", f"{file} describes several runs; choose one with --case: {', '.join(tables)}")
    if quick:
        values = merge(values, {**QUICK, "quick": True})
    values = merge(values, flags or {})
    for text in assignments:
        values = merge(values, parse_assignment(text))
    config = parse(RunConfig, values)
    if case is not None:
        for spec in common:  # a case need not run every method that the file has settings for, but a name must be one
            create(spec)
        known = _settable(config)
        kept = {spec: own for spec, own in config.method.items() if spec in known or spec not in common}
        config = config.model_copy(update={"method": kept})
    if check_machine:
        check(config)
    return config


def cases(file: Path) -> list[str]:
    """The names of the runs that a file describes by ``[case.NAME]``; none if it is one run."""
    return list(_cases(read_toml(file)))


def _cases(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tables = values.get("case", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError("bad_case", "case: expected a table a run, [case.NAME]")
    return tables


def _settable(config: RunConfig) -> set[str]:
    """The names under which the methods of a run take settings."""
    return {spec.partition(":")[0] for spec in config.all_methods()} | set(config.all_methods())


def check(config: RunConfig) -> None:
    """Everything that can be wrong without looking at a single image."""
    if config.clients < 1:
        raise ConfigError("clients", f"clients: at least 1 is needed (got {config.clients})")
    if config.partition.alpha <= 0:
        raise ConfigError("alpha", f"partition.alpha: must be greater than 0 (got {config.partition.alpha})")
    if config.partition.kind not in data.PARTITIONS:
        hint = nearest(config.partition.kind, data.PARTITIONS)
        raise ConfigError("unknown_partition", f"unknown partition {config.partition.kind!r}{hint}")
    for name in [config.model, *config.client_models]:
        models.canonical(name)
    if config.partition.kind != "natural" and config.partition.file is None:  # else the data say how many there are
        config.check_models_for(config.clients)
    name = config.data.name
    if name not in data.DATASETS and not name.startswith("python:") and not _exists(name):
        raise ConfigError("unknown_data", f"no data set and no path {name!r}{nearest(name, data.DATASETS)}")
    if config.data.accept:
        data.check.check_accept(config.data.accept)
    if len(set(config.seeds)) < len(config.seeds):
        raise ConfigError("seeds", "seeds: each seed once")
    if not config.all_methods():
        raise ConfigError("methods", "methods: name at least one (see `fedbicross list methods`)")
    for spec in config.all_methods():
        method = config.build(spec)
        method.check_machine()
        _check_private(config, spec, method)
        for name in config.architectures():
            if "bn_stats" in method.needs and not models.info(name).has_batchnorm:
                reason = f"{spec} needs batch-normalisation statistics, which {name!r} does not have"
                raise ConfigError("needs_batchnorm", f"{reason}; choose another --model")
        problem = mixed_models_problem(method, config.architectures(), config.model, spec)
        if problem:
            raise ConfigError("mixed_models", f"{problem}; leave out {spec}, or client_models")
    known = _settable(config)
    for spec in config.method:
        if spec not in known:
            raise ConfigError(
                "unused_method", f"settings for method {spec!r}, which does not run{nearest(spec, known)}"
            )


def _check_private(config: RunConfig, spec: str, method: Method[Any]) -> None:
    if config.training.dp is None:
        return
    check_private_training(method, config.training, spec)
    privacy.accountant.require_opacus()
    for name in config.architectures():
        if method.sends_only_the_network and models.info(name).has_batchnorm:
            raise ConfigError("dp_batchnorm", f"training.dp: {models.group_norm_advice(name)}")


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # e.g. a name longer than the file system takes
        return False


def parse_assignment(text: str) -> dict[str, Any]:
    """``a.b=c`` as a nested dict; the value is TOML, or a plain string if it is not."""
    path, sign, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not sign or not all(keys):
        raise ConfigError("bad_set", f"--set {text!r}: expected key=value, e.g. --set training.lr=0.01")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for key in reversed(keys):
        parsed = {key: parsed}
    return dict(parsed)


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """``high`` over ``low``, table by table."""
    out = dict(low)
    for key, value in high.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return out
