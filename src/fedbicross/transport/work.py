"""Where a site or the server keeps what it is working on, so that a killed command can go on."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedbicross import engine
from fedbicross.context import Context, Progress, Record, Silent
from fedbicross.errors import RunError
from fedbicross.lazy_torch import torch
from fedbicross.runs.store import RunFolder
from fedbicross.settings import read_json
from fedbicross.transport.federation_file import FederationFile

SCOPE = "federation"


def make_private(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for its owner only: it will hold networks."""
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def work_folder(path: Path) -> Iterator[RunFolder]:
    """The folder, locked and mended; a full disk or GPU is an error in one line, and the same call again goes on."""
    try:
        make_private(path)
    except OSError as error:
        raise RunError("cannot_write", f"cannot write to {path}: {error.strerror}") from None
    with RunFolder(path) as folder:
        folder.clean()
        try:
            yield folder
        except OSError as error:
            raise RunError(
                "cannot_write", f"writing to {path} failed: {error.strerror or error}; the same command goes on later"
            ) from None
        except (RuntimeError, MemoryError) as error:
            if not engine.device.out_of_memory(error):
                raise
            gpu = isinstance(error, torch.OutOfMemoryError)
            way_on = "--device cpu takes longer but needs none" if gpu else "the same command goes on later"
            raise RunError("out_of_memory", f"out of {'GPU ' if gpu else ''}memory; {way_on}") from None


def make_context(federation: FederationFile, folder: RunFolder, progress: Progress | None, device: str) -> Context:
    """What surrounds a method's verb here."""
    used = engine.device.resolve_device(device)
    precision = engine.device.resolve_precision("auto", used)
    engine.device.set_precision(precision)
    return Context(
        task=federation.task,
        training=federation.training,
        seed=federation.seed,
        device=used,
        precision=precision,
        fast=used == "cuda",
        scope=SCOPE,
        store=folder.store,
        progress=progress or Silent(),
        event=folder.event,
        secret_noise=True,
    )


def say_warnings(ctx: Context, verb: str, name: str, agreed: Collection[str] = (), told: Collection[str] = ()) -> None:
    """What a verb that has just ended wants a person to know, from its record, without what was ``told`` already.

    ``agreed`` are names of settings that this person cannot change: advice that names one is left out.
    """
    file = f"records/{verb}/{name}.json"
    warnings = read_json(Record, ctx.store.load(file) or b"{}", file).warnings
    for warning in (text for text in warnings if text not in told):
        what, _, advice = warning.rpartition("; ")
        out_of_reach = what and not set(re.findall(r"\w+", advice)).isdisjoint(agreed)
        ctx.progress.say(f"note: {what if out_of_reach else warning}")
