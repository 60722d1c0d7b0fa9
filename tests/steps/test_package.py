from __future__ import annotations

import subprocess
import sys

import pytest

from fedbicross import parts, steps


def test_importing_the_package_does_not_import_torch():
    code = "import sys, fedbicross.steps, fedbicross.parts.settings; assert not {'torch', 'sklearn'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", [steps, parts])
def test_submodules_load_on_first_use(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == f"{package.__name__}.{name}"
    with pytest.raises(AttributeError):
        package.nothing  # noqa: B018
