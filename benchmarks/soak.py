"""What a hostile upload, a kill and a damaged file can do: `make soak`, or `python -m benchmarks.soak --minutes 10`.

Three parts share the time. *Fuzz*: uploads of every method with fields and tensors of other types and extreme values,
through the door of the server; what it lets in is fused with two honest uploads, where that is quick. *Kills*: every
verb that writes, ended just before one of its changes to files, and run again. *Damage*: every file of a run, of the
work folders, of a model and of what travels cut, flipped, emptied, replaced, removed, swapped or made a pipe, before
the verb that reads it. Nothing may end in a traceback, hang, or give another result without saying so: any such case
is an error of this program, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedbicross import disclosure, pipeline, transport
from fedbicross.bundle import pack
from fedbicross.context import Context, Task
from fedbicross.data.cells import load_cells
from fedbicross.engine.recipe import Training
from fedbicross.errors import FedBiCrossError, UploadError
from fedbicross.messages import Client, Reply, Upload
from fedbicross.methods import METHODS, create
from fedbicross.methods.base import Method
from fedbicross.runs.environment import versions

OUT = Path("results/benchmarks/soak.json")
CLASSES = ("lymphocyte", "monocyte", "neutrophil")
TASK = Task(CLASSES, 12, 3, "resnet8")
TRAINING = Training(recipe="modern", epochs=1, batch_size=8)
SITES = ("north", "south", "east")
SECONDS = 60.0  # that a verb on tiny data may take before it counts as hanging
TRACEBACK = "Traceback (most recent call last)"

# --- fuzz: the door of the server, and the fusion behind it -----------------------------------------------------------

TINY: dict[str, dict[str, Any]] = {  # settings with which a client of a dozen images is done at once
    "falcon": {"encoder": "tiny", "width": 16, "layers": 1, "heads": 2, "feedforward": 16, "components": 2, "batch": 12}
    | {"epochs_generator": 1, "head_hidden": 16, "epochs_classifier": 1},
    "fedpft": {"encoder": "tiny", "components": 2},
    "fedcgs": {"encoder": "tiny"},
    "analytic": {"encoder": "tiny"},
    "local_head": {"encoder": "tiny", "batch": 12, "head_hidden": 16, "epochs_classifier": 1},
    "fedlmg": {"images_per_class": 2, "steps": 1, "bn_steps": 1, "epochs": 1, "batch_synthesis": 12},
    # So few images do not stand out from the noise of the presets.
    "fedcgs:private": {"epsilon": 100.0, "projection": 16},
    "analytic:private": {"epsilon": 100.0, "projection": 16},
}
SENDING_OTHERWISE = ("ensemble:class_weighted", "fedpft:full", "fedpft:spherical", "fedbicross:k2", "primum:no_counts")
SENDING_OTHERWISE += ("fedcgs:private", "analytic:private")
FUSING_OTHERWISE = ("fedavg:uniform", "fedcgs:within", "fedcgs:hierarchy", "analytic:lda")
FUSED = {"fedavg", "ensemble", "fedcgs", "analytic", "fedpft"}  # a fusion takes the server a fraction of a second
CONFUSED: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 10**30, -(10**30), 1e30, -1e-30, 0.5, 3e38),
    *("", "x", "1", "\0", "../..", "x" * 10_000, [], [1], [[[]]], {}, {"x": 1}, {"": None}, [None] * 1000),
)
EXTREMES = (3.4e38, -3.4e38, 1e-45, 0.0, -0.0, 1e6, -1e6, 1e12, math.nan, math.inf, -math.inf)


def tiny(spec: str) -> Method[Any]:
    """The method with small settings."""
    return create(spec, {key: TINY[key] for key in (spec.partition(":")[0], spec) if key in TINY})


def honest_uploads() -> dict[str, list[Upload]]:
    """What three tiny clients send by each method, and by variants that send or fuse something else."""
    cells = load_cells(12, 0, 300, 8)
    rows = np.flatnonzero(cells.train.labels < len(CLASSES))[:72].reshape(len(SITES), -1)
    clients = [Client(name, cells.train.images[r], cells.train.labels[r]) for name, r in zip(SITES, rows, strict=True)]
    ctx = Context(TASK, TRAINING)
    found: dict[str, list[Upload]] = {}
    specs = [name for name, cls in METHODS.items() if not cls.pools_data]
    for spec in (*specs, *SENDING_OTHERWISE, *FUSING_OTHERWISE):
        ctx.scope = f"soak/{spec}"
        found[spec] = [tiny(spec).upload(client, ctx, None) for client in clients]
    return found


def fuzz(seconds: float, rng: random.Random) -> dict[str, Any]:
    """Mutated uploads, from bytes to the end of ``check_upload``: each field by each value once, then at random.

    Those that are let in are fused, as long as fusions have not taken more than half of the time.
    """
    honest = honest_uploads()
    uploads, methods = {spec: first for spec, (first, *_) in honest.items()}, {spec: tiny(spec) for spec in honest}
    sweep = [(spec, path, new) for spec in uploads for path in places(manifest(uploads[spec])) for new in CONFUSED]
    rng.shuffle(sweep)
    counts: Counter[str] = Counter()
    codes: Counter[str] = Counter()  # of refusals at the fusion
    failures: list[str] = []
    began, fusing = time.monotonic(), 0.0
    while (elapsed := time.monotonic() - began) < seconds:
        spec, path, new = sweep.pop() if sweep else (rng.choice(list(uploads)), [], None)
        info, tensors = json.loads(json.dumps(manifest(uploads[spec]))), dict(uploads[spec].tensors)
        if path:
            what = [put(info, path, new)]
        else:
            what = [change_upload(tensors, info, rng) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
        counts["cases"] += 1
        opened, problem = let_in(methods[spec], tensors, info)
        counts["tracebacks" if problem else "refused" if opened is None else "accepted"] += 1
        if opened is not None and spec.partition(":")[0] in FUSED and fusing <= elapsed / 2:
            start = time.monotonic()
            code, problem = fusion(methods[spec], [opened, *honest[spec][1:]])
            fusing += (took := time.monotonic() - start)
            problem = problem or (f"took {took:.0f} s" if took > SECONDS else "")
            counts["fusion_failures" if problem else "refused_at_fusion" if code else "fused"] += 1
            codes.update([code] if code else [])
            problem = problem and f"at the fusion: {problem}"
        if problem:
            failures.append(f"fuzz of {spec}: {', '.join(what)}: {problem}")
    names = {spec.partition(":")[0] for spec in uploads}
    about = {"methods": len(names), "specs": len(uploads), "left": len(sweep)}
    return {**about, **tally(counts), "fusion_codes": dict(sorted(codes.items())), "failures": failures}


def let_in(method: Method[Any], tensors: dict[str, torch.Tensor], info: dict[str, Any]) -> tuple[Upload | None, str]:
    """The upload if the door lets it in, and what must not be; neither where it is refused."""
    try:
        opened = Upload.unpack(pack("upload", tensors, info, finite=False))
        pipeline.check_upload(method, opened, TASK)
    except FedBiCrossError as error:
        # The door's last net, under the checks: what it catches, one of them has missed.
        return None, str(error) if error.code == "unexpected" else ""
    except Exception:
        return None, traceback.format_exc().splitlines()[-1]
    return opened, ""


def fusion(method: Method[Any], uploads: Sequence[Upload]) -> tuple[str, str]:
    """The code of a refusal, and what must not be; neither where there is a finite reply to everybody."""
    ctx = Context(TASK, TRAINING)  # a new one: nothing is left of the fusion before
    try:
        replies = pipeline.fuse(method, sorted(uploads, key=lambda upload: upload.client), ctx, "soak/server")
        for reply in {id(reply): reply for reply in replies}.values():
            for name, tensor in Reply.unpack(reply.pack()).tensors.items():
                if not tensor.isfinite().all():
                    return "", f"{name!r} in a reply is not finite"
    except FedBiCrossError as error:
        return error.code, ""
    except Exception:
        return "", traceback.format_exc().splitlines()[-1]
    return "", ""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all entries of a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in inside for found in ((*path, key), *places(inner, (*path, key)))]


def put(value: Any, path: Sequence[Any], new: Any) -> str:
    """Another value at a path, in place; what."""
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = copy.deepcopy(new)
    return f"{'.'.join(map(str, path))} = {str(new)[:20]!r}"


def change_upload(tensors: dict[str, torch.Tensor], info: dict[str, Any], rng: random.Random) -> str:
    """One change to the tensors or to the manifest."""
    return change_tensors(tensors, rng) if tensors and rng.random() < 0.6 else change_json(info, rng)


def tally(counts: Counter[str]) -> dict[str, int]:
    keys = ("cases", "refused", "accepted", "tracebacks", "fused", "refused_at_fusion", "fusion_failures")
    return {key: counts[key] for key in keys}


def manifest(upload: Upload) -> dict[str, Any]:
    """The manifest's fields as ``Upload.pack`` writes them."""
    counts = None if upload.class_counts is None else list(upload.class_counts)
    return {
        "client": upload.client,
        "task": upload.task.as_json(),
        "preprocessing": upload.preprocessing,
        "class_counts": counts,
        "num_samples": upload.num_samples,
        "extra": dict(upload.extra),
        "run_id": None,
        "agreement": None,
    }


