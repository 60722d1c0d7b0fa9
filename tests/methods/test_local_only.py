from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbicross.federation import simulate
from fedbicross.messages import Predictor
from fedbicross.methods import create
from small import tiny_clients, tiny_context


def test_every_client_keeps_its_own_network_and_nothing_leaves() -> None:
    clients, ctx, method = tiny_clients(2), tiny_context(), create("local_only")
    predictors = simulate(method, clients, ctx)
    for client in clients:
        own = ctx.local_model(client).state
        assert all(torch.equal(predictors[client.name].states[0][name], value) for name, value in own.items())
        assert method.upload(client, ctx).empty


@pytest.mark.parametrize(("spec", "loss"), [("local_only", "cross_entropy"), ("local_only:balanced", "balanced")])
def test_the_loss_is_the_runs_unless_a_variant_says_otherwise(spec: str, loss: str) -> None:
    client, ctx = tiny_clients(1)[0], tiny_context()
    predictor = simulate(create(spec), [client], ctx)["client-0"]
    own = ctx.with_loss(loss).local_model(client).state
    assert all(torch.equal(predictor.states[0][name], value) for name, value in own.items())
    assert (predictor.log_prior is None) == (loss == "cross_entropy")


def test_a_run_of_balanced_training_gets_its_class_mix_back_too() -> None:
    client = tiny_clients(1)[0]
    by_recipe = simulate(create("local_only"), [client], tiny_context(loss="balanced"))["client-0"]
    by_variant = simulate(create("local_only:balanced"), [client], tiny_context())["client-0"]
    assert by_recipe.pack() == by_variant.pack()


def test_the_class_mix_added_back_is_the_clients_own() -> None:
    """Each answer is what the balanced network says, times how often the class is met here."""
    client, ctx = tiny_clients(1)[0], tiny_context(classes=4)  # nobody here has the last class
    predictor = simulate(create("local_only:balanced"), [client], ctx)["client-0"]
    network = Predictor(ctx.task, predictor.architectures, predictor.states).probabilities(client.images)
    joint = network * np.array(client.class_counts(4))
    expected = joint / joint.sum(1, keepdims=True)
    assert np.allclose(predictor.probabilities(client.images), expected, atol=1e-5)
    assert (predictor.probabilities(client.images)[:, 3] == 0).all()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("recipe", ["cross_entropy", "balanced"])
def test_both_is_the_mean_of_the_log_probabilities_of_the_two(recipe: str) -> None:
    client, ctx = tiny_clients(1)[0], tiny_context(classes=4, loss=recipe)
    balanced = simulate(create("local_only:balanced"), [client], ctx)["client-0"].probabilities(client.images)
    plain = create("local_only", {"local_only": {"loss": "cross_entropy"}})
    expected = np.sqrt(
        balanced * simulate(plain, [client], replace(ctx, scope="b"))["client-0"].probabilities(client.images)
    )
    expected /= expected.sum(1, keepdims=True)
    both = simulate(create("local_only:both"), [client], replace(ctx, scope="c"))["client-0"]
    assert len(both.states) == 2
    assert np.allclose(both.probabilities(client.images), expected, atol=1e-7)
