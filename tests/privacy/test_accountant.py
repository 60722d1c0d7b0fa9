from __future__ import annotations

import numpy as np
import pytest

from fedbicross.errors import ConfigError
from fedbicross.privacy import accountant
from fedbicross.privacy.accountant import noise_for_training, spent
from fedbicross.privacy.gaussian import epsilon_of, noise_for
from fedbicross.privacy.statement import Release

DELTA = 1e-5


def gaussian(noise: float, steps: int = 1) -> Release:
    return Release(what="sums", mechanism="gaussian", noise_multiplier=noise, steps=steps)


def training(noise: float, rate: float, steps: int) -> Release:
    return Release(
        what="a network", mechanism="sampled_gaussian", noise_multiplier=noise, sample_rate=rate, steps=steps
    )


def test_gaussians_compose_exactly() -> None:
    assert spent([], DELTA) == 0
    one = noise_for(1.0, DELTA)
    assert spent([gaussian(one)], DELTA) == pytest.approx(1.0, rel=1e-6)
    # k equal ones are one with noise smaller by √k
    assert spent([gaussian(one)] * 4, DELTA) == pytest.approx(epsilon_of(one / 2, DELTA), rel=1e-9)
    assert spent([gaussian(one, steps=4)], DELTA) == pytest.approx(epsilon_of(one / 2, DELTA), rel=1e-9)
    # less than adding up ε
    assert spent([gaussian(one)] * 4, DELTA) < 4


def test_gaussians_cost_no_more_than_opacus_says_of_them() -> None:
    """Its accountant adds up Rényi divergences, which is an upper bound, and close to the exact value."""
    opacus = pytest.importorskip("opacus.accountants")
    book = opacus.RDPAccountant()
    for noise, steps in ((3.0, 2), (5.0, 7)):
        for _ in range(steps):
            book.step(noise_multiplier=noise, sample_rate=1.0)
    theirs = book.get_epsilon(DELTA)
    ours = spent([gaussian(3.0, 2), gaussian(5.0, 7)], DELTA)
    assert theirs * 0.9 < ours <= theirs


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.05, 200), (2.0, 0.25, 40), (0.7, 0.01, 1000)])
def test_training_costs_what_opacus_says(noise: float, rate: float, steps: int) -> None:
    opacus = pytest.importorskip("opacus.accountants")
    book = opacus.RDPAccountant()
    for _ in range(steps):
        book.step(noise_multiplier=noise, sample_rate=rate)
    assert spent([training(noise, rate, steps)], DELTA) == pytest.approx(book.get_epsilon(DELTA), rel=1e-6)


def test_training_and_sums_together() -> None:
    pytest.importorskip("opacus")
    network, sums = training(1.0, 0.1, 50), gaussian(8.0)
    both = spent([network, sums], DELTA)
    assert spent([network], DELTA) < both < spent([network], DELTA) + spent([sums], DELTA)


@pytest.mark.parametrize("beside", [[], [gaussian(10.0)]])
def test_noise_for_training_is_enough_and_hardly_more(beside: list[Release]) -> None:
    pytest.importorskip("opacus")
    noise = noise_for_training(2.0, DELTA, 0.1, 100, beside)
    assert spent([training(noise, 0.1, 100), *beside], DELTA) <= 2.0
    assert spent([training(noise * 0.999, 0.1, 100), *beside], DELTA) > 2.0


def test_what_cannot_be_had() -> None:
    pytest.importorskip("opacus")
    with pytest.raises(ConfigError, match="no noise gives"):
        noise_for_training(0.5, DELTA, 0.1, 10, [gaussian(1.0)])


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountant.importlib.util, "find_spec", lambda name: None)
    assert np.isfinite(spent([gaussian(2.0)], DELTA))
    with pytest.raises(ConfigError) as error:
        spent([training(1.0, 0.1, 10)], DELTA)
    assert error.value.code == "no_opacus"
