from __future__ import annotations

import os
from pathlib import Path

from fedbicross.waiting import wait_passively

wait_passively()  # before torch

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)  # tiny tensors: a second thread only waits, and on a busy machine it waits long


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real images, or a skip."""
    folder = Path(os.environ.get("FEDBICROSS_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no real images: set FEDBICROSS_DATA to a folder with MedMNIST files")
    return folder
