"""What is trained on top of a frozen encoder: heads from token sequences [n, tokens, dim] to logits [n, classes].

A head's sizes can be read off its tensors, so that a name and a state are all that must travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedbicross.errors import ConfigError, UploadError, nearest

HEADS = {
    "linear": "one linear layer on the token of the whole image",
    "clipped": "one linear layer on the mean of all tokens, shortened to a longest norm",
    "projected": "the same after a linear layer to fewer features",
    "attention": "attention pooling over all tokens, then a small network (FALCON Eqs. 6-9)",
    "attention_residual": "the same with the query added to the pooled token (FALCON's released code)",
}


class LinearHead(nn.Module):
    """One linear layer on the first token, which is that of the whole image."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [n, T, dim] to logits [n, classes]."""
        logits: Tensor = self.head(tokens[:, 0])
        return logits


class ClippedHead(nn.Module):
    """One linear layer on the mean of all tokens, perhaps projected, shortened to a longest norm as for the fit."""

    longest: Tensor

    def __init__(self, dim: int, classes: int, inputs: int = 0) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, dim, bias=False) if inputs else nn.Identity()
        self.head = nn.Linear(dim, classes)
        self.register_buffer("longest", torch.empty(()))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [n, T, dim] to logits [n, classes]."""
        mean = self.project(tokens.mean(1))
        norms = torch.linalg.vector_norm(mean, dim=1, keepdim=True)
        logits: Tensor = self.head(mean * (self.longest / torch.maximum(norms, self.longest)))
        return logits


class AttentionHead(nn.Module):
    """A learnable query gathers the tokens (Eqs. 6-8); a head of one hidden layer classifies the summary (Eq. 9)."""

    def __init__(self, dim: int, classes: int, hidden: int = 0, dropout: float = 0.0, residual: bool = False) -> None:
        super().__init__()
        self.residual = residual
        self.query = Query(dim)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.expand = nn.Linear(dim, hidden) if hidden else None
        self.contract = nn.Linear(hidden, dim) if hidden else None
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, classes)

    def pool(self, tokens: Tensor) -> Tensor:
        """Eqs. 6-8: the semantic summary [n, dim] of tokens [n, T, dim]."""
        return attention_pool(tokens, self.query.vector, self.key.weight.T, self.value.weight.T)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [n, T, dim] to logits [n, classes]."""
        summary = self.pool(tokens)
        if self.residual:
            summary = summary + self.query.vector
        if self.expand is not None and self.contract is not None:
            summary = self.contract(self.dropout(torch.relu(self.expand(summary))))
        logits: Tensor = self.head(self.dropout(summary))
        return logits


class Query(nn.Module):
    """The learnable vector q."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(dim))

    def fill(self, generator: torch.Generator) -> None:
        """N(0, 1/dim), so that attention starts near uniform."""
        self.vector.copy_(torch.randn(self.vector.shape, generator=generator) / math.sqrt(len(self.vector)))


def attention_pool(tokens: Tensor, query: Tensor, to_keys: Tensor, to_values: Tensor) -> Tensor:
    """Eq. 6: K = s·W_k, V = s·W_v. Eq. 7: α = softmax(q·Kᵀ/√d). Eq. 8: s_sem = α·V. Tokens [n, T, d]."""
    scores = tokens @ (to_keys @ query) / math.sqrt(len(query))
    attention = torch.softmax(scores, dim=-1)
    return torch.einsum("nt,ntd->nd", attention, tokens) @ to_values


def build(name: str, dim: int, classes: int, hidden: int = 0, dropout: float = 0.0) -> nn.Module:
    """A head with placeholder weights; call ``models.initialise`` or load weights next."""
    return _skeleton(name, dim, classes, hidden, dropout).to_empty(device="cpu")


def _skeleton(name: str, dim: int, classes: int, hidden: int, dropout: float = 0.0) -> nn.Module:
    if name not in HEADS:
        raise ConfigError("unknown_head", f"unknown head {name!r}{nearest(name, HEADS)}")
    with torch.device("meta"):  # no memory, and no numbers from the global random state
        if name == "linear":
            return LinearHead(dim, classes)
        if name == "clipped":
            return ClippedHead(dim, classes)
        if name == "projected":
            return ClippedHead(dim, classes, hidden)
        return AttentionHead(dim, classes, hidden, dropout, name == "attention_residual")


def shapes(name: str, dim: int, classes: int, hidden: int = 0) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a head; what a server checks an upload against."""
    return shapes_of(_skeleton(name, dim, classes, hidden))


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a module."""
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


def load(name: str, state: Mapping[str, Tensor], classes: int) -> nn.Module:
    """A head in evaluation mode with the given weights; its sizes are read off them."""
    weight = state.get("head.weight")
    expand, project = state.get("expand.weight"), state.get("project.weight")
    if weight is None or any(value is not None and value.ndim != 2 for value in (weight, expand, project)):
        raise UploadError("head_tensors", f"these tensors are no {name!r} head")
    hidden = 0 if expand is None else expand.shape[0]
    head = _skeleton(name, weight.shape[1], classes, hidden if project is None else project.shape[1])
    if shapes_of(head) != {key: tuple(value.shape) for key, value in state.items()}:
        raise UploadError("head_tensors", f"these tensors are no {name!r} head for {classes} classes")
    if "longest" in state and not 0 < float(state["longest"]) < math.inf:
        raise UploadError("head_tensors", "the longest norm of a feature must be a positive number")
    head.load_state_dict(dict(state), assign=True)
    return head.eval()
