from __future__ import annotations

from pathlib import Path

import pytest

from fedbicross.errors import ConfigError
from fedbicross.models import priors
from fedbicross.runs.config import load_config
from fedbicross.steps.diffusion_prior import GaussianPrior, load_prior
from small import refuses


def test_priors_that_are_not_there_have_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with refuses(ConfigError, "unknown_prior"):
        priors.check("gausian")
    monkeypatch.setenv("FEDBICROSS_PRIORS", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses(ConfigError, "prior_package"):
        priors.check("stable_diffusion")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with refuses(ConfigError, "prior_folder") as error:
        load_prior("stable_diffusion", 5, 12, 3.0, "cpu")
    assert str(tmp_path) not in error.value.args[0]
    assert isinstance(load_prior("gaussian", 5, 12, 3.0, "cpu"), GaussianPrior)


def test_a_run_with_a_prior_that_is_not_there_fails_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDBICROSS_PRIORS", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        load_config(None, {"methods": ["fedlmg"], "method": {"fedlmg": {"prior": "stable_diffusion"}}})
    assert error.value.code in ("prior_folder", "prior_package")