def change_json(value: Any, rng: random.Random) -> str:
    """Replace, remove or add one entry somewhere in a JSON value, in place; what."""
    found = places(value)
    if not found:
        raise ValueError("nothing to change")
    path = rng.choice(found)
    how = rng.random()
    if how < 0.8:
        return put(value, path, rng.choice(CONFUSED))
    for key in path[:-1]:
        value = value[key]
    if how < 0.9:
        del value[path[-1]]
    else:
        value.append(True) if isinstance(value, list) else value.update(added=True)
    return f"{'.'.join(map(str, path))} removed, or one added"


def change_tensors(tensors: dict[str, torch.Tensor], rng: random.Random) -> str:
    """Another type, shape, name or extreme values for one tensor, in place; which."""
    name = rng.choice(list(tensors))
    tensor = tensors[name].clone()
    how = rng.choice(("type", "shape", "value", "all", "scale", "remove", "rename", "swap"))
    if how == "type":
        tensors[name] = tensor.to(rng.choice((torch.float64, torch.float16, torch.int64, torch.int8, torch.bool)))
    elif how == "shape":
        number = torch.zeros((), dtype=tensor.dtype)
        turned = tensor.T if tensor.dim() == 2 else tensor.flatten()[:0]
        tensors[name] = rng.choice((tensor[None], tensor.reshape(-1), number, turned))
    elif how in ("value", "all"):
        flat = tensor.reshape(-1)
        whole_number = rng.choice((0, 1, -1, 2**62 if tensor.dtype == torch.int64 else 1))
        extreme = rng.choice(EXTREMES) if tensor.is_floating_point() else whole_number
        flat[slice(None) if how == "all" else slice(0, 1)] = extreme
        tensors[name] = flat.reshape(tensor.shape)
    elif how == "scale":
        tensors[name] = (tensor * rng.choice((-1, 0.01, 3, 100, 1e4))).to(tensor.dtype)
    elif how == "remove":
        del tensors[name]
    elif how == "rename":
        tensors[f"{name}.x"] = tensors.pop(name)
    else:
        other = rng.choice(list(tensors))
        tensors[name], tensors[other] = tensors[other], tensors[name]
    return f"{name}: {how}"


