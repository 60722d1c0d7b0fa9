"""A site's model as one ONNX graph, for programs without torch."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedbicross.engine.combine import combine_logits, refer
from fedbicross.engine.predict import load_model

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.messages import Predictor


class Whole(nn.Module):
    """Values 0..255 in, probabilities out: what ``Predictor.probabilities`` does, as one module."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        task = predictor.task
        shape = (task.channels, len(task.classes), task.image_size)
        self.networks = nn.ModuleList(
            load_model(architecture, state, *shape)
            for architecture, state in zip(predictor.architectures, predictor.states, strict=True)
        )
        self.combine = predictor.combine
        self.weights, self.log_prior, self.referral = predictor.class_weights, predictor.log_prior, predictor.referral

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [n, H, W, C] to [n, classes]."""
        inputs = images.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        logits = torch.stack([network(inputs) for network in self.networks]).float()
        answer = combine_logits(logits, self.combine, 1.0, self.weights, self.log_prior)
        return answer if self.referral is None else refer(answer, logits[-1], self.referral)


def export(predictor: Predictor) -> bytes:
    """The bytes of a ``.onnx`` file."""
    task = predictor.task
    example = torch.zeros(2, task.image_size, task.image_size, task.channels, dtype=torch.uint8)
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the exporter's own insides
            program = torch.onnx.export(
                Whole(predictor).eval(),
                (example,),
                dynamo=True,
                input_names=["images"],
                output_names=["probabilities"],
                dynamic_shapes={"images": {0: torch.export.Dim("n")}},
                external_data=False,
                verbose=False,
            )
    finally:
        log.setLevel(level)
    assert program is not None
    return bytes(program.model_proto.SerializeToString())
