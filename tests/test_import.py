"""What a user waits for before anything happens."""

from __future__ import annotations

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
