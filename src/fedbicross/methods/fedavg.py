"""FedAvg (McMahan et al., 2017): the server averages the networks, once or over many rounds.

With one round and clients that start from different weights the average is meaningless: that is the FedAvg-1
row of the one-shot papers. Batch-normalisation statistics are averaged like weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedbicross.context import Context
from fedbicross.errors import MethodError, UploadError
from fedbicross.lazy_torch import torch
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method, MethodConfig

if TYPE_CHECKING:
    from torch import Tensor


class FedAvgConfig(MethodConfig):
    """Rounds and weighting."""

    rounds: int = Field(1, ge=1, le=10_000, description="1 is one-shot (FedAvg-1); the papers' upper bound uses 100")
    local_epochs: int = Field(1, ge=1, description="epochs per round when rounds > 1; one round trains in full")
    weighting: Literal["size", "uniform"] = Field("size", description="size: by training images (FedAvg's paper)")


def average(states: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Weighted mean of every tensor, statistics included; integer counters keep their type."""
    share = torch.tensor(weights, dtype=torch.float64)
    share = share / share.sum()
    return {
        name: sum(w * state[name].double() for w, state in zip(share, states, strict=True)).to(first.dtype)
        for name, first in states[0].items()
    }


class FedAvg(Method[FedAvgConfig]):
    """Average, send back, repeat."""

    name = "fedavg"
    summary = "average of the networks' weights, one round or many"
    others_receive = "one_model"
    Config = FedAvgConfig
    variants = {"uniform": {"weighting": "uniform"}, "multi_round": {"rounds": 100}}
    variant_notes = {"uniform": "plain mean of the networks", "multi_round": "100 rounds of one local epoch each"}
    sends_only_the_network = True
    personal = False
    mixed_models_error = "it averages weights, and those of different architectures have no average"

    @property
    def needs(self) -> frozenset[str]:
        """Weights, and training-set sizes unless the mean is plain."""
        return frozenset({"weights", "num_samples"} if self.config.weighting == "size" else {"weights"})

    @property
    def uses_local_models(self) -> bool:
        """One round averages them; many rounds train a little at a time."""
        return self.rounds == 1

    @property
    def rounds(self) -> int:
        """How often networks travel."""
        return self.config.rounds

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital."""
        size = " and its number of training images" if self.config.weighting == "size" else ""
        return f"The trained network{size}" + (f", {self.rounds} times." if self.rounds > 1 else ".")

    @property
    def extra_keys(self) -> frozenset[str]:
        """The number of the round."""
        return frozenset({"round"} if self.rounds > 1 else ())

    def check_upload(self, upload: Upload) -> None:
        """A network, and a number of a round that exists."""
        super().check_upload(upload)
        number = upload.extra.get("round", 1)
        if type(number) is not int or not 1 <= number <= self.rounds:
            raise UploadError("manifest", f"{upload.client!r}: there is no round {str(number)[:32]!r}")

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """The network after local training, from the last average if there is one."""
        size = len(client.labels) if self.config.weighting == "size" else None
        if self.rounds == 1:
            return Upload(client.name, ctx.task_of(client), ctx.local_model(client).state, num_samples=size)
        done = 0 if previous is None else int(previous.info["rounds_done"])
        state = ctx.models.train_further(
            client,
            None if previous is None else previous.tensors,
            epochs=self.config.local_epochs,
            first_epoch=done * self.config.local_epochs,
            total_epochs=self.rounds * self.config.local_epochs,
        )
        return Upload(client.name, ctx.task_of(client), state, num_samples=size, extra={"round": done + 1})

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """One average for everyone."""
        architectures = {upload.task.model for upload in uploads}
        if len(architectures) > 1:
            names = ", ".join(sorted(architectures))
            raise MethodError("mixed_architectures", f"fedavg cannot average different architectures: {names}")
        weights = [float(upload.num_samples or 1) for upload in uploads]
        mean = average([dict(upload.tensors) for upload in uploads], weights)
        reply = Reply(mean, {"rounds_done": int(uploads[0].extra.get("round", 1))})
        return [reply for _ in uploads]

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The average as it is."""
        return Predictor(ctx.task, (ctx.task.model,), (dict(reply.tensors),))
