"""Several shots (E-FedISCA 5.6): the student goes back to the clients, they train again from it, and all is repeated.

The paper retrains the clients on their own images after every shot and then trains the global model on the new ones.
It does not say for how long, nor whether the global model starts anew: docs/methods/e_fedisca.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedbicross.context import Context
from fedbicross.engine.student import Student
from fedbicross.errors import MethodError
from fedbicross.messages import Client, Reply, Upload
from fedbicross.parts.settings import ShotsConfig
from fedbicross.parts.students import new_student
from fedbicross.parts.teachers import send_network


def upload(config: ShotsConfig, client: Client, ctx: Context, previous: Reply | None) -> Upload:
    """The network, trained by the run's recipe: at first from its initialisation, then from the last student."""
    if previous is None or config.shots == 1:
        return replace(send_network(client, ctx, config.weighted), extra={"shot": 1} if config.shots > 1 else {})
    shot = _number(previous.info) + 1
    state = ctx.models.retrain(client, previous.tensors, visit=f"shot-{shot}", epochs=config.epochs_shot)
    counts = client.class_counts(len(ctx.task.classes)) if config.weighted else None
    return Upload(client.name, ctx.task_of(client), state, class_counts=counts, extra={"shot": shot})


def at_shot(method: str, config: ShotsConfig, uploads: Sequence[Upload], ctx: Context) -> tuple[int, Context]:
    """The number of this shot, from 1, and a context whose random streams and checkpoints are its own."""
    found = sorted({_number(upload.extra) for upload in uploads})
    if len(found) > 1 or not 1 <= found[0] <= config.shots:
        numbers = " and ".join(map(str, found))
        raise MethodError("wrong_shot", f"{method} with shots={config.shots} got uploads of shot {numbers}")
    shot = found[0]
    if shot > 1:  # all replies of the shot before are out: only its student may still be asked for
        for name in ("synthesis", "distillation"):
            ctx.at_shot(shot - 1).drop_stage(name)
    if shot > 2:
        ctx.at_shot(shot - 2).drop_stage("student")
    return shot, ctx.at_shot(shot)


def first_student(method: str, config: ShotsConfig, shot: int, ctx: Context) -> Student:
    """A new student, or the last shot's where that is trained further; its momentum is always new."""
    student = new_student(ctx, 0, config.distillation_steps)
    if shot > 1 and config.student_start == "last":
        last = ctx.at_shot(shot - 1).load_stage("student")
        if last is None:
            hint = "fuse all shots with one store, or set student_start=fresh"
            raise MethodError("no_student", f"{method}: no student of shot {shot - 1} in the store; {hint}")
        student.load({**student.tensors(), **last[0]})
    return student


def reply(config: ShotsConfig, student: Student, shot: int, ctx: Context) -> Reply:
    """The student for everyone, kept here too if a later shot goes on from it."""
    info: dict[str, Any] = {"architecture": ctx.task.model}
    if config.shots > 1:
        info["shot"] = shot
    if shot < config.shots and config.student_start == "last":
        ctx.save_stage("student", student.state(), {})
    return Reply(student.state(), info)


def _number(told: Mapping[str, Any]) -> int:
    """The shot that an upload or a reply belongs to; a one-shot one does not say."""
    shot = told.get("shot", 1)
    if type(shot) is not int:
        raise MethodError("wrong_shot", f"{str(shot)[:40]!r} is no number of a shot")
    return shot
