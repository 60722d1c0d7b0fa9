"""The makers of the generated blocks: Markdown from the code and from stored raw results, never by hand."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs import benched, measured, stored, studies
from docs.parts import Row, link, load, table

LESSER = ("worst client (matched) %", "harms", "seconds")  # the verdict says in words whom a method harms


def make(name: str, page: Path, root: Path) -> str:
    """The content of the block ``name`` on ``page``; an unknown name is an error."""
    kind, _, rest = name.partition(" ")
    if kind.startswith("results/"):
        return _results(kind.removeprefix("results/"), page, root, full=rest == "full")
    if kind.startswith("costs/"):
        return _costs(kind.removeprefix("costs/"), rest, root)
    if kind.startswith("audit/"):
        return _audit(kind.removeprefix("audit/"), page, root)
    return MAKERS[kind](rest, page, root)


# --- results ---------------------------------------------------------------------------------------------


def _results(run: str, page: Path, root: Path, full: bool) -> str:
    """The verdict, the table and where they come from. Not full: the columns that fit a page."""
    from fedbicross.report.summary import summarise
    from fedbicross.report.tables import markdown
    from fedbicross.report.verdict import judge

    results = load(run, root)
    data, versions, config = results["dataset"], results["versions"], results["config"]
    seeds = ", ".join(map(str, config["seeds"]))
    partition = config["partition"]
    skew = f", α = {partition['alpha']}" if "dirichlet" in partition["kind"] or partition["kind"] == "quantity" else ""
    source = (
        f"Raw results: [`results/{run}/results.json`]({link(root / 'results' / run / 'results.json', page)}). "
        f"Data: {data['name']}, {data['train_images']:,} training and {data['test_images']:,} test images; "
        f"{len(next(iter(results['clients'].values())))} clients ({partition['kind']}{skew}); "
        f"model {config['model']}; seed {seeds}; fedbicross {versions['fedbicross']}, torch {versions['torch']}, "
        f"{versions['threads']} threads on {_processor(versions)}; rows_sha256 `{results['rows_sha256'][:16]}…`."
    )
    headline = judge(results, summarise(results)).headline
    notes = "".join(f"\nNote: {warning}.\n" for warning in results["warnings"])
    shown = markdown(results) if full else without_columns(markdown(results), LESSER)
    return f"**{headline}**\n\n{shown}{notes}\n{source}"


def _processor(versions: Mapping[str, Any]) -> str:
    """What it ran on; older results say no more than "cpu"."""
    if versions["device"] != "cpu" or "cpu" not in versions:
        return str(versions["device"])
    return f"{versions['cpu']} ({versions['cpu_capability']})"


def without_columns(text: str, titles: Iterable[str]) -> str:
    """A Markdown table less the columns with these titles."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines()]
    kept = [number for number, title in enumerate(lines[0]) if title.strip() not in set(titles)]
    return "".join(f"|{'|'.join(line[number] for number in kept)}|\n" for line in lines)


def _costs(run: str, method: str, root: Path) -> str:
    """Bytes, operations and seconds of one method and its variants in a stored run."""
    from fedbicross.report.text import duration, flops, size

    rows = [row for row in load(run, root)["rows"] if row["method"].partition(":")[0] == method]
    if not rows:
        return f"The stored run `{run}` does not hold this method."
    cells = [
        (
            f"`{row['method']}`",
            size(row["upload_bytes"] / row["num_clients"]),
            size(row["reply_bytes"] / row["num_clients"]),
            flops(row["client_flops"]),
            flops(row["server_flops"]),
            duration(row["seconds"]),
        )
        for row in rows
    ]
    head = ("in the demo" if run == "demo" else f"in {run}", "upload per client", "reply per client")
    return table((*head, "arithmetic of all clients", "of the server", "wall time"), cells, "lrrrrr")


