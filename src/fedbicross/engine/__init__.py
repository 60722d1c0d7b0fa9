"""How the work gets done on a device: training, prediction, ensembles. Submodules load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbicross._lazy import lazy_submodules

if TYPE_CHECKING:
    from fedbicross.engine import device as device
    from fedbicross.engine import ensemble as ensemble
    from fedbicross.engine import fast as fast
    from fedbicross.engine import predict as predict
    from fedbicross.engine import spread as spread
    from fedbicross.engine import student as student
    from fedbicross.engine import tokens as tokens
    from fedbicross.engine import train as train

__getattr__ = lazy_submodules(
    __name__, ["device", "ensemble", "fast", "predict", "spread", "student", "tokens", "train"]
)
