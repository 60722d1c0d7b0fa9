"""What FedISCA and E-FedISCA have in common: networks leave, one student comes back, perhaps several times."""

from __future__ import annotations

from typing import TypeVar

from fedbicross import parts
from fedbicross.context import Context
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method
from fedbicross.parts.settings import ShotsConfig

ConfigT = TypeVar("ConfigT", bound=ShotsConfig)


class ShotsMethod(Method[ConfigT]):
    """One global student for everyone; with several shots, clients train again from the last one. Lacks ``fuse``."""

    @property
    def needs(self) -> frozenset[str]:
        """Weights with batch-normalisation statistics, and class counts where the teacher needs them."""
        return self.config.needs

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital."""
        return self.config.upload_summary(self.rounds)

    @property
    def rounds(self) -> int:
        """How often networks travel."""
        return self.config.shots

    @property
    def extra_keys(self) -> frozenset[str]:
        """The number of the shot."""
        return frozenset({"shot"} if self.rounds > 1 else ())

    @property
    def mixed_models_error(self) -> str | None:
        """With one shot nothing; with several the student's weights must fit into every client."""
        return "the student of one shot is where every client's next training starts" if self.rounds > 1 else None

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """The trained network; from the second shot on, trained again from the last student."""
        return parts.shots.upload(self.config, client, ctx, previous)

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The global student as it is."""
        return parts.students.global_student(reply, ctx)
