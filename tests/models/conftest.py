import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Batches of one or two gain nothing from threads, and threads that wait for each other on a busy machine crawl."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
