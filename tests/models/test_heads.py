"""Heads on token sequences against loops."""

from __future__ import annotations

import math

import pytest
import torch

from fedbicross import models
from fedbicross.errors import ConfigError, UploadError
from fedbicross.models import heads
from small import refuses


def filled(name: str, dim: int = 6, classes: int = 3, hidden: int = 0, dropout: float = 0.0) -> torch.nn.Module:
    head = heads.build(name, dim, classes, hidden, dropout)
    models.initialise(head, torch.Generator().manual_seed(1))
    return head.eval()


def slow_pool(tokens: list[list[float]], query: list[float], wk: torch.Tensor, wv: torch.Tensor) -> list[float]:
    """Eqs. 6-8 with plain numbers: K = sW_k, V = sW_v, α = softmax(qKᵀ/√d), αV."""
    dim = len(query)
    keys = [[sum(s[i] * float(wk[i, j]) for i in range(dim)) for j in range(dim)] for s in tokens]
    values = [[sum(s[i] * float(wv[i, j]) for i in range(dim)) for j in range(dim)] for s in tokens]
    scores = [math.exp(sum(q * k for q, k in zip(query, key, strict=True)) / math.sqrt(dim)) for key in keys]
    attention = [score / sum(scores) for score in scores]
    return [sum(a * value[j] for a, value in zip(attention, values, strict=True)) for j in range(dim)]


@pytest.mark.usefixtures("float64")
def test_attention_pooling_against_loops() -> None:
    rng = torch.Generator().manual_seed(0)
    tokens, query = torch.randn(4, 5, 6, generator=rng), torch.randn(6, generator=rng)
    wk, wv = torch.randn(6, 6, generator=rng), torch.randn(6, 6, generator=rng)
    pooled = heads.attention_pool(tokens, query, wk, wv)
    for row, sequence in zip(pooled, tokens, strict=True):
        expected = torch.tensor(slow_pool(sequence.tolist(), query.tolist(), wk, wv))
        torch.testing.assert_close(row, expected)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["attention", "attention_residual"])
@pytest.mark.parametrize("hidden", [0, 7])
def test_attention_head_is_pooling_then_the_classification_head(name: str, hidden: int) -> None:
    head = filled(name, hidden=hidden)
    state = head.state_dict()
    tokens = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(2))
    for sequence, logits in zip(tokens, head(tokens), strict=True):
        query = state["query.vector"]
        pooled = slow_pool(sequence.tolist(), query.tolist(), state["key.weight"].T, state["value.weight"].T)
        summary = torch.tensor(pooled) + (query if name == "attention_residual" else 0)
        if hidden:
            inner = torch.relu(state["expand.weight"] @ summary + state["expand.bias"])
            summary = state["contract.weight"] @ inner + state["contract.bias"]
        expected = state["head.weight"] @ summary + state["head.bias"]
        torch.testing.assert_close(logits, expected)


@pytest.mark.usefixtures("float64")
def test_attention_does_not_care_for_the_order_of_tokens_and_linear_takes_the_first() -> None:
    tokens = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))
    attention, linear = filled("attention"), filled("linear")
    torch.testing.assert_close(attention(tokens), attention(tokens.flip(1)))
    expected = tokens[:, 0] @ linear.head.weight.T + linear.head.bias
    torch.testing.assert_close(linear(tokens), expected)
    assert not torch.allclose(linear(tokens), linear(tokens.flip(1)))


def test_the_papers_classifier_has_the_papers_size() -> None:
    """166.86 - 144.33 = 22.53 MB of 32-bit numbers for 768 features (section 3.6), whatever a megabyte is there."""
    count = sum(math.prod(shape) for shape in heads.shapes("attention", 768, 7, 4 * 768).values())
    assert abs(4 * count / 2**20 / 22.53 - 1) < 0.02


def test_a_head_is_rebuilt_from_its_tensors_alone() -> None:
    for name, hidden in (("linear", 0), ("attention", 0), ("attention", 9), ("attention_residual", 9)):
        head = filled(name, hidden=hidden)
        again = heads.load(name, head.state_dict(), 3)
        tokens = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(4))
        assert torch.equal(head(tokens), again(tokens)) and not again.training


def test_initialisation_is_by_the_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = filled("attention", hidden=5).state_dict(), filled("attention", hidden=5).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(value.abs().sum() > 0 for value in first.values())
    assert torch.equal(before, torch.get_rng_state())


def test_named_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        heads.build("atention", 4, 2)
    state = filled("attention", hidden=5).state_dict()
    for broken in (
        {},
        {**state, "extra": torch.zeros(1)},
        {k: v for k, v in state.items() if k != "key.weight"},
        {**state, "head.weight": torch.zeros(3)},
        {**state, "head.weight": torch.zeros(4, 6)},
        {**state, "expand.weight": torch.zeros(5)},
        {**state, "value.weight": torch.zeros(6, 7)},
    ):
        with pytest.raises(UploadError, match="these tensors are no"):
            heads.load("attention", broken, 3)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["clipped", "projected"])
def test_clipped_heads_shorten_the_mean_of_all_tokens(name: str) -> None:
    rng = torch.Generator().manual_seed(5)
    inputs = 6 if name == "clipped" else 9
    state = {"head.weight": torch.randn(3, 6, generator=rng), "head.bias": torch.randn(3, generator=rng)}
    state["longest"] = torch.tensor(1.5)
    matrix = torch.eye(6) if name == "clipped" else torch.randn(6, 9, generator=rng)
    state |= {} if name == "clipped" else {"project.weight": matrix}
    head = heads.load(name, state, 3)
    tokens = torch.randn(4, 2, inputs, generator=rng) * torch.tensor([0.01, 1.0, 3.0, 0.0])[:, None, None]
    for sequence, logits in zip(tokens, head(tokens), strict=True):
        mean = matrix @ sequence.mean(0)
        length = float(mean.norm())
        short = mean * (1.5 / length) if length > 1.5 else mean
        torch.testing.assert_close(logits, state["head.weight"] @ short + state["head.bias"])
    for broken in (
        {**state, "longest": torch.tensor(0.0)},
        {**state, "longest": torch.tensor(-1.0)},
        {**state, "longest": torch.tensor(float("nan"))},
        {**state, "longest": torch.ones(2)},
        {**state, "project.weight": torch.ones(5, 9)},
        {key: value for key, value in state.items() if key != "longest"},
    ):
        with refuses(UploadError, "head_tensors"):
            heads.load(name, broken, 3)
