"""A first look at what an upload does, before anything is begun: its answers to a few images of noise."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedbicross import models
from fedbicross.bundle import validate
from fedbicross.errors import UploadError
from fedbicross.steps.noise import pink

if TYPE_CHECKING:
    from fedbicross.messages import Upload

COUNT = 16  # probes
MOST = 1e6  # magnitude of an answer; trained networks stay below 1e3


@lru_cache(maxsize=8)
def images(channels: int, size: int, count: int = COUNT) -> Tensor:
    """Probes [count,C,H,W] in [-1,1]: one half white noise, one half pink; the same for everybody, always."""
    rng = torch.Generator().manual_seed(0)
    white = 2 * torch.rand((count // 2, channels, size, size), generator=rng) - 1
    return torch.cat([white, pink((count - count // 2, channels, size, size), rng)])


def network_of(upload: Upload) -> dict[str, Tensor] | None:
    """The whole network in an upload, without what may stand beside it; None where it holds no whole network."""
    task = upload.task
    if not upload.tensors:
        return None
    names = validate.model_tensors(task.model, task.channels, len(task.classes), task.image_size)
    found = {name: upload.tensors[name] for name in names if name in upload.tensors}
    return found if len(found) == len(names) else None


@torch.no_grad()
def answers(upload: Upload, count: int = COUNT) -> Tensor | None:
    """Logits [count,C] of the upload's network, on the CPU in float32; None where it has none."""
    network, task = _built(upload), upload.task
    return None if network is None else _asked(network, images(task.channels, task.image_size, count))


@torch.no_grad()
def answers_by_batch(upload: Upload, count: int) -> Tensor | None:
    """The same to pink noise alone, with batch-normalisation layers that go by this batch, not by stored statistics.

    So features are as large as they were in training, and answers to noise are about what was learnt. With the stored
    statistics they are mostly about how far noise is from any image.
    """
    network, task = _built(upload), upload.task
    if network is None:
        return None
    for module in network.modules():
        module.train(isinstance(module, nn.modules.batchnorm._BatchNorm))
    return _asked(network, _pink(task.channels, task.image_size, count))


@lru_cache(maxsize=8)
def _pink(channels: int, size: int, count: int) -> Tensor:
    return pink((count, channels, size, size), torch.Generator().manual_seed(0))


def _built(upload: Upload) -> nn.Module | None:
    state, task = network_of(upload), upload.task
    if state is None:
        return None
    network = models.build(task.model, task.channels, len(task.classes), task.image_size)
    network.load_state_dict(state)
    return network.eval()


def _asked(network: nn.Module, probes: Tensor) -> Tensor:
    found: Tensor = network(probes.to(next(network.parameters()).dtype))
    return found.float()


def check(upload: Upload) -> None:
    """Refuse an upload whose network cannot answer: weights that are each plausible can overflow together."""
    found = answers(upload)
    if found is not None:
        check_answers(upload.client, found)


def check_answers(client: str, *answers: Tensor) -> None:
    """Finite, and not absurdly large."""
    highest = float(torch.cat([answer.flatten() for answer in answers]).abs().max())  # NaN wins over every number
    if not highest <= MOST:
        raise UploadError("answers", f"{client[:64]!r} sent weights whose answers to noise reach {highest:g}: no use")
