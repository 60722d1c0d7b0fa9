from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fedbicross.freed_memory import keep_freed_memory
from fedbicross.waiting import wait_briefly

wait_briefly()  # before torch
keep_freed_memory()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from cli.console import config_file, ok  # noqa: E402

# Tiny tensors: a second thread only waits, and on a busy machine it waits long.
torch.set_num_threads(int(os.environ.get("FEDBICROSS_TEST_THREADS", "1")))

# Neither the machine's speed nor chance decides: no example has a deadline, and every machine draws the same ones.
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

# Two workers (`make test`) take one file after the other. Long ones first, so that no worker is left with one at the
# end.
FIRST = (
    "transport/test_flower_deployment.py",
    "engine/test_workers.py",
    "faults/test_kill_and_resume.py",
    "faults/test_determinism.py",
    "methods/test_synthesis.py",
    "methods/test_every_method.py",
    "methods/test_shots.py",
    "methods/test_generative.py",
    "methods/test_fedbicross.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        return FIRST.index(file) if file in FIRST else len(FIRST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one tiny run by the command line, which tests read and copy."""
    folder = tmp_path_factory.mktemp("finished")
    ok("run", config_file(folder), "--out", folder / "tiny")
    return folder / "tiny"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny networks gain nothing from a second thread and lose much where another process wants the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors, and those that the code makes ``float()``, are float64.

    In float32 two ways to compute the same thing may disagree about the sign of a number near 0, and with it about a
    ReLU, an argmax or a maximum; which images this happens to depends on the processor. In float64 it does not happen.
    """
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
