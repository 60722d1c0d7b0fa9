"""What a user waits for before anything happens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code",
    [
        "import fedbicross",
        "import fedbicross.methods",
        "import fedbicross.runs.config as c; c.load_config()",
        "import fedbicross.cli.app",
    ],
)
def test_no_torch_before_it_is_needed(code: str) -> None:
    probe = (
        f"import sys; {code}; print(sorted(m for m in ('torch', 'sklearn', 'matplotlib', 'PIL') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_lazy_names_resolve() -> None:
    import fedbicross

    for name in fedbicross.__all__:
        assert getattr(fedbicross, name) is not None
    with pytest.raises(AttributeError):
        fedbicross.nonsense  # noqa: B018


@pytest.mark.slow
def test_nothing_depends_on_the_order_of_lazy_imports() -> None:
    """``EAGER_IMPORT`` of lazy_loader loads every name at once: no circles, and no package of an extra."""
    extras = (
        "flwr",
        "ray",
        "onnx",
        "onnxscript",
        "pydicom",
        "nibabel",
        "transformers",
        "diffusers",
        "efficientnet_lite_pytorch",
        "pandas",
        "mlflow",
        "tensorboard",
        "opacus",
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({extras})); import fedbicross; print(fedbicross.__version__)"
    for order in range(3):  # lazy_loader goes through sets of names
        environment = {**os.environ, "EAGER_IMPORT": "1", "PYTHONHASHSEED": str(order)}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
