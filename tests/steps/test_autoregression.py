"""FALCON's generator: who sees whom, the likelihood against a slow one, and samples that follow it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedbicross import models
from fedbicross.steps.autoregression import Scheme, TokenGenerator, TokenMixture, attention_mask, bounded, positions

SCHEMES: tuple[Scheme, ...] = ("mar", "ar", "nar")


def generator(
    scheme: Scheme = "mar", dim: int = 3, length: int = 4, classes: int = 2, seed: int = 0, calibrated: bool = False
) -> TokenGenerator:
    sizes = {"width": 8, "layers": 2, "heads": 2, "hidden": 8, "components": 3}
    with torch.device("meta"):
        model = TokenGenerator(dim, length, classes, scheme=scheme, calibrated=calibrated, **sizes)
    model = model.to_empty(device="cpu")
    models.initialise(model, torch.Generator().manual_seed(seed))
    return model.eval()


# --- masks --------------------------------------------------------------------------------------------


def test_masks_by_hand() -> None:
    assert attention_mask("mar", 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert attention_mask("ar", 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert attention_mask("nar", 3).all()
    assert attention_mask("mar", 1).tolist() == [[True]]


# What the mixture at each position may depend on: the numbers of the tokens, for a sequence of four.
DEPENDS = {
    "mar": [set(), {0}, {0}, {0}],  # Eqs. 2-4: s0 on the class alone, windows on class and s0
    "ar": [set(), {0}, {0, 1}, {0, 1, 2}],
    "nar": [set(), set(), set(), set()],
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_depends_on_whom_by_gradient(scheme: Scheme) -> None:
    model = generator(scheme)
    tokens = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    labels = torch.tensor([1])
    for position, allowed in enumerate(DEPENDS[scheme]):
        mixture = model(tokens, labels)
        total = sum(part[:, position].square().sum() for part in mixture)
        gradient = torch.autograd.grad(total, tokens, allow_unused=True)[0]
        moved = set() if gradient is None else {t for t in range(4) if gradient[0, t].abs().sum() > 0}
        assert moved == allowed, position


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_class_is_a_condition_everywhere(scheme: Scheme) -> None:
    model, tokens = generator(scheme), torch.zeros(2, 4, 3)
    means = model(tokens, torch.tensor([0, 1])).means
    assert ((means[0] - means[1]).abs().flatten(1).sum(1) > 1e-6).all()


def test_positions_are_told_apart() -> None:
    means = generator("mar")(torch.zeros(1, 4, 3), torch.tensor([0])).means[0]
    assert (means[1] - means[2]).abs().sum() > 1e-6
    code = positions(5, 7)
    assert code.shape == (5, 7) and code[0].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert torch.isclose(code[3, 0], torch.sin(torch.tensor(3.0)))
    assert torch.isclose(code[3, 3], torch.cos(torch.tensor(3.0) / 10_000 ** (2 / 7)))


# --- likelihood ---------------------------------------------------------------------------------------


def slow_density(
    token: list[float], weights: list[float], means: list[list[float]], variances: list[list[float]]
) -> float:
    """Σ_k π_k Π_d N(s_d | μ_kd, σ²_kd) with plain numbers (Eqs. 3-4)."""
    total = 0.0
    for weight, mean, variance in zip(weights, means, variances, strict=True):
        density = weight
        for s, m, v in zip(token, mean, variance, strict=True):
            density *= math.exp(-((s - m) ** 2) / (2 * v)) / math.sqrt(2 * math.pi * v)
        total += density
    return total


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nll_against_a_slow_mixture_density(scheme: Scheme) -> None:
    model = generator(scheme)
    rng = torch.Generator().manual_seed(5)
    tokens, labels = torch.randn(3, 4, 3, generator=rng), torch.tensor([0, 1, 1])
    model.scale.measure(torch.randn(40, 4, 3, generator=rng) * 2 + 1, torch.arange(40) % 2)
    scaled = torch.stack(
        [(s - model.scale.shift[y]) / model.scale.scale[y] for s, y in zip(tokens, labels, strict=True)]
    )
    mixture = model(scaled, labels)
    for row in range(3):
        expected = 0.0
        for position in range(4):
            log_weights, means, log_variances = (part[row, position] for part in mixture)
            density = slow_density(
                scaled[row, position].tolist(), log_weights.exp().tolist(), means.tolist(), log_variances.exp().tolist()
            )
            expected -= math.log(density)
        assert math.isclose(float(model.nll(tokens, labels)[row].detach()), expected)


def test_far_tokens_and_bounds_stay_finite() -> None:
    model = generator()
    with torch.no_grad():
        model.mixture.weight.mul_(1000)
    tokens = torch.full((1, 4, 3), 1e4)
    loss = model.nll(tokens, torch.tensor([0])).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    log_variances = model(tokens, torch.tensor([0])).log_variances
    assert log_variances.min() >= -4 and log_variances.max() <= 6.001


def test_bounds_are_smooth() -> None:
    values = torch.tensor([-50.0, -4.0, 0.0, 1.0, 6.0, 50.0], requires_grad=True)
    out = bounded(values, -4, 6)
    assert (out >= -4).all() and (out <= 6.001).all() and (out.diff() >= 0).all()
    torch.testing.assert_close(out[2:4], values[2:4], atol=0.03, rtol=0)
    inside = torch.autograd.grad(out.sum(), values)[0]
    assert (inside[1:5] > 0.4).all()


# --- samples ------------------------------------------------------------------------------------------


def mixture_by_hand(count: int) -> TokenMixture:
    weights = torch.tensor([0.2, 0.5, 0.3]).log()
    means = torch.tensor([[-3.0, 1.0], [0.0, 0.0], [2.0, -4.0]])
    log_variances = torch.tensor([[0.04, 0.25], [1.0, 0.01], [0.25, 1.0]]).log()
    return TokenMixture(weights.expand(count, 1, 3), means.expand(count, 1, 3, 2), log_variances.expand(count, 1, 3, 2))


def test_samples_follow_the_density_by_kolmogorov_smirnov() -> None:
    count = 20_000
    mixture = mixture_by_hand(count)
    drawn = mixture.sample(torch.Generator().manual_seed(0))[:, 0]
    weights, means = mixture.log_weights[0, 0].exp(), mixture.means[0, 0]
    spreads = mixture.log_variances[0, 0].exp().sqrt()
    for feature in range(2):
        values = drawn[:, feature].sort().values
        each = torch.distributions.Normal(means[:, feature], spreads[:, feature]).cdf(values.unsqueeze(1))
        expected = (each * weights).sum(1)
        steps = torch.arange(1, count + 1) / count
        distance = torch.maximum((steps - expected).abs(), (expected - steps + 1 / count).abs()).max()
        assert float(distance) < 1.63 / math.sqrt(count), "1 % level"
    mean = (weights.unsqueeze(1) * means).sum(0)
    second = (weights.unsqueeze(1) * (means**2 + spreads**2)).sum(0)
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.05, rtol=0)
    torch.testing.assert_close((drawn**2).mean(0), second, atol=0.1, rtol=0)
    modes = mixture.sample(torch.Generator().manual_seed(0), temperature=0.0)[:, 0]
    assert {tuple(row) for row in modes.tolist()} == {tuple(row) for row in means.tolist()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_windows_follow_the_density_given_the_global_token_that_is_kept(scheme: Scheme) -> None:
    """Windows are drawn from p(· | y, s0) with the very s0 that stays in the sequence: their mean moves with it."""
    model = generator(scheme, length=3)
    labels = torch.ones(4000, dtype=torch.long)
    drawn = model.sample(labels, torch.Generator().manual_seed(3))
    with torch.no_grad():
        mixture = model(model.scale(drawn, labels), labels)
    weights = mixture.log_weights.exp().unsqueeze(-1)
    expected = (weights * mixture.means).sum(2)
    second = (weights * (mixture.means**2 + mixture.log_variances.exp())).sum(2)
    variance = second - expected**2
    # Given the sequence's own condition every token has the mixture's mean and variance: standardised residuals.
    residual = (drawn - expected) / variance.sqrt()
    torch.testing.assert_close(residual.mean(0), torch.zeros(3, 3), atol=0.06, rtol=0)
    torch.testing.assert_close(residual.square().mean(0), torch.ones(3, 3), atol=0.1, rtol=0)
    if scheme == "mar":  # and with another sequence's condition they have not
        with torch.no_grad():
            wrong = model(model.scale(drawn.roll(1, 0), labels), labels)
        off = (drawn - (wrong.log_weights.exp().unsqueeze(-1) * wrong.means).sum(2))[:, 1:]
        assert off.square().mean() > (drawn - expected)[:, 1:].square().mean()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batched_sampling_is_one_pass_per_block(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = generator(scheme), []
    plain = TokenGenerator.forward

    def counted(self: TokenGenerator, tokens: Tensor, labels: Tensor) -> TokenMixture:
        passes.append(len(labels))
        return plain(self, tokens, labels)

    monkeypatch.setattr(TokenGenerator, "forward", counted)
    labels = torch.tensor([0, 1, 0, 1, 1])
    drawn = model.sample(labels, torch.Generator().manual_seed(0))
    assert drawn.shape == (5, 4, 3)
    expected = {"mar": 2, "ar": 4, "nar": 1}[scheme]
    assert passes == [5] * expected
    assert model.sampling_flops == expected * model.flops > 0
    assert torch.equal(drawn, model.sample(labels, torch.Generator().manual_seed(0)))
    assert model.draw(labels, torch.Generator().manual_seed(0), chunk=2).shape == (5, 4, 3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sequence_of_one_token(scheme: Scheme) -> None:
    model = generator(scheme, length=1)
    assert model.sample(torch.tensor([0, 1]), torch.Generator().manual_seed(0)).shape == (2, 1, 3)
    assert model.nll(torch.zeros(2, 1, 3), torch.tensor([0, 1])).shape == (2,)


@pytest.mark.slow
def test_it_learns_a_dependence_on_the_global_token_that_nar_cannot() -> None:
    rng = torch.Generator().manual_seed(0)
    first = torch.randn(256, 1, 3, generator=rng)
    tokens = torch.cat([first, (-first).expand(-1, 2, -1) + 0.1 * torch.randn(256, 2, 3, generator=rng)], 1)
    labels = torch.zeros(256, dtype=torch.long)
    losses = {}
    for scheme in ("mar", "nar"):
        model = generator(scheme, length=3).train()  # type: ignore[arg-type]
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(150):
            optimiser.zero_grad()
            loss = model.nll(tokens, labels).mean()
            loss.backward()
            optimiser.step()
        losses[scheme] = float(loss.detach())
        drawn = model.eval().sample(labels, torch.Generator().manual_seed(1))
        correlation = torch.corrcoef(torch.stack([drawn[:, 0, 0], drawn[:, 1, 0]]))[0, 1]
        assert (correlation < -0.8) if scheme == "mar" else (correlation.abs() < 0.3)
    assert losses["mar"] < losses["nar"] - 3


# --- scale and size -----------------------------------------------------------------------------------


def test_scale_is_by_class_and_position_and_reversible() -> None:
    model = generator(classes=3)
    labels = torch.tensor([0] * 50 + [1] * 50 + [2] * 15)
    spread = torch.tensor([1.0, 5.0, 0.0])
    tokens = torch.randn(115, 4, 3, generator=torch.Generator().manual_seed(0)) * spread + 7 + labels.view(-1, 1, 1)
    model.scale.measure(tokens, labels)
    scaled = model.scale(tokens, labels)
    for label in (0, 1):
        own = scaled[labels == label]
        torch.testing.assert_close(own.mean(0), torch.zeros(4, 3), atol=1e-3, rtol=0)
        torch.testing.assert_close(own.std(0)[:, :2], torch.ones(4, 2), atol=1e-4, rtol=0)
    torch.testing.assert_close(model.scale.inverse(scaled, labels), tokens, atol=1e-4, rtol=1e-5)
    # A class with few images has the client's scale: its own mean would give them away.
    torch.testing.assert_close(model.scale.shift[2], tokens.mean(0))
    model.scale.measure(tokens, labels, by_class=False)
    for label in range(3):
        torch.testing.assert_close(model.scale.shift[label], tokens.mean(0))
        torch.testing.assert_close(model.scale.scale[label][:, :2], tokens.std(0)[:, :2])
    few = generator()
    few.scale.measure(tokens[:15], labels[:15])
    assert (few.scale.shift == 0).all() and (few.scale.scale == 1).all()


@pytest.mark.parametrize("by_class", [True, False])
def test_scale_changes_the_likelihood_by_a_constant_only(by_class: bool) -> None:
    """log p(s) = log p(z) - Σ log scale: between two sequences of one class the difference stays that of a density."""
    model = generator(length=1, dim=1)
    tokens = torch.randn(40, 1, 1, generator=torch.Generator().manual_seed(0)) * 3 + 2
    model.scale.measure(tokens, torch.arange(40) % 2, by_class=by_class)
    grid = torch.linspace(-40, 40, 20_001).view(-1, 1, 1)
    for label in (0, 1):
        labels = torch.full((len(grid),), label)
        with torch.no_grad():
            density = torch.exp(-model.nll(grid, labels)) / model.scale.scale[label, 0, 0]
        assert math.isclose(float(torch.trapezoid(density, grid.flatten())), 1.0, rel_tol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_calibrated_tokens_have_the_mean_and_spread_of_the_real_ones(scheme: Scheme) -> None:
    rng = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 300 + [1] * 300 + [2] * 15)
    tokens = torch.randn(615, 4, 3, generator=rng).exp() * (1 + labels.view(-1, 1, 1)) + torch.arange(4).view(1, 4, 1)
    plain, model = generator(scheme, classes=3), generator(scheme, classes=3, calibrated=True)
    for made in (plain, model):
        made.scale.measure(tokens, labels)
    before = model.nll(tokens, labels)
    assert model.calibrate(tokens, labels, torch.Generator().manual_seed(1)) == 2 * 1200
    off = {"plain": 0.0, "calibrated": 0.0}
    for label in (0, 1):
        real, asked = tokens[labels == label], torch.full((4000,), label)
        for name, made in {"plain": plain, "calibrated": model}.items():
            drawn = made.draw(asked, torch.Generator().manual_seed(2))
            off[name] += float(((drawn.mean(0) - real.mean(0)) / real.std(0)).square().sum())
            off[name] += float((drawn.std(0) / real.std(0) - 1).square().sum())
    assert off["calibrated"] < 0.1 < off["plain"]
    # Neither the likelihood nor a class of few images is touched, whose own mean would give them away.
    assert torch.equal(model.nll(tokens, labels), before)
    assert (model.scale.offset[2] == 0).all() and (model.scale.gain[2] == 1).all()
    same = [made.draw(torch.full((50,), 2), torch.Generator().manual_seed(3)) for made in (plain, model)]
    assert torch.equal(*same)


def test_calibration_of_a_dead_feature_and_of_pieces() -> None:
    """A constant feature stays so, as far as its gain may go; drawn in pieces, the same is measured."""
    labels, rng = torch.zeros(64, dtype=torch.long), torch.Generator().manual_seed(0)
    tokens = torch.randn(64, 4, 3, generator=rng) * torch.tensor([1.0, 1.0, 0.0]) + 5
    gains = []
    for chunk in (100, 2048):
        model = generator(classes=1, calibrated=True)
        model.scale.measure(tokens, labels)
        assert model.calibrate(tokens, labels, torch.Generator().manual_seed(1), chunk=chunk) == 1000
        torch.testing.assert_close(model.scale.gain[0, :, 2], torch.full((4,), 0.1))
        gains.append(model.scale.gain[0, :, :2])
        assert (gains[-1] - 1).abs().max() > 0.05, "the untrained generator's spread was wrong"
    torch.testing.assert_close(*gains, atol=0.1, rtol=0)
    assert {name for name, _ in generator().scale.named_buffers()} == {"shift", "scale"}, "nothing more is sent without"


def test_the_papers_generator_has_the_papers_size() -> None:
    """144.33 MB of 32-bit numbers with 768 features, four layers, 16 heads and K = 20 (sections 3.1 and 3.6)."""
    with torch.device("meta"):
        model = TokenGenerator(768, 5, 7)
    count = sum(p.numel() for p in model.parameters())
    assert abs(4 * count / 2**20 / 144.33 - 1) < 0.005
    sequence = 5 * 768 * 4
    assert sequence == 15 * 1024, "15 KB, so that sequences are smaller below some 9,850 of them"
    assert abs(4 * count / sequence / 9850 - 1) < 0.01
