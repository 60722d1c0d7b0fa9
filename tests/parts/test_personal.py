"""FedBiCross Eq. 9 against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedbicross import models
from fedbicross.engine.train import epoch_batches, split_validation
from fedbicross.errors import MethodError
from fedbicross.messages import Client
from fedbicross.parts.personal import distil_personal
from small import tiny_clients, tiny_context

SETTINGS = {
    "gamma": 0.5,
    "delta": 0.3,
    "temperature": 20.0,
    "epochs": 2,
    "lr": 0.02,
    "batch": 8,
    "momentum": 0.9,
    "weight_decay": 5e-4,
}


def state(seed):
    network = models.build("resnet8", 3, 3, 12)
    models.initialise(network, torch.Generator().manual_seed(seed))
    return network.state_dict()


def network(weights):
    built = models.build("resnet8", 3, 3, 12)
    built.load_state_dict(weights)
    return built


def run(client=None, ctx=None, **settings):
    client, ctx = client or tiny_clients(1)[0], ctx or tiny_context()
    return distil_personal(client, ctx, cluster_state=state(1), own_state=state(2), **{**SETTINGS, **settings})


def plain(client, ctx, gamma, delta, temperature, epochs, lr, batch, momentum, weight_decay):
    """Both teachers asked anew for every batch."""
    cluster, own, personal = network(state(1)).eval(), network(state(2)).eval(), network(state(1)).train()
    optimiser = torch.optim.SGD(personal.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    split = ctx.rng("training", client.name, "validation-split")
    rows, held = split_validation(client.labels, None, ctx.training.validation, split)
    x = torch.from_numpy(client.images).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = torch.from_numpy(client.labels)

    def kl(teacher, answer):
        p = (teacher / temperature).softmax(1)
        return (p * (p.log() - (answer / temperature).log_softmax(1))).sum(1).mean() * temperature**2

    for epoch in range(epochs):
        for chosen in epoch_batches(len(rows), batch, ctx.rng("personal", client.name, f"epoch-{epoch}")):
            index = torch.from_numpy(rows[chosen])
            answer = personal(x[index])
            with torch.no_grad():
                wide, narrow = cluster(x[index]), own(x[index])
            loss = F.cross_entropy(answer, y[index]) + gamma * kl(wide, answer) + delta * kl(narrow, answer)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return personal.state_dict(), held


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "changed",
    [{}, {"gamma": 0.0}, {"delta": 0.0}, {"temperature": 1.0}, {"epochs": 1, "lr": 0.05, "momentum": 0.0}],
)
def test_equals_a_plain_loop(changed):
    client = tiny_clients(1)[0]
    found, _ = run(client, **changed)
    expected, _ = plain(client, tiny_context(), **{**SETTINGS, **changed})
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    wrong, _ = plain(client, tiny_context(), **{**SETTINGS, **changed, "weight_decay": 0.05})
    assert not torch.allclose(found["head.weight"], wrong["head.weight"])


@pytest.mark.usefixtures("float64")
def test_held_out_images_are_those_of_local_training_and_stay_unseen():
    ctx, client = tiny_context(validation=0.25), tiny_clients(1)[0]
    split = ctx.rng("training", client.name, "validation-split")
    _, held = split_validation(client.labels, None, 0.25, split)
    found, scores = run(client, ctx)
    images = client.images.copy()
    images[held] = 255 - images[held]
    other, _ = run(Client(client.name, images, client.labels), ctx)
    assert all(torch.equal(found[name], value) for name, value in other.items()), "they do not train"
    assert set(scores) == {"cluster model", "own model", "personal"} and len(held) == 6
    x = torch.from_numpy(client.images[held]).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = torch.from_numpy(client.labels[held])
    for title, weights in [("cluster model", state(1)), ("own model", state(2)), ("personal", found)]:
        assert scores[title] == pytest.approx((network(weights).eval()(x).argmax(1) == y).float().mean().item())


def test_a_client_that_learns_something_wrong_scores_worse_than_both_teachers():
    """Wrong labels on the training images, right ones on the held-out images, and teachers that know them."""
    ctx, client = tiny_context(validation=0.25, epochs=15), tiny_clients(1, per_client=48)[0]
    good = ctx.local_model(client).state
    _, held = split_validation(client.labels, None, 0.25, ctx.rng("training", client.name, "validation-split"))
    labels = (client.labels + 1) % 3
    labels[held] = client.labels[held]
    misled = Client(client.name, client.images, labels)
    settings = {**SETTINGS, "gamma": 0.0, "delta": 0.0, "epochs": 12}
    _, scores = distil_personal(misled, ctx, cluster_state=good, own_state=good, **settings)
    assert scores["personal"] < scores["cluster model"] == scores["own model"]
    held_back = {**settings, "gamma": 5.0, "delta": 5.0}
    _, loyal = distil_personal(misled, ctx, cluster_state=good, own_state=good, **held_back)
    assert loyal["personal"] > scores["personal"], "the two divergences keep it near its teachers"


def test_one_image_is_enough_and_gives_no_comparison():
    client = tiny_clients(1)[0]
    lone = Client(client.name, client.images[:1], client.labels[:1])
    found, scores = run(lone)
    assert scores == {}
    assert all(torch.isfinite(value).all() for value in found.values())
    assert not torch.equal(found["head.weight"], state(1)["head.weight"])


def test_no_epochs_leave_the_cluster_model():
    found, _ = run(epochs=0)
    assert all(torch.equal(found[name], value) for name, value in state(1).items())


def test_patients_stay_together():
    client = tiny_clients(1)[0]
    ctx = tiny_context(validation=0.25)
    patients = np.repeat(["a", "b", "c", "d"], 6)
    grouped = Client(client.name, client.images, client.labels, patients)
    rng = ctx.rng("training", client.name, "validation-split")
    _, held = split_validation(grouped.labels, patients, 0.25, rng)
    assert len(set(patients[held])) == 1 and len(held) == 6
    found, scores = run(grouped, ctx)
    assert len(scores) == 3 and torch.isfinite(found["head.weight"]).all()


def test_divergence_is_an_error_in_words():
    with pytest.raises(MethodError) as caught:
        run(lr=1e30)
    assert caught.value.code == "diverged" and "client-0" in str(caught.value) and "lr_personal" in str(caught.value)


def test_costs_count_both_teachers_once_and_the_student_three_times():
    ctx, client = tiny_context(), tiny_clients(1)[0]
    run(client, ctx, epochs=3)
    train = 24 - int(24 * ctx.training.validation)
    assert ctx.record.flops == models.forward_flops("resnet8", 3, 3, 12) * (2 * 24 + 3 * 3 * train)