def _across(names: str, page: Path, root: Path) -> str:
    """The mean accuracy of each method in several stored runs, side by side: ``across PROTOCOL RUN RUN …``."""
    protocol, *runs = names.split()
    links = [f"[{run}]({link(root / 'results' / run / 'results.json', page)})" for run in runs]
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for row in load(run, root)["rows"]:
            if row["accuracy"][protocol] is not None:
                found.setdefault(row["method"], {}).setdefault(run, []).append(100 * row["accuracy"][protocol])
    everywhere = {method: values for method, values in found.items() if len(values) == len(runs)}
    means = {method: [sum(values[run]) / len(values[run]) for run in runs] for method, values in everywhere.items()}
    cells = [(f"`{m}`", *(f"{v:.1f}" for v in row), f"{sum(row) / len(row):.1f}") for m, row in means.items()]
    return table((f"{protocol} %", *links, "mean"), cells, "l" + "r" * (len(runs) + 1))


def _audit(run: str, page: Path, root: Path) -> str:
    """What `fedbicross audit run` measured of a stored run."""
    from fedbicross.runs.audit import markdown

    file = root / "results" / run / "audit.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    settings = ", ".join(f"{key} {value}" for key, value in found["settings"].items())
    source = f"Raw results: [`results/{run}/audit.json`]({link(file, page)}). Settings: {settings}."
    return f"{markdown(found)}\n{source}"


# --- methods ---------------------------------------------------------------------------------------------


def _methods(how: str, page: Path, root: Path) -> str:
    """All methods; ``short`` leaves out their variants."""
    from fedbicross.methods import METHODS

    rows: list[Row] = []
    for name, cls in METHODS.items():
        doc = root / "docs" / "methods" / f"{name}.md"
        shown = f"[`{name}`]({link(doc, page)})" if doc.exists() else f"`{name}`"
        rows.append((shown, cls.role.replace("_", " "), cls.summary))
        if how != "short":
            rows += [(f"`{name}:{v}`", "", cls.variant_notes.get(v, "")) for v in cls.variants]
    return table(("method", "role", "what it does"), rows)


def _method_settings(method: str, page: Path, root: Path) -> str:
    del page, root
    from fedbicross.methods import METHODS

    cls = METHODS[method]
    if not cls.Config.model_fields:
        return "No settings of its own. Local training follows the run's `training` settings."
    return _fields(cls.Config) + (
        f"\n\nWith `--quick`: {_pairs(cls.quick_settings)}."
        if cls.quick_settings
        else "\n\nThe same values with `--quick`."
    )


def _method_variants(method: str, page: Path, root: Path) -> str:
    del page, root
    from fedbicross.methods import METHODS

    cls = METHODS[method]
    if not cls.variants:
        return "None."
    rows = [(f"`{method}:{v}`", _pairs(preset), cls.variant_notes[v]) for v, preset in cls.variants.items()]
    return table(("name", "sets", "meaning"), rows)


def _method_leaves(method: str, page: Path, root: Path) -> str:
    """What the method itself declares, for its default and for each variant that differs."""
    del page, root
    from fedbicross.methods import METHODS, create

    said = {
        spec: create(spec).upload_summary for spec in (method, *(f"{method}:{v}" for v in METHODS[method].variants))
    }
    built = {spec: create(spec) for spec in said}
    rows = [
        (
            f"`{spec}`",
            ", ".join(sorted(built[spec].needs)) or "nothing",
            text,
            f"`{built[spec].others_receive}`",
        )
        for spec, text in said.items()
    ]
    return table(("method", "the server needs", "what leaves", "what other sites receive"), rows)


def _others_receive(_: str, page: Path, root: Path) -> str:
    """Which methods hand what to other sites."""
    del page, root
    from fedbicross.methods import METHODS, create
    from fedbicross.methods.base import RECEIVES

    built = {name: create(name) for name in METHODS}
    rows = []
    for kind, words in RECEIVES.items():
        names = [
            f"`{name}`" for name, method in built.items() if method.others_receive == kind and not method.pools_data
        ]
        rows.append((f"`{kind}`", words, ", ".join(names)))
    return table(("", "what other sites receive of an upload", "methods"), rows)


