"""How far clients agree: the diagnosis behind FedBiCross (disagreeing teachers give flat soft labels)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedbicross.steps.clustering.partition import Clustering


def soft_label_entropy(probabilities: Tensor) -> Tensor:
    """Mean entropy of soft labels [..., C] divided by log C: 0 for certain, 1 for uniform labels."""
    classes = probabilities.shape[-1]
    entropy: Tensor = torch.special.entr(probabilities).sum(-1).mean()
    return entropy / math.log(max(classes, 2))


def pairwise_kl(probabilities: Tensor) -> Tensor:
    """[N,N] of KL(p_i ‖ p_j), mean over the batch, from the clients' probabilities [N,B,C]."""
    # A probability that underflowed to 0 must not make the divergence infinite.
    log = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
    self_term = (probabilities * log).sum((1, 2))
    cross = torch.einsum("ibc,jbc->ij", probabilities, log)
    return (self_term.unsqueeze(1) - cross) / probabilities.shape[1]


class ClusterAgreement(NamedTuple):
    """Mean pairwise KL of clients in one cluster and of clients in different ones; NaN where there is no pair."""

    within: Tensor
    between: Tensor


def cluster_agreement(probabilities: Tensor, clustering: Clustering) -> ClusterAgreement:
    """Mean KL over ordered pairs of different clients, within and between clusters, from probabilities [N,B,C]."""
    divergence = pairwise_kl(probabilities)
    labels = torch.tensor(clustering.labels, device=probabilities.device)
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    others = ~torch.eye(len(labels), dtype=torch.bool, device=probabilities.device)
    return ClusterAgreement(divergence[same & others].mean(), divergence[~same].mean())
