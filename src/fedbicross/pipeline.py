"""The three verbs and the door before the server: the one place that runs them, whoever carries the bytes.

::

     make_upload() --> [ carrier ] --> check_upload(), fuse() --> [ carrier ] --> personalize()

``federation.simulate`` carries the bytes through a store, ``transport.files`` as files, ``transport.flower`` over a
network. All of them run a method's verbs through these functions, so that what one of them refuses, all refuse.
``name`` says under which name the record of a verb is kept and its time is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedbicross import parts
from fedbicross.bundle import validate
from fedbicross.context import Context, Task
from fedbicross.errors import MethodError, UploadError
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method, check_needs, mixed_models_problem


def make_upload(method: Method[Any], client: Client, ctx: Context, name: str, previous: Reply | None = None) -> Upload:
    """At the client: what leaves. ``previous`` is the reply of the round before, if any."""
    with ctx.measured("upload", name):
        return method.upload(client, ctx, previous)


def check_upload(method: Method[Any], upload: Upload, task: Task) -> None:
    """The door: refuse an upload that is of another task, lacks what the method needs, or makes no sense for it."""
    validate.check_same_task([upload], task)
    problem = mixed_models_problem(method, [upload.task.model], task.model)
    if problem:
        raise MethodError("mixed_models", problem)
    check_needs(method, [upload])
    method.check_extra(upload)  # whatever a method's own check forgets
    method.check_upload(upload)


def fuse(method: Method[Any], uploads: Sequence[Upload], ctx: Context, name: str) -> list[Reply]:
    """At the server: every upload through the door, then one reply to each, in the same order."""
    for upload in uploads:
        try:
            check_upload(method, upload, ctx.task)
        except UploadError as error:
            raise UploadError(error.code, f"upload of {upload.client[:64]!r}: {error.args[0]}") from None
    with ctx.measured("fuse", name):
        replies = method.fuse(uploads, ctx)
    if len(replies) != len(uploads):
        raise MethodError("replies", f"{method.name} made {len(replies)} replies to {len(uploads)} uploads")
    return replies


def personalize(method: Method[Any], client: Client, reply: Reply, ctx: Context, name: str) -> Predictor:
    """At the client: the model that it will use, with networks that are what they are said to be."""
    with ctx.measured("personalize", name):
        predictor = method.personalize(client, reply, ctx)
        if method.gated:
            own = method.alone(client, ctx)
            predictor = parts.gate.gated(client, own, predictor, ctx, method.held_back(client, ctx))
        validate.check_predictor(predictor)
        return predictor
