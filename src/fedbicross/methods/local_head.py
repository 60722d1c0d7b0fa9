"""Local head: a classifier on frozen features, trained alone. The bar for every method on features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from fedbicross.context import Context
from fedbicross.exchange import Client, Predictor, Reply, Upload
from fedbicross.methods.features import FeatureMethod, HeadConfig


class LocalHead(FeatureMethod[HeadConfig]):
    """Each hospital keeps the classifier that it trained on the features of its own images."""

    name = "local_head"
    summary = "each client's own classifier on frozen features, no federation (the bar for methods on features)"
    role: ClassVar[Literal["method", "baseline", "upper_bound"]] = "baseline"
    Config = HeadConfig
    quick = {"encoder": "tiny", "batch": 64, "epochs_classifier": 30, "lr_classifier": 1e-3}

    @property
    def extra_keys(self) -> frozenset[str]:
        """Nothing leaves."""
        return frozenset()

    @property
    def leaves(self) -> str:
        """What leaves the hospital."""
        return "Nothing."

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """Nothing leaves."""
        return Upload(client.name, ctx.task_of(client))

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Nothing comes back."""
        return [Reply() for _ in uploads]

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The client's own classifier: the very one that FALCON sends."""
        config = self.config
        state = config.local_classifier(client, config.tokens(client, ctx), ctx)
        return Predictor(ctx.task, (config.head,), (state,), encoder=config.description(ctx))
