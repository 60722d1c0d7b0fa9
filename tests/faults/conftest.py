from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.forge import Forge


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    forge = Forge(tmp_path_factory.mktemp("forge") / "log")
    yield forge
    forge.close()