def _policy(_: str, page: Path, root: Path) -> str:
    """Every key of policy.toml, and of its audit."""
    del page, root
    from fedbicross.disclosure.effort import QUICK, Effort
    from fedbicross.disclosure.policy import AuditRule, Policy

    parts = ["`policy.toml`:", "", _fields(Policy), "", "`[audit]`:", "", _fields(AuditRule, "audit.")]
    parts += ["", "`audit.effort`, and the options of `audit upload`:", "", _fields(Effort)]
    return "\n".join([*parts, "", f"With `--quick`, or `audit.quick`: {_pairs(QUICK)}."])


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in values.items())


# --- configuration ---------------------------------------------------------------------------------------


def _fields(cls: type[BaseModel], prefix: str = "") -> str:
    rows = []
    for name, info in cls.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            continue
        default = info.get_default(call_default_factory=True)  # type: ignore[call-arg]
        shown = "must be given" if info.is_required() else "none" if default is None else f"`{json.dumps(default)}`"
        rows.append((f"`{prefix}{name}`", _type(info.annotation) + _bounds(info), shown, info.description or ""))
    return table(("key", "type", "default", "meaning"), rows)


def _type(annotation: Any) -> str:
    """A type in plain words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if part is type(None) else _type(part) for part in arguments)
    if origin in (list, tuple):
        inner = _type(arguments[0])
        return f"list of {inner}{'' if inner == 'text' or inner.startswith('one of') else 's'}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
    return names.get(annotation, str(getattr(annotation, "__name__", annotation)))


def _bounds(info: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(rule, key)}" for rule in info.metadata for key, sign in signs.items() if hasattr(rule, key)
    ]
    return f", {', '.join(found)}" if found else ""


def _configuration(_: str, page: Path, root: Path) -> str:
    del page, root
    from fedbicross.runs.config import RunConfig

    parts = ["### The run", "", _fields(RunConfig)]
    for name, group in _groups(RunConfig):
        first = (group.__doc__ or "").strip().splitlines()[0].replace("``", "`")
        parts += ["", f"### `[{name}]`", "", first, "", _fields(group, f"{name}.")]
    return "\n".join(parts)


def _groups(cls: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, type[BaseModel]]]:
    """Every table of settings in this one, those that may be left out too, with its name."""
    for name, info in cls.model_fields.items():
        for option in (info.annotation, *get_args(info.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield f"{prefix}{name}", option
                yield from _groups(option, f"{prefix}{name}.")


def _quick(_: str, page: Path, root: Path) -> str:
    del page, root
    from fedbicross.runs.config import QUICK

    flat = [(f"{k}.{inner}", v) for k, t in QUICK.items() if isinstance(t, dict) for inner, v in t.items()]
    flat = [(k, v) for k, v in QUICK.items() if not isinstance(v, dict)] + flat
    return table(("key", "value with `--quick`"), [(f"`{key}`", f"`{json.dumps(value)}`") for key, value in flat])


def _recipes(_: str, page: Path, root: Path) -> str:
    del page, root
    from fedbicross.engine.recipe import RECIPES

    keys = list(next(iter(RECIPES.values())))
    rows = [(f"`{name}`", *(f"`{json.dumps(values[key])}`" for key in keys)) for name, values in RECIPES.items()]
    return table(("`training.recipe`", *(f"`{key}`" for key in keys)), rows)


# --- command line ----------------------------------------------------------------------------------------


def _cli(_: str, page: Path, root: Path) -> str:
    """Made from the functions' signatures, so that it does not depend on the version of typer or a screen's width."""
    del page, root
    from fedbicross.cli.app import app

    commands = [(info.name, info.callback) for info in app.registered_commands]
    for group in app.registered_groups:
        inner = group.typer_instance
        assert inner is not None
        commands += [
            (f"{group.name} {info.name or info.callback.__name__}", info.callback)
            for info in inner.registered_commands
            if info.callback
        ]
    return "\n\n".join(_command(name or "", function) for name, function in commands if function)


def _command(name: str, function: Callable[..., Any]) -> str:
    import typer.models

    hints = get_type_hints(function, include_extras=True)
    arguments, options = [], []
    for key, parameter in inspect.signature(function).parameters.items():
        hint = hints[key]
        if get_origin(hint) is not Annotated:  # some versions of Python wrap a default of None once more
            hint = next(part for part in get_args(hint) if get_origin(part) is Annotated)
        kind, info = get_args(hint)[0], get_args(hint)[1]
        default = parameter.default
        if isinstance(info, typer.models.ArgumentInfo):
            arguments.append((key if default is inspect.Parameter.empty else f"[{key}]", info.help))
            continue
        # In Annotated typer keeps the first name as the "default" of the option.
        named = [word for word in (info.default, *(info.param_decls or ())) if str(word).startswith("--")]
        flag = (named or [f"--{key.replace('_', '-')}"])[0]
        if kind is bool and not named:
            flag = f"{flag} / --no-{key.replace('_', '-')}"
        meaning = info.help or ""
        if default is inspect.Parameter.empty:
            meaning += " (required)"
        elif default not in (None, False):
            shown = str(default).lower() if isinstance(default, bool) else str(default)
            meaning += f" (default: {shown})"
        options.append((f"`{flag}`", "" if kind is bool else _plain(kind), meaning))
    usage = " ".join(["fedbicross", name, *(word for word, _ in arguments), *(["[OPTIONS]"] if options else [])])
    text = " ".join((inspect.getdoc(function) or "").split())
    parts = [f"### `fedbicross {name}`", "", text, "", "```text", usage, "```"]
    if arguments:
        parts += ["", table(("argument", "meaning"), [(f"`{word.strip('[]')}`", text) for word, text in arguments])]
    if options:
        parts += ["", table(("option", "value", "meaning"), options)]
    return "\n".join(parts)


def _plain(kind: Any) -> str:
    parts = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) in (Union, types.UnionType):
        return _plain(parts[0])
    if get_origin(kind) is list:
        return f"{_type(parts[0])}, may be repeated"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return " or ".join(kind)
    return _type(kind)


def _exit_codes(_: str, page: Path, root: Path) -> str:
    del page, root
    from fedbicross.errors import FedBiCrossError

    rows: list[Row] = [(0, "", "everything went well")]
    rows += [(1, "", "`check`: the data would be refused; else anything unexpected: a bug, please report it")]
    kinds = sorted(FedBiCrossError.__subclasses__(), key=lambda cls: cls.exit_status)
    rows += [(cls.exit_status, f"`{cls.__name__}`", (cls.__doc__ or "").strip()) for cls in kinds]
    rows += [(130, "", "stopped with Ctrl-C; `fedbicross resume DIR` continues the run")]
    return table(("exit code", "Python error", "meaning"), rows, "rll")


# --- data and models -------------------------------------------------------------------------------------


def _datasets(_: str, page: Path, root: Path) -> str:
    del page, root
    from fedbicross.data import DATASETS

    rows = [
        (
            f"`{info.name}`",
            info.task,
            len(info.classes) or "–",
            info.channels,
            ", ".join(map(str, info.sizes)) or ("–" if info.refused else "any"),
            info.licence,
            info.refused or info.note,
        )
        for info in DATASETS.values()
    ]
    return table(("name", "task", "classes", "channels", "sizes, px", "licence", "note"), rows, "llrrlll")


def _partitions(_: str, page: Path, root: Path) -> str:
    del page, root
    from fedbicross.data import PARTITIONS

    used = {
        "dirichlet": "`alpha`, `min_samples`",
        "dirichlet_plain": "`alpha`, `min_samples`",
        "pathological": "`classes_per_client`",
        "quantity": "`alpha`",
        "scanner": "`strength`",
    }
    return table(("kind", "settings", "meaning"), [(f"`{k}`", used.get(k, ""), text) for k, text in PARTITIONS.items()])


def _models(_: str, page: Path, root: Path) -> str:
    del page, root
    from fedbicross import models
    from fedbicross.report import text

    rows = []
    for name, info in models.MODELS.items():
        shape = (name, 3, 8, 28)
        state = models.build(*shape).state_dict()
        size = sum(value.numel() * value.element_size() for value in state.values())
        rows.append(
            (
                f"`{name}`",
                f"{models.num_parameters(*shape):,}",
                text.flops(models.forward_flops(*shape)),
                text.size(size),
                "yes" if info.has_batchnorm else "no",
                info.description,
            )
        )
    head = ("model", "parameters", "one image forward", "weights", "batch normalisation", "what it is")
    return table(head, rows, "lrrrll")


# --- examples --------------------------------------------------------------------------------------------


def _example(name: str, page: Path, root: Path) -> str:
    """The code of an example below its docstring, without the marks of cells and what is only for notebooks."""
    text = (root / "examples" / f"{name}.py").read_text(encoding="utf-8")
    cells = re.split(r"^# %%(.*)\n", text.split('"""', 2)[2], flags=re.MULTILINE)[1:]
    code = "\n\n".join(cell.strip() for mark, cell in zip(cells[::2], cells[1::2], strict=True) if not mark.strip())
    return f"```python\n{code}\n```\n\nThis is [`examples/{name}.py`]({link(root / 'examples' / f'{name}.py', page)})."


