from __future__ import annotations

from pathlib import Path

import pytest

from fedbicross.bench import suite, work


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the whole smoke suite; read it, do not write it."""
    out = tmp_path_factory.mktemp("smoke")
    outcome = work.run(suite.expand(*suite.load("smoke")), out, out)
    assert len(outcome.made) == 33 and len(outcome.unavailable) == 4 and not outcome.failed
    return out


@pytest.hookimpl(tryfirst=True)  # before any are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs the suite waits seconds for it."""
    for item in items:
        if "smoke" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
