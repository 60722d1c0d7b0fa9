from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from fedbicross.errors import MethodError
from fedbicross.steps import sufficient_statistics as ss
from fedbicross.steps.sufficient_statistics import (
    Statistics,
    add,
    covariance,
    gaussian_head,
    pack_triangle,
    statistics,
    unpack_triangle,
)
from small import refuses


def data(n: int = 120, width: int = 5, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=rng)
    centres = 2 * torch.randn(classes, width, generator=rng)
    mixing = torch.randn(width, width, generator=rng)
    return (centres[labels] + torch.randn(n, width, generator=rng) @ mixing).float(), labels


def head(x: torch.Tensor, y: torch.Tensor, classes: int = 3, kind: str = "total", ridge: float = 0.0, **options: str):
    return gaussian_head(statistics(x, y, classes), kind=kind, ridge=ridge, prior=options.get("prior", "counts"))


def probabilities(found, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.double() @ found.weight.T + found.bias, 1)


def test_sums_against_loops() -> None:
    x, y = data(20)
    found = statistics(x, y, 3)
    for c in range(3):
        rows = [x[i].double() for i in range(len(x)) if int(y[i]) == c]
        assert int(found.counts[c]) == len(rows)
        assert torch.allclose(found.class_sums[c], sum(rows), atol=1e-12)
    gram = sum(torch.outer(f.double(), f.double()) for f in x)
    assert torch.allclose(found.gram, gram, atol=1e-10)
    assert torch.equal(unpack_triangle(pack_triangle(found.gram), 5), found.gram)


@settings(max_examples=40)
@given(owners=st.lists(st.integers(0, 6), min_size=120, max_size=120))
def test_any_partition_gives_the_centralised_classifier(owners: list[int]) -> None:
    x, y = data()
    owner = torch.tensor(owners)
    parts = [statistics(x[owner == i], y[owner == i], 3) for i in range(7)]  # some hold nothing at all
    split = gaussian_head(add(parts), kind="total", ridge=1e-4, prior="counts")
    whole = head(x, y, ridge=1e-4)
    assert float((split.weight - whole.weight).abs().max()) < 1e-10
    assert float((split.bias - whole.bias).abs().max()) < 1e-10


def test_fewer_images_of_the_same_kind(float64: None) -> None:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(24, 3))), torch.tensor([0] * 16 + [1] * 7 + [3])
    once = ss.statistics(x, y, 4)
    many = ss.statistics(x.repeat(8, 1), y.repeat(8), 4)
    again = ss.scaled(many, once.counts, 1 / 8)
    for name in ("counts", "class_sums", "gram"):
        assert torch.allclose(getattr(again, name), getattr(once, name), rtol=1e-12, atol=1e-12)
    few = torch.tensor([2.0, 1, 0, 1])  # a tenth, but of no class none
    tenth = ss.scaled(once, few, 0.1)
    present = once.counts > 0
    means, before = (part.class_sums[present] / part.counts[present][:, None] for part in (tenth, once))
    assert torch.allclose(means, before, rtol=1e-12)
    assert torch.allclose(ss.scatter_within(tenth), 0.1 * ss.scatter_within(once), atol=1e-12)


