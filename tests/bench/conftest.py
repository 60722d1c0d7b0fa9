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
