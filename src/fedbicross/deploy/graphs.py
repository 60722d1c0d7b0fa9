"""A model as one graph, preparation of values and combination included: uint8 [n, H, W, C] to probabilities [n, C].

ONNX is for programs without torch, ``.pt2`` for torch without fedbicross (``torch.export.load(file).module()``).
"""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedbicross.engine.combine import combine_logits, refer, temper
from fedbicross.engine.predict import load_model
from fedbicross.errors import ConfigError, MethodError

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.messages import Predictor


class Whole(nn.Module):
    """Values 0..255 in, probabilities out: what ``Predictor.probabilities`` does, as one module."""

    class_weights: Tensor | None
    log_prior: Tensor | None
    referral: Tensor | None

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        task = predictor.task
        shape = (task.channels, len(task.classes), task.image_size)
        self.networks = nn.ModuleList(
            load_model(architecture, state, *shape)
            for architecture, state in zip(predictor.architectures, predictor.states, strict=True)
        )
        self.combine, self.temperature = predictor.combine, predictor.temperature
        for name in ("class_weights", "log_prior", "referral"):
            self.register_buffer(name, getattr(predictor, name))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [n, H, W, C] to [n, classes]."""
        inputs = images.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        logits = torch.stack([network(inputs) for network in self.networks]).float()
        answer = combine_logits(logits, self.combine, 1.0, self.class_weights, self.log_prior)
        answer = answer if self.referral is None else refer(answer, logits[-1], self.referral)
        return temper(answer, self.temperature)


def as_onnx(predictor: Predictor) -> bytes:
    """The bytes of a ``.onnx`` file."""
    require_onnx()
    example, shapes = _example(predictor)
    with _quiet():
        program = torch.onnx.export(
            Whole(predictor).eval(),
            (example,),
            dynamo=True,
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
        )
    assert program is not None
    return bytes(program.model_proto.SerializeToString())


def as_torch(predictor: Predictor) -> bytes:
    """The bytes of a ``.pt2`` file."""
    example, shapes = _example(predictor)
    stream = io.BytesIO()
    with _quiet(), torch.no_grad():
        torch.export.save(torch.export.export(Whole(predictor).eval(), (example,), dynamic_shapes=shapes), stream)
    return stream.getvalue()


def require_onnx() -> None:
    """Refuse early where the packages of the extra are missing."""
    if not all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript")):
        raise ConfigError("no_onnx", "ONNX export needs two more packages: pip install 'fedbicross[onnx]'")


def _example(predictor: Predictor) -> tuple[Tensor, dict[str, dict[int, torch.export.Dim]]]:
    """An input to follow through the model, and which of its sides may differ."""
    if predictor.constant is not None:
        raise MethodError("no_network", "a constant answer has no network to export")
    if predictor.encoder is not None:
        raise MethodError("no_graph", "a head on a frozen encoder cannot be exported as one graph; use the safetensors")
    task = predictor.task
    example = torch.zeros(2, task.image_size, task.image_size, task.channels, dtype=torch.uint8)
    return example, {"images": {0: torch.export.Dim("n")}}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's warnings and log, which are about its own insides."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