# --- commands in processes of their own -----------------------------------------------------------------------------

PROCESSES = multiprocessing.get_context("forkserver")  # forks of a process that has imported everything and run nothing
PROCESSES.set_forkserver_preload(
    ["fedbicross.cli.app", "PIL.Image", "torch._dynamo", "sklearn.metrics", "jinja2", "tomli_w"]
    + [f"fedbicross.{name}" for name in ("runs.runner", "report.write", "engine.train", "engine.predict")]
    + [f"fedbicross.{name}" for name in ("models.factory", "transport.files", "deploy.folder", "data.folder")]
)
WRITES = {"open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}


@dataclass(frozen=True)
class Ended:
    """How a command ended; negative: by a signal, None: it had to be stopped."""

    code: int | None
    said: str
    writes: int = 0


def command(words: tuple[str, ...], folder: str, at: int, log: str) -> None:
    """The body of such a process: run the command line in a folder, and die just before its change of files ``at``."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.chdir(folder)
    torch.set_num_threads(1)
    from fedbicross.cli import main

    done = 0

    def hook(event: str, given: tuple[Any, ...]) -> None:
        nonlocal done
        if event not in WRITES or str(given[0]).startswith(("/dev", "/proc")) or isinstance(given[0], int):
            return
        if event == "open" and not (given[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        done += 1
        if done == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    sys.argv = ["fedbicross", *words]
    status = 1
    try:
        main()
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    print(f"\nwrites: {done}")
    sys.stdout.flush()
    os._exit(status)


def call(words: tuple[str, ...], folder: Path, at: int = 0) -> Ended:
    """Run a command in a folder, to its end or to its death."""
    log = folder.with_name(f"{folder.name}.log")
    process = PROCESSES.Process(target=command, args=(words, str(folder), at, str(log)))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Ended(None, "")
    said = log.read_text(encoding="utf-8", errors="replace")
    last = said.splitlines()[-1] if said.strip() else ""
    return Ended(process.exitcode, said, int(last.removeprefix("writes: ")) if last.startswith("writes: ") else 0)


# --- the scene: one run, three hospitals ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Verb:
    """A command, what must be there before it, and what it must leave behind however often it dies."""

    name: str
    folder: str  # where it is given, in the scene
    words: tuple[str, ...]
    again: Callable[[Path], tuple[str, ...]] | None = None  # what to say after a kill, if not the same
    result: Callable[[Path], Any] = lambda folder: None  # of the folder of the scene
    reads: tuple[str, ...] = ()  # these files, and what lies in these folders of the scene, are damaged before it
    once: bool = False  # refuses to be given twice, so that damage comes before the first time
    refuses: str = ""  # the code by which it may refuse after a kill, if what is there is whole
    kept: Callable[[Path], bool] = lambda folder: True  # whether it is


def whole(*names: str) -> Callable[[Path], Any]:
    """The bytes of these files."""
    return lambda scene: {name: (scene / name).read_bytes() for name in names}


def rows(scene: Path) -> Any:
    """Results without clock times and versions."""
    found = json.loads((scene / "lab/run/results.json").read_bytes())
    timeless = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in found["rows"]]
    return {**found, "rows": timeless, "versions": None}


def page(scene: Path) -> Any:
    """Results, and that the page is there."""
    return rows(scene), (scene / "lab/run/report.html").stat().st_size > 1000


def made_key(scene: Path) -> Any:
    """A pair that fits; every pair is another one."""
    return (scene / "north/new.pub").read_text().startswith("ed25519:") and (scene / "north/new.key").exists()


def verified(scene: Path) -> Any:
    """The uploads, if all of them passed; that one is missing is said without an error."""
    if "missing: none" not in (scene / "server.log").read_text(encoding="utf-8"):
        raise UploadError("missing", "a site without an upload is named")
    return UPLOADS(scene)


def statement(scene: Path) -> Any:
    """What an audit found, without the time of day; signed, and for this page. A note says what was not made here."""
    folder = scene / "north"
    allowed = {"north": (folder / "north.pub").read_text(encoding="utf-8").strip()}
    data, page, upload = ((folder / f"north.{end}").read_bytes() for end in ("audit.json", "audit.html", "safetensors"))
    body = disclosure.statement.verify(data, allowed, page, upload)
    if not body["images"]["made_here"]:
        raise UploadError("missing", "the note names it")
    return {key: value for key, value in body.items() if key not in ("made", "html_sha256")}


def whole_page(scene: Path) -> bool:
    """The page of an audit to its last line; the statement is written after it."""
    found = (scene / "north/north.audit.html").read_text(encoding="utf-8")
    return found.rstrip().endswith("</html>") and not (scene / "north/north.audit.json").exists()


FINGERPRINT = "FINGERPRINT"  # in the words of a command: that of this scene's agreement
SETTINGS = ("training.epochs=1", "training.batch_size=8", "training.recipe='modern'", "class_counts.smallest=0")
SETTINGS += ("hold_out=0.4",)  # of 36 images, enough for an audit
INIT = ("federation", "init", "--classes", ",".join(CLASSES), "--server", "server.pub", "--post", "../post")
INIT += tuple(word for setting in SETTINGS for word in ("--set", setting))
INIT += ("--image-size", "8", "--model", "resnet8", "--method", "fedavg", "--run-id", "soak")
TRAIN = ("client", "train", "--data", "images", "--key", "north.key", "--out", "north.safetensors", "--threads", "1")
JOIN = ("client", "join", "--post", "../post", "--data", "images", "--name", "south", "--yes", "--threads", "1")
JOIN += ("--fingerprint", FINGERPRINT)
AUDIT = ("audit", "upload", "north.safetensors", "--data", "images", "--key", "north.key", "--threads", "1")
AUDIT += ("--shadows", "4", "--images", "20", "--epochs", "1", "--canaries", "20", "--steps", "1")
PERSONALIZE = ("client", "personalize", "--reply", "../post/replies/north.safetensors", "--data", "images")
PERSONALIZE += ("--out", "model", "--threads", "1")
FUSE = ("server", "fuse", "../post/uploads", "--key", "server.key", "--out", "../post/replies", "--threads", "1")
RUN = ("run", "tiny.toml", "--out", "run")
PREDICT = ("client", "predict", "images", "--model", "model", "--out", "answers.csv")
EXPORT_RUN = ("export", "run", "--method", "ensemble", "--client", "client-0", "--out", "export")
UPLOADS = whole(*(f"post/uploads/{name}.safetensors" for name in SITES))

VERBS = (  # in the order in which the scene is played
    Verb(
        *("run", "lab", RUN),
        again=lambda scene: ("resume", "run") if (scene / "lab/run/config.toml").exists() else RUN,
        result=page,
    ),
    Verb("resume", "lab", ("resume", "run"), result=page, reads=("lab/run",)),
    Verb("report", "lab", ("report", "run"), result=page, reads=("lab/run",)),
    Verb("report --check", "lab", ("report", "run", "--check"), result=rows, reads=("lab/run",)),
    Verb(
        *("export of a run", "lab", EXPORT_RUN),
        result=whole("lab/export/model.safetensors", "lab/export/config.json"),
        reads=("lab/run",),
        once=True,
    ),
    Verb(
        *("client keygen", "north", ("client", "keygen", "--out", "new.key")),
        result=made_key,
        refuses="key_exists",  # a pair that is whole is never overwritten
        kept=made_key,
    ),
    Verb(
        *("federation init", "server", INIT),
        result=whole("server/federation.toml", "post/federation.toml"),
        reads=("server/federation.toml", "server/server.pub", "post"),
    ),
    Verb("client train", "north", TRAIN, result=whole("north/north.safetensors"), reads=("north/fedbicross-work",)),
    Verb(
        *("client join, to the upload", "south", JOIN),
        result=whole("post/uploads/south.safetensors"),
        reads=("south/fedbicross-work", "south/federation.toml", "south/south.safetensors", "post"),
    ),
    Verb(
        *("audit upload", "north", AUDIT),
        result=statement,
        reads=("north/fedbicross-work", "north/north.safetensors", "north/federation.toml"),
        once=True,
        refuses="exists",  # its page was written, and the statement was not
        kept=whole_page,
    ),
    Verb(
        *("server verify", "server", ("server", "verify", "../post/uploads")),
        result=verified,
        reads=("post/uploads", "server/federation.toml"),
    ),
    Verb(
        *("server fuse", "server", FUSE),
        result=whole(*(f"post/replies/{name}.safetensors" for name in SITES)),
        reads=("server/fedbicross-work",),
    ),
    Verb(
        *("client personalize", "north", PERSONALIZE),
        result=whole("north/model/model.safetensors"),
        reads=("north/fedbicross-work", "north/model"),
    ),
    Verb(
        *("client join, to the model", "south", JOIN),
        result=whole("south/model/model.safetensors"),
        reads=("south/fedbicross-work", "south/model", "post/replies"),
    ),
    Verb("client predict", "north", PREDICT, result=whole("north/answers.csv"), reads=("north/model",), once=True),
    Verb(
        *("export", "north", ("export", "model", "--out", "export")),
        result=whole("north/export/model.safetensors", "north/export/alone.safetensors"),
        reads=("north/model",),
        once=True,
    ),
)
CONFIG = """model = "resnet8"
clients = 3
methods = ["local_only", "fedavg:uniform", "ensemble"]
baselines = []
device = "cpu"
threads = 1
[data]
name = "cells"
train_size = 60
test_size = 30
image_size = 8
[training]
recipe = "modern"
epochs = 1
batch_size = 32
[partition]
alpha = 0.5
[method."fedavg:uniform"]
rounds = 2
"""


def build(scene: Path) -> None:
    """Keys and images; nothing is agreed on yet."""
    (scene / "lab").mkdir(parents=True)
    (scene / "post").mkdir()
    (scene / "lab/tiny.toml").write_text(CONFIG, encoding="utf-8")
    cells = load_cells(8, 1, 600, 8)
    for number, name in enumerate((*SITES, "server")):
        (scene / name).mkdir()
        role = "server" if name == "server" else "client"
        expect(call((role, "keygen", "--out", f"{name}.key"), scene / name))
        for label in CLASSES if role == "client" else ():
            folder = scene / name / "images" / label
            folder.mkdir(parents=True)
            found = np.flatnonzero(cells.train.labels == cells.classes.index(label))[12 * number : 12 * number + 12]
            for row in found:
                Image.fromarray(cells.train.images[row]).save(folder / f"{row}.png")
        if role == "client":
            shutil.copy(scene / name / f"{name}.pub", scene / "post")


def expect(ended: Ended) -> Ended:
    if ended.code != 0:
        raise SystemExit(f"the scene cannot be played: {ended.said}")
    return ended


@dataclass
class Scene:
    """The folders before each verb, after it, and what it left."""

    root: Path
    before: dict[str, Path] = field(default_factory=dict)
    after: dict[str, Path] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""

    def play(self) -> None:
        """Every verb once, undisturbed."""
        now = self.root / "now"
        build(now)
        for verb in VERBS:
            self.before[verb.name] = keep(now, self.root / f"before-{verb.name}", verb)
            self.writes[verb.name] = expect(self.give(verb.words, now / verb.folder)).writes
            self.results[verb.name] = verb.result(now)
            self.after[verb.name] = keep(now, self.root / f"after-{verb.name}", verb)
            if verb.name == "federation init":
                self._agree(now)
            if verb.name == "client train":
                self._others(now)

    def give(self, words: tuple[str, ...], folder: Path, at: int = 0) -> Ended:
        """Give a command of this scene in a folder of it."""
        return call(tuple(self.fingerprint if word == FINGERPRINT else word for word in words), folder, at)

    def _agree(self, now: Path) -> None:
        """The agreement to two sites; the third compares it itself, as it joins."""
        self.fingerprint = transport.files.load_federation(now / "post/federation.toml").fingerprint
        for name in ("north", "east"):
            shutil.copy(now / "server/federation.toml", now / name)

    def _others(self, now: Path) -> None:
        """What the sites send that do not join."""
        expect(call(tuple(word.replace("north", "east") for word in TRAIN), now / "east"))
        (now / "post/uploads").mkdir()
        for name in ("north", "east"):
            shutil.copy(now / name / f"{name}.safetensors", now / "post/uploads")


def keep(folder: Path, to: Path, verb: Verb) -> Path:
    """A copy of what a verb sees of the scene."""
    to.mkdir(exist_ok=True)
    parts = [str(folder / part) for part in (verb.folder, "post")]
    subprocess.run(["cp", "-a", *parts, str(to)], check=True)  # with its hard links, unlike shutil.copytree
    return to


@contextlib.contextmanager
def copy_of(folder: Path, root: Path, verb: Verb) -> Iterator[Path]:
    """Another copy of that, to be spoilt."""
    with tempfile.TemporaryDirectory(dir=root) as place:
        yield keep(folder, Path(place), verb)


# --- kills ----------------------------------------------------------------------------------------------------------


def kill(scene: Scene, seconds: float, rng: random.Random) -> list[dict[str, Any]]:
    """Every verb in turn, killed before a change to files, as often as there is time; then run again."""
    none = {"kills": 0, "same": 0, "refused": 0, "bad": 0}
    found: dict[str, dict[str, Any]] = {verb.name: {"verb": verb.name, **none, "failures": []} for verb in VERBS}
    ends = time.monotonic() + seconds
    turns = [verb for verb in VERBS if scene.writes[verb.name]]
    for number in range(10**6):
        if time.monotonic() >= ends and number >= len(turns):
            break
        verb = turns[number % len(turns)]
        entry = found[verb.name]
        at = rng.randint(1, scene.writes[verb.name])
        with copy_of(scene.before[verb.name], scene.root, verb) as place:
            first = scene.give(verb.words, place / verb.folder, at)
            entry["kills"] += first.code == -signal.SIGKILL
            words = verb.words if verb.again is None else verb.again(place)
            second = scene.give(words, place / verb.folder)
            problem = judge(second, lambda verb=verb, place=place: verb.result(place), scene.results[verb.name])
            if problem == "refused":
                plainly = verb.refuses and f"error[{verb.refuses}]" in second.said and verb.kept(place)
                problem = "refused" if plainly else "cannot go on"
            entry[problem if problem in ("same", "refused") else "bad"] += 1
            if problem not in ("same", "refused"):
                entry["failures"].append(f"kill of {verb.name} at {at}: {problem}: {end_of(second)}")
    return list(found.values())


def judge(ended: Ended, result: Callable[[], Any], expected: Any) -> str:
    """same, refused (in one line, by a code), or what must not be: silent, traceback, hang, died."""
    if ended.code is None:
        return "hang"
    if ended.code < 0:
        return "died"
    if TRACEBACK in ended.said:
        return "traceback"
    if ended.code:
        return "refused" if "error[" in ended.said or "refused, " in ended.said else "traceback"
    try:
        return "same" if result() == expected else "silent"
    except FedBiCrossError as error:
        return "refused" if error.code == "missing" else f"silent ({error})"
    except (OSError, ValueError, KeyError) as error:
        return f"silent ({error})"


def end_of(ended: Ended) -> str:
    lines = [line for line in ended.said.splitlines() if line.strip() and not line.startswith("writes:")]
    return lines[-1][:200] if lines else ""


# --- damage ---------------------------------------------------------------------------------------------------------

HOWS = ("cut", "flipped", "emptied", "replaced", "removed", "swapped", "pipe", "folder", "edited")


def damage(scene: Scene, seconds: float, rng: random.Random) -> list[dict[str, Any]]:
    """Files in turn, spoilt in a random way, before each verb that reads them.

    Half of them by verb: a run has many files, and the others would hardly come to their turn.
    """
    reads = [(verb, folder) for verb in VERBS for folder in verb.reads]
    scenes = {verb.name: (scene.before if verb.once else scene.after)[verb.name] for verb, _ in reads}
    cases = [(verb, name) for verb, folder in reads for name in victims(scenes[verb.name], folder)]
    rng.shuffle(cases)
    outcomes: dict[str, Counter[str]] = {verb.name: Counter() for verb in VERBS if verb.reads}
    failures: dict[str, list[str]] = {name: [] for name in outcomes}
    ends = time.monotonic() + seconds
    for number in range(10**6):
        if time.monotonic() >= ends:
            break
        one = rng.choice(list(outcomes))
        few = [case for case in cases if case[0].name == one]
        verb, name = rng.choice(few) if number % 2 else cases[number // 2 % len(cases)]
        how = rng.choice(HOWS)
        with copy_of(scenes[verb.name], scene.root, verb) as place:
            if not spoil(place, name, how, rng):
                continue
            ended = scene.give(verb.words, place / verb.folder)
            outcome = judge(ended, lambda verb=verb, place=place: verb.result(place), scene.results[verb.name])
        outcomes[verb.name][outcome] += 1
        outcomes[verb.name]["cases"] += 1
        if outcome not in ("same", "refused"):
            failures[verb.name].append(f"{verb.name}, {name} {how}: {outcome}: {end_of(ended)}")
    files = Counter(verb.name for verb, _ in cases)
    return [
        {"verb": verb, "files": files[verb], **{key: found[key] for key in ("cases", "refused", "same")}}
        | {"silent": sum(n for key, n in found.items() if key.startswith("silent"))}
        | {"tracebacks": found["traceback"] + found["died"], "hangs": found["hang"], "failures": failures[verb]}
        for verb, found in outcomes.items()
    ]


DERIVED = ("report.html", "tables", ".lock", "MODEL_CARD.md")  # nothing reads them again


def victims(scene: Path, folder: str) -> list[str]:
    """The files below a folder that something reads; or the file itself."""
    found = sorted(path for path in (scene / folder, *(scene / folder).rglob("*")) if path.is_file())
    names = [path.relative_to(scene).as_posix() for path in found]
    # What lies under objects/ is the same file as that under its name.
    return [name for name in names if not any(part in DERIVED or part == "objects" for part in Path(name).parts)]


def spoil(scene: Path, name: str, how: str, rng: random.Random) -> bool:
    """Damage one file; whether it is another one now."""
    path = scene / name
    data = path.read_bytes()
    other = rng.choice([p for p in path.parent.parent.rglob(f"*{path.suffix}") if p.is_file() and p != path] or [path])
    place = rng.randrange(max(len(data), 1))
    new: bytes | None = {
        "cut": data[:place],
        "flipped": data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :] if data else b"",
        "emptied": b"",
        "replaced": rng.choice((b"null", b"[]", b"{}", b"\xff" * 64, b"[" * 10_000, b"0" * len(data))),
        "swapped": other.read_bytes(),
        "edited": edited(data, rng),
    }.get(how)
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif new is not None:
        path.write_bytes(new)
    return new != data


def edited(data: bytes, rng: random.Random) -> bytes:
    """JSON with one entry changed, text with one digit changed."""
    try:
        value = json.loads(data)
        change_json(value, rng)
        return json.dumps(value).encode()
    except (ValueError, TypeError):
        digits = [place for place, byte in enumerate(data) if byte in b"0123456789"]
        if not digits:
            return data
        place = rng.choice(digits)
        return data[:place] + str((int(chr(data[place])) + 1) % 10).encode() + data[place + 1 :]


# --- all of it ------------------------------------------------------------------------------------------------------


def soak(minutes: float, seed: int) -> dict[str, Any]:
    """All three parts in about so many minutes."""
    began = time.monotonic()
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        found: dict[str, Any] = {"fuzz": fuzz(15 * minutes, rng)}
        scene = Scene(Path(place))
        scene.play()
        left = 60 * minutes - (time.monotonic() - began)
        found["kills"] = kill(scene, 0.4 * left, rng)
        found["damage"] = damage(scene, max(60 * minutes - (time.monotonic() - began), 1), rng)
    failures = [line for part in (found["fuzz"], *found["kills"], *found["damage"]) for line in part.pop("failures")]
    made = {"versions": versions("cpu"), "seed": seed, "minutes": round((time.monotonic() - began) / 60, 1)}
    return {**found, "failures": failures[:50], "failed": len(failures), **made}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = soak(given.minutes, given.seed)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps({key: found[key] for key in ("fuzz", "kills", "damage", "failures", "failed")}, indent=1))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
