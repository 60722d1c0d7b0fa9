"""Centralised head: one classifier on the frozen features of everybody's images. An upper bound, not a federation."""

from __future__ import annotations

from collections.abc import Sequence

from fedbicross.context import Context
from fedbicross.errors import MethodError
from fedbicross.exchange import Client, Reply, Upload
from fedbicross.methods.local_head import LocalHead


class CentralisedHead(LocalHead):
    """``simulate`` hands ``personalize`` one imaginary client that holds all images; no server is involved."""

    name = "centralised_head"
    summary = "upper bound for methods on features: one classifier on the pooled features, not federated"
    role = "upper_bound"
    pools_data = True

    @property
    def leaves(self) -> str:
        """What leaves the hospital."""
        return "Every image and label: not federated, shown only as an upper bound."

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """Refused: pooling images is what a federation exists to avoid."""
        raise MethodError("not_federated", "centralised_head pools the images and exists only inside a simulation")

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Refused, as above."""
        raise MethodError("not_federated", "centralised_head pools the images and exists only inside a simulation")
