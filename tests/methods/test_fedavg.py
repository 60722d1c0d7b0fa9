from __future__ import annotations

import pytest
import torch

from fedbicross.context import Task
from fedbicross.errors import MethodError
from fedbicross.federation import simulate
from fedbicross.messages import Client, Upload
from fedbicross.methods import create
from fedbicross.methods.fedavg import average
from small import tiny_clients, tiny_context


def test_average_of_weights_statistics_and_counters() -> None:
    a = {"w": torch.tensor([1.0, -2.0]), "running_var": torch.tensor([4.0]), "n": torch.tensor(10)}
    b = {"w": torch.tensor([3.0, 6.0]), "running_var": torch.tensor([8.0]), "n": torch.tensor(20)}
    mean = average([a, b], [1, 3])
    assert mean["w"].tolist() == [2.5, 4.0]
    assert mean["running_var"].tolist() == [7.0]
    assert mean["n"].dtype == torch.int64


@pytest.mark.parametrize(("spec", "weights"), [("fedavg", [24, 12]), ("fedavg:uniform", [1, 1])])
def test_one_round_is_the_weighted_mean_of_the_local_models(spec: str, weights: list[int]) -> None:
    first, second = tiny_clients(2)
    clients = [first, Client(second.name, second.images[:12], second.labels[:12])]
    ctx = tiny_context()
    predictor = simulate(create(spec), clients, ctx)["client-0"]
    expected = average([ctx.local_model(client).state for client in clients], weights)
    assert all(torch.equal(predictor.states[0][name], value) for name, value in expected.items())


def test_different_architectures_are_refused() -> None:
    uploads = [
        Upload("a", Task(("x", "y"), 12, 3, "resnet8"), {"w": torch.ones(1)}, num_samples=1),
        Upload("b", Task(("x", "y"), 12, 3, "vgg8"), {"w": torch.ones(1)}, num_samples=1),
    ]
    with pytest.raises(MethodError, match="different architectures"):
        create("fedavg").fuse(uploads, tiny_context())
