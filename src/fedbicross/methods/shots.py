"""Several shots (E-FedISCA 5.6): the student goes back to the clients, they train again from it, and all is repeated.

The paper retrains the clients on their own images after every shot and then trains the global model on the new ones.
It does not say for how long, nor whether the global model starts anew: docs/methods/e_fedisca.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field

from fedbicross.context import Context
from fedbicross.errors import MethodError
from fedbicross.exchange import Client, Reply, Upload
from fedbicross.methods.synthesis import GlobalStudentMethod, SynthesisConfig, new_student

if TYPE_CHECKING:
    from fedbicross.engine.student import Student


class ShotsConfig(SynthesisConfig):
    """How often the whole is repeated, each time from the student of the time before."""

    shots: int = Field(1, ge=1, le=1000, description="times that networks travel (papers: 1; E-FedISCA 5.6: up to 30)")
    epochs_shot: int | None = Field(
        None, ge=1, description="local epochs of the second and later shots (not given); none: training.epochs again"
    )
    student_start: Literal["fresh", "last"] = Field(
        "last", description="student of a later shot: the last shot's trained further, or a new one (not given)"
    )


ShotsT = TypeVar("ShotsT", bound=ShotsConfig)


class MultiShotMethod(GlobalStudentMethod[ShotsT]):
    """Such a method that can go round several times (E-FedISCA 5.6): clients train again from the global student."""

    @property
    def rounds(self) -> int:
        """How often networks travel."""
        return self.config.shots

    @property
    def leaves(self) -> str:
        """What leaves the hospital, in words."""
        times = f", {self.rounds} times" if self.rounds > 1 else ""
        return super().leaves.replace("; the server", f"{times}; the server")

    @property
    def refuses_mixed_models(self) -> str:
        """With one shot nothing; with several the student's weights must fit into every client."""
        return "the student of one shot is where every client's next training starts" if self.rounds > 1 else ""

    @property
    def extra_keys(self) -> frozenset[str]:
        """The number of the shot."""
        return frozenset({"shot"} if self.rounds > 1 else ())

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """The network, trained by the run's recipe: at first from its initialisation, then from the last student."""
        if self.rounds == 1:
            return super().upload(client, ctx)
        if previous is None:
            return replace(super().upload(client, ctx), extra={"shot": 1})
        shot = _number(previous.info) + 1
        state = ctx.retrain(client, previous.tensors, visit=f"shot-{shot}", epochs=self.config.epochs_shot)
        counts = client.class_counts(len(ctx.task.classes)) if self._weighted else None
        return Upload(client.name, ctx.task_of(client), state, class_counts=counts, extra={"shot": shot})

    def at_shot(self, uploads: Sequence[Upload], ctx: Context) -> tuple[int, Context]:
        """The number of this shot, from 1, and a context whose random streams and checkpoints are its own."""
        found = sorted({_number(upload.extra) for upload in uploads})
        if len(found) > 1 or not 1 <= found[0] <= self.rounds:
            numbers = " and ".join(map(str, found))
            raise MethodError("wrong_shot", f"{self.name} with shots={self.rounds} got uploads of shot {numbers}")
        shot = found[0]
        if shot > 1:  # all replies of the shot before are out: only its student may still be asked for
            for name in ("synthesis", "distillation"):
                ctx.at_shot(shot - 1).drop_stage(name)
        if shot > 2:
            ctx.at_shot(shot - 2).drop_stage("student")
        return shot, ctx.at_shot(shot)

    def first_student(self, shot: int, ctx: Context) -> Student:
        """A new student, or the last shot's where that is trained further; its momentum is always new."""
        student = new_student(ctx, 0, self.config.distillation_steps)
        if shot > 1 and self.config.student_start == "last":
            last = ctx.at_shot(shot - 1).load_stage("student")
            if last is None:
                hint = "fuse all shots with one store, or set student_start=fresh"
                raise MethodError("no_student", f"{self.name}: no student of shot {shot - 1} in the store; {hint}")
            student.load({**student.tensors(), **last[0]})
        return student

    def reply(self, student: Student, shot: int, ctx: Context) -> Reply:
        """The student for everyone, kept here too if a later shot goes on from it."""
        info: dict[str, Any] = {"architecture": ctx.task.model}
        if self.rounds > 1:
            info["shot"] = shot
        if shot < self.rounds and self.config.student_start == "last":
            ctx.save_stage("student", student.state(), {})
        return Reply(student.state(), info)


def _number(told: Mapping[str, Any]) -> int:
    """The shot that an upload or a reply belongs to; a one-shot one does not say."""
    shot = told.get("shot", 1)
    if type(shot) is not int:
        raise MethodError("wrong_shot", f"{str(shot)[:40]!r} is no number of a shot")
    return shot
