"""A signed upload small enough to break in every place, files made by hand, and what a refusal must look like."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedbicross import models, seeds
from fedbicross.bundle import UPLOAD, sign, validate
from fedbicross.bundle.format import FORMATS, MANIFEST, canonical_json
from fedbicross.bundle.keys import public_text
from fedbicross.context import Task
from fedbicross.errors import FedBiCrossError, UploadError
from fedbicross.messages import Upload
from fedbicross.transport import files

TASK = Task(("a", "b", "c"), 12, 3, "resnet8")


@cache
def key(name: str) -> Ed25519PrivateKey:
    """A key that is the same in every run of the tests."""
    return Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b"."))


ALLOWED = {name: public_text(key(name)) for name in ("north", "south", "west")}
FEDERATION = files.new_federation(
    classes=TASK.classes,
    image_size=TASK.image_size,
    model=TASK.model,
    method="fedavg",
    run_id="run-7",
    server=public_text(key("server")),
    clients=ALLOWED,
    class_counts={"smallest": 0},
)
RUN = FEDERATION.run


def toy_tensors() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {
        "head.weight": torch.randn(3, 32, generator=rng),
        "head.bias": torch.randn(3, generator=rng),
        "bn.running_var": torch.rand(4, generator=rng) + 0.5,
        "bn.num_batches_tracked": torch.tensor(7),
    }


def toy_upload(client: str = "north", run_id: str | None = RUN, **changes: Any) -> Upload:
    values = {"num_samples": 9, "run_id": run_id, "agreement": FEDERATION.agreement, **changes}
    return Upload(client, TASK, values.pop("tensors", toy_tensors()), **values)


@cache
def toy() -> bytes:
    """A signed upload of about 1.7 kB."""
    return sign(toy_upload().pack(), key("north"))


@cache
def trained_like(architecture: str, classes: int = 3, channels: int = 3, size: int = 12) -> dict[str, torch.Tensor]:
    """A state that passes every check: initial weights, counters that moved. Shared: copy before changing it."""
    model = models.build(architecture, channels, classes, size)
    models.initialise(model, seeds.torch_rng(0, "init"))
    return {
        name: value + 5 if name.endswith("num_batches_tracked") else value for name, value in model.state_dict().items()
    }


def receive(data: bytes, client: str = "north", allowed: Mapping[str, str] = ALLOWED) -> Upload:
    """What the server does with a stranger's bytes before it looks at the networks: the very code that runs there."""
    upload = files.open_upload(FEDERATION.model_copy(update={"clients": allowed}), data)
    validate.check_client(upload.client, client)
    return upload


def seconds_now() -> float:
    """What this thread needs, as busy as the machine is now, to parse as much JSON as a header may hold."""
    text = "[" + "[]," * (UPLOAD.max_header // 3 - 1) + "[]]"
    began = time.thread_time()
    json.loads(text)
    return time.thread_time() - began


def refusal(work: Callable[[], object], kind: type[FedBiCrossError] = UploadError) -> str:
    """The code of the refusal: one line, the stable form of a code, and less than a second of this thread's time.

    On a busy machine a second is little: more is allowed where other work takes as much longer.
    """
    began = time.thread_time()
    try:
        work()
    except kind as error:
        assert type(error) is kind
        assert re.fullmatch(r"[a-z][a-z_]+", error.code), error.code
        assert len(error.args[0].splitlines()) == 1 and len(error.args[0]) < 400, error.args[0]
        seconds = time.thread_time() - began
        assert seconds < 1.0 or seconds < 20 * seconds_now(), f"{seconds} s"
        return error.code
    raise AssertionError("accepted")


def entry(dtype: str, shape: list[Any], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def manifest_text(names: list[str] | None = None, **changes: Any) -> str:
    values = {
        "format": FORMATS["upload"],
        "kind": "upload",
        "manifest": {},
        "tensors": dict.fromkeys(names or [], "0" * 64),
    }
    return canonical_json(values | changes)


def by_hand(header: bytes | str | Mapping[str, Any], data: bytes = b"") -> bytes:
    """A safetensors file from a header in any state of disrepair."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else compact(header)).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def with_tensors(entries: Mapping[str, Any], data: bytes) -> bytes:
    """A file with these lines in its table of tensors and a manifest that lists them."""
    return by_hand({"__metadata__": {MANIFEST: manifest_text(list(entries))}, **entries}, data)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
