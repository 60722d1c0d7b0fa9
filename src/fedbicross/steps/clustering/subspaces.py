"""PACFL: clients compared by the angles between subspaces of their data (rival in FedBiCross's Fig. 2).

Unlike everything else here it needs something computed from the images, and so a second thing to upload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedbicross.steps.clustering.linkage import agglomerate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedbicross.steps.clustering.partition import Clustering, Matrix


def subspace_signature(images: Tensor, labels: Tensor, p: int = 3) -> Tensor:
    """At the client: the top p left singular vectors of each class's flattened images, stacked as columns [D, ≤ p·C].

    A class with fewer than p images gives as many vectors as it has images. Signs are fixed (largest entry positive),
    so that the same data gives the same file.
    """
    blocks = []
    for label in torch.unique(labels):
        data = images[labels == label].flatten(1).T
        data = data if data.dtype == torch.float64 else data.float()
        left = torch.linalg.svd(data, full_matrices=False).U[:, :p]
        peak = left.gather(0, left.abs().argmax(0, keepdim=True))
        blocks.append(left * torch.where(peak < 0, -1.0, 1.0))
    return torch.cat(blocks, dim=1)


def principal_angles(signatures: Sequence[Tensor]) -> Matrix:
    """The smallest principal angle between the spans of two signatures, in degrees [N,N].

    It is the arccos of the largest singular value of Q_iᵀ Q_j. The authors' code takes the smallest angle between any
    two columns, which is never smaller.
    """
    bases = [_basis(signature.double()) for signature in signatures]
    angles = np.zeros((len(bases), len(bases)))
    for i in range(len(bases)):
        for j in range(i):
            nearest = torch.linalg.matrix_norm(bases[i].T @ bases[j], 2)
            angles[i, j] = angles[j, i] = torch.rad2deg(torch.arccos(nearest.clamp(-1, 1))).item()
    return angles


def pacfl(signatures: Sequence[Tensor], k: int) -> Clustering:
    """Average linkage on the angles to K clusters."""
    return agglomerate(principal_angles(signatures), k)


def _basis(signature: Tensor) -> Tensor:
    # Classes may share directions. A QR of dependent columns would add directions that are not in the span.
    left, strength, _ = torch.linalg.svd(signature, full_matrices=False)
    basis: Tensor = left[:, strength > 1e-6 * strength[0]]
    return basis
