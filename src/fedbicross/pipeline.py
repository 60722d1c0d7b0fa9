"""The three verbs and the door before the server: the one place that runs them, whoever carries the bytes.

::

     make_upload() --> [ carrier ] --> check_upload(), fuse() --> [ carrier ] --> personalize()

``federation.simulate`` carries the bytes through a store, ``transport.files`` as files, ``transport.flower`` over a
network. All of them run a method's verbs through these functions, so that what one of them refuses, all refuse.
``name`` says under which name the record of a verb is kept and its time is told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedbicross import engine, parts
from fedbicross.bundle import validate
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Context, Task
from fedbicross.errors import FedBiCrossError, MethodError, RunError, UploadError
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method, check_needs, check_private_training, mixed_models_problem
from fedbicross.parts.defence import Seen


def make_upload(method: Method[Any], client: Client, ctx: Context, name: str, previous: Reply | None = None) -> Upload:
    """At the client: what leaves. ``previous`` is the reply of the round before, if any."""
    check_private_training(method, ctx.training, method.name)
    with ctx.measured("upload", name):
        upload = method.upload(client, ctx, previous)
        return parts.private.of_training(upload, client, ctx) if method.sends_only_the_network else upload


def check_upload(method: Method[Any], upload: Upload, task: Task) -> None:
    """The door: refuse an upload that is of another task, lacks what the method needs, or makes no sense for it.

    Whatever a check stumbles over is this upload's, and must not stop the others, unless the machine is at fault.
    """
    try:
        _check_upload(method, upload, task)
    except (FedBiCrossError, OSError):
        raise
    except Exception as error:
        if engine.device.out_of_memory(error):
            problem = f"out of memory while {upload.client[:64]!r}'s upload was checked; try again when there is more"
            raise RunError("out_of_memory", problem) from error
        problem = f"{upload.client[:64]!r} sent what no check foresaw ({type(error).__name__}: {error})"
        raise UploadError("unexpected", problem) from error


def _check_upload(method: Method[Any], upload: Upload, task: Task) -> None:
    validate.check_same_task([upload], task)
    problem = mixed_models_problem(method, [upload.task.model], task.model)
    if problem:
        raise MethodError("mixed_models", problem)
    check_needs(method, [upload])
    validate.check_numbers(upload)
    method.check_extra(upload)  # whatever a method's own check forgets
    method.check_upload(upload)
    parts.probes.check(upload)


def who_differs(said: Mapping[str, Mapping[str, Any]]) -> dict[str, UploadError]:
    """The clients that do not say what most others say, from ``Method.must_agree`` of each: they are refused.

    Where no answer has more clients behind it than every other one, nobody can tell who is right: all are refused.
    """
    refused: dict[str, UploadError] = {}
    for code in sorted({code for one in said.values() for code in one}):
        groups: dict[str, list[str]] = {}
        for client, one in said.items():
            if client not in refused and code in one:
                groups.setdefault(canonical_json({"said": one[code]}), []).append(client)
        sizes = sorted(map(len, groups.values()), reverse=True)
        for clients in groups.values() if len(groups) > 1 else ():
            if len(clients) < sizes[0] or sizes[1] == sizes[0]:
                problem = f"{code.replace('_', ' ')}: {len(clients)} of {sum(sizes)} uploads are like it"
                refused |= {
                    client: UploadError(code, f"{client[:64]!r} differs from others in {problem}") for client in clients
                }
    return refused


def look_at(method: Method[Any], uploads: Sequence[Upload], ctx: Context, trusted: Collection[str] = ()) -> Seen:
    """At the server, after the door: what sticks out among these uploads, and as what each of them is used."""
    if method.trusting:
        return Seen(list(uploads))
    ctx = ctx.with_loss(method.loss)
    return parts.defence.look(uploads, ctx, trusted, method.counted_less, method.feature_length)


def fuse(
    method: Method[Any], uploads: Sequence[Upload], ctx: Context, name: str, trusted: Collection[str] = ()
) -> list[Reply]:
    """At the server: every upload through the door, then one reply to each, in the same order.

    Who is left out for what sticks out in his upload gets the reply that most others get.
    """
    for upload in uploads:
        try:
            check_upload(method, upload, ctx.task)
        except UploadError as error:
            raise UploadError(error.code, f"upload of {upload.client[:64]!r}: {error.args[0]}") from None
    for refused in who_differs({upload.client: method.must_agree(upload) for upload in uploads}).values():
        raise refused
    seen = look_at(method, uploads, ctx, trusted)
    with ctx.measured("fuse", name):
        for note in seen.notes:
            ctx.record.warn(str(note))
        replies = method.fuse(seen.uploads, ctx)
    if len(replies) != len(seen.uploads):
        raise MethodError("replies", f"{method.name} made {len(replies)} replies to {len(seen.uploads)} uploads")
    return seen.replies_to(uploads, replies)


def personalize(method: Method[Any], client: Client, reply: Reply, ctx: Context, name: str) -> Predictor:
    """At the client: the model that it will use, with networks that are what they are said to be."""
    with ctx.measured("personalize", name):
        predictor = method.personalize(client, reply, ctx)
        if method.gated:
            own = method.alone(client, ctx)
            predictor = parts.gate.gated(client, own, predictor, ctx, method.held_back(client, ctx))
        validate.check_predictor(predictor)
        return predictor