@pytest.mark.parametrize("kind", ["total", "within"])
def test_covariance_is_numpys(kind: str) -> None:
    x, y = data()
    values = x.double().numpy()
    if kind == "total":
        expected = np.cov(values.T)
    else:
        centred = values - np.stack([values[y == c].mean(0) for c in range(3)])[y]
        expected = centred.T @ centred / (len(values) - 3)
    assert np.allclose(covariance(statistics(x, y, 3), kind).numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("kind", ["total", "within"])
@pytest.mark.parametrize("prior", ["counts", "uniform"])
def test_classifier_is_bayes_rule_on_gaussian_densities(kind: str, prior: str) -> None:
    x, y = data()
    found = probabilities(head(x, y, kind=kind, prior=prior), x[:10])
    sigma = covariance(statistics(x, y, 3), kind)
    inverse = torch.linalg.inv(sigma)
    for row, answer in zip(x[:10].double(), found, strict=True):
        scores = []
        for c in range(3):
            gap = row - x[y == c].double().mean(0)
            share = float((y == c).double().mean()) if prior == "counts" else 1 / 3
            scores.append(share * float(torch.exp(-0.5 * gap @ inverse @ gap)))
        assert np.allclose(answer.numpy(), np.array(scores) / sum(scores), atol=1e-9)


def test_within_class_covariance_is_linear_discriminant_analysis() -> None:
    x, y = data(400)
    reference = LinearDiscriminantAnalysis(solver="lsqr").fit(x.double().numpy(), y.numpy())  # divisor N there
    found = probabilities(head(x, y, kind="within"), x).numpy()
    assert np.abs(found - reference.predict_proba(x.double().numpy())).max() < 0.02
    assert (found.argmax(1) == reference.predict(x.double().numpy())).mean() > 0.99


def test_a_class_that_nobody_has_is_never_predicted() -> None:
    x, y = data(classes=3)
    answers = probabilities(head(x, y, classes=5, ridge=1e-6), x)
    assert bool(torch.isfinite(answers).all())
    assert float(answers[:, 3:].abs().max()) == 0
    assert torch.allclose(answers[:, :3], probabilities(head(x, y, ridge=1e-6), x), atol=1e-12)


def test_fewer_images_than_features_needs_a_ridge() -> None:
    x, y = data(n=6, width=12)
    with refuses(MethodError, "singular", "larger ridge"):
        head(x, y)
    assert bool(torch.isfinite(head(x, y, ridge=1e-3).weight).all())


def test_sums_beyond_what_a_number_can_hold_are_named() -> None:
    x, y = data()
    found = statistics(x, y, 3)
    huge = Statistics(found.counts, found.class_sums * 1e160, found.gram * 1e307)
    with pytest.raises(MethodError) as error:
        gaussian_head(huge, kind="total", ridge=1e-3, prior="counts")
    assert error.value.code in ("overflow", "singular")


def test_identical_features_give_the_prior() -> None:
    y = torch.tensor([0, 0, 0, 1])
    answers = probabilities(head(torch.full((4, 3), 0.5), y, classes=2, ridge=1e-3), torch.full((1, 3), 0.5))
    assert torch.allclose(answers, torch.tensor([[0.75, 0.25]], dtype=torch.float64))


def test_one_image_is_enough() -> None:
    answers = probabilities(head(torch.ones(1, 3), torch.tensor([1]), classes=2, ridge=1e-3), torch.zeros(2, 3))
    assert torch.equal(answers.argmax(1), torch.tensor([1, 1]))


# --- ridge regression, and heads from noisy sums ----------------------------------------------------------------------


def overlapping(count: int = 400, width: int = 7, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    y = torch.randint(classes, (count,), generator=rng)
    y[: count // 3] = 0  # one class more frequent
    centres = torch.randn(classes, width, generator=rng, dtype=torch.float64)
    return centres[y] + torch.randn(count, width, generator=rng, dtype=torch.float64) + 3.0, y


def test_ridge_is_that_of_scikit_learn() -> None:
    x, y = overlapping()
    found = ss.ridge_head(ss.statistics(x, y, 4), ridge=0.2)
    labels = np.eye(4)[y.numpy()]
    alpha = 0.2 * float(x.var(0, correction=0).mean()) * len(x)
    model = Ridge(alpha=alpha).fit(x.numpy(), labels)
    variance = np.square(labels - model.predict(x.numpy())).mean()
    assert np.allclose(found.weight.numpy() * variance, model.coef_, rtol=1e-8, atol=1e-10)
    assert np.allclose(found.bias.numpy() * variance, model.intercept_, rtol=1e-8, atol=1e-10)


def test_without_noise_and_ridge_the_noisy_head_is_discriminant_analysis() -> None:
    x, y = overlapping()
    head = ss.noisy_head(ss.statistics(x, y, 4), ridge=0.0, noise=0.0)
    found = torch.softmax(x @ head.weight.T + head.bias, 1).numpy()
    expected = LinearDiscriminantAnalysis(solver="lsqr").fit(x.numpy(), y.numpy()).predict_proba(x.numpy())
    assert np.abs(found - expected).max() < 1e-6


def test_a_large_penalty_does_not_give_everything_to_the_larger_class() -> None:
    x, y = overlapping(classes=2)
    found = ss.statistics(x, y, 2)
    ridge, noisy = ss.ridge_head(found, ridge=1000.0), ss.noisy_head(found, ridge=0.0, noise=1e9)
    said = [(x @ head.weight.T + head.bias).argmax(1) for head in (ridge, noisy)]
    assert len(said[0].unique()) == 1, "what shrinks so much says the same of all"
    assert float((said[1] == y).double().mean()) > float((y == 0).double().mean())


def test_a_noisy_head_without_a_class_or_a_spread() -> None:
    x, y = overlapping(classes=2)
    head = ss.noisy_head(ss.statistics(x, y, 3), ridge=0.1, noise=5.0)
    assert float(head.bias[2]) == ss.ABSENT and float(head.weight[2].abs().max()) == 0
    alone = ss.noisy_head(ss.statistics(x, torch.zeros_like(y), 3), ridge=0.1, noise=5.0)
    assert torch.isfinite(alone.weight).all() and torch.isfinite(alone.bias).all()
    same = ss.noisy_head(ss.statistics(torch.ones_like(x), y, 2), ridge=0.1, noise=0.0)
    assert torch.isfinite(same.weight).all() and torch.isfinite(same.bias).all()


def test_the_noise_is_hardly_ever_larger_than_said() -> None:
    rng = torch.Generator().manual_seed(0)
    for width in (40, 120):
        drawn = torch.randn(width * (width + 1) // 2, generator=rng, dtype=torch.float64)
        matrix = ss.unpack_triangle(2.5 * drawn * ss.triangle_scales(width), width)
        largest = float(torch.linalg.eigvalsh(matrix).abs().max())
        assert 0.7 < largest / ss.noise_size(2.5, width) < 1.3


def test_lengths_and_signs() -> None:
    x, _ = overlapping()
    short = ss.shortened(x, 2.0)
    slow = torch.stack([row * min(1.0, 2.0 / float(row.norm())) for row in x])
    assert torch.allclose(short, slow, rtol=1e-12)
    assert torch.equal(ss.shortened(x, 1e9), x)
    assert torch.equal(ss.shortened(torch.zeros(2, 3), 1.0), torch.zeros(2, 3, dtype=torch.float64))
    matrix = ss.signs(64, 1000)
    assert torch.equal(matrix, ss.signs(64, 1000)) and set(matrix.unique().tolist()) == {-0.125, 0.125}
    row = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float((matrix @ row).norm() / row.norm()) == pytest.approx(1, abs=0.4)


def test_weights_are_how_often_an_image_counts() -> None:
    x, y = overlapping(30)
    often = torch.arange(30) % 3
    found, slow = (
        ss.statistics(x, y, 4, often),
        ss.statistics(x.repeat_interleave(often, 0), y.repeat_interleave(often), 4),
    )
    for name in ("counts", "class_sums", "gram"):
        assert torch.allclose(getattr(found, name), getattr(slow, name), rtol=1e-12)