def _function(words: str, page: Path, root: Path) -> str:
    """The source of a function, or of a method, as it stands in a file of the package."""
    path, name = words.split()
    text = (root / "src" / "fedbicross" / path).read_text(encoding="utf-8")
    (found,) = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)
    code = textwrap.dedent(ast.get_source_segment(text, found, padded=True) or "")
    return f"```python\n{code}\n```"


MAKERS: dict[str, Callable[[str, Path, Path], str]] = {
    "methods": _methods,
    "settings": _method_settings,
    "variants": _method_variants,
    "leaves": _method_leaves,
    "others-receive": _others_receive,
    "policy": _policy,
    "configuration": _configuration,
    "quick": _quick,
    "recipes": _recipes,
    "cli": _cli,
    "exit-codes": _exit_codes,
    "datasets": _datasets,
    "partitions": _partitions,
    "models": _models,
    "benchmarks/accuracy": measured.accuracy,
    "bn-distance": measured.bn_distance,
    "at-once": measured.at_once,
    "superseded": measured.superseded,
    "waiting": measured.waiting,
    "soak": measured.soak,
    "membership": measured.membership,
    "suite": measured.suite,
    "house": measured.house,
    "threads": measured.threads,
    "kernels": measured.kernels,
    "primum-cells": benched.primum_cells,
    "primum-ingredients": benched.primum_ingredients,
    "primum-development": measured.primum_development,
    "primum-levels": measured.primum_levels,
    "primum-means": benched.primum_means,
    "primum-greys": measured.primum_greys,
    "primum-margins": measured.primum_margins,
    "primum-estimated": measured.primum_estimated,
    "primum-no-counts": measured.primum_no_counts,
    "primum-one-class": measured.primum_one_class,
    "benchmarks/cpu": measured.cpu,
    "benchmarks/gpu": measured.gpu,
    "poison": measured.poison,
    "privacy": measured.privacy,
    "private-training": measured.private_training,
    "audit-time": measured.audit_time,
    "longer": measured.longer,
    "stages": measured.stages,
    "bench": benched.overview,
    "fedbicross-stages": studies.fedbicross_stages,
    "fedisca-student": studies.fedisca_student,
    "falcon-teachers": studies.falcon_teachers,
    "example": _example,
    "function": _function,
    "configs": stored.configs,
    "stored": stored.results,
    "across": _across,
}
