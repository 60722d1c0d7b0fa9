from __future__ import annotations

import subprocess
import sys

import pytest


def test_importing_the_package_does_not_import_torch():
    code = "import sys, fedbicross.steps; assert 'torch' not in sys.modules and 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_submodules_load_on_first_use():
    from fedbicross import steps

    for name in steps.__all__:
        assert getattr(steps, name).__name__ == f"fedbicross.steps.{name}"
    with pytest.raises(AttributeError):
        steps.nothing  # noqa: B018
