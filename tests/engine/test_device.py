from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fedbicross.engine.device import resolve_device, resolve_precision, set_precision
from fedbicross.errors import ConfigError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    yield
    cudnn.allow_tf32, cudnn.deterministic = before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_run_sets_both_switches_whatever_was_set_before(precision: str, reproducible: bool) -> None:
    set_precision("fp32" if precision == "bf16" else "bf16", not reproducible)
    set_precision(precision, reproducible)
    assert torch.backends.cudnn.allow_tf32 is (precision == "bf16")
    assert torch.backends.cudnn.deterministic is reproducible


def test_auto_is_bf16_on_a_gpu_alone() -> None:
    assert [resolve_precision("auto", device) for device in ("cuda", "cpu", "mps")] == ["bf16", "fp32", "fp32"]
    assert resolve_precision("fp32", "cuda") == "fp32"


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_device("tpu")
    assert error.value.code == "no_device"
