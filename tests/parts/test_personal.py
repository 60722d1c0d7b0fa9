"""FedBiCross Eq. 9 against a plain loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedbicross import models
from fedbicross.engine.train import epoch_batches, split_validation
from fedbicross.errors import MethodError
from fedbicross.messages import Client, Predictor
from fedbicross.parts import personal as parts_personal
from fedbicross.parts.local import own_model
from fedbicross.parts.personal import distil_into_one, distil_personal
from small import tiny_clients, tiny_context

SETTINGS = {
    "gamma": 0.5,
    "delta": 0.3,
    "temperature": 20.0,
    "epochs": 2,
    "lr": 0.02,
    "schedule": "constant",
    "batch": 8,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "start": "cluster",
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


def plain(client, ctx, gamma, delta, temperature, epochs, lr, schedule, batch, momentum, weight_decay, start):
    """Both teachers asked anew for every batch."""
    cluster, own = network(state(1)).eval(), network(state(2)).eval()
    personal = network(state({"cluster": 1, "own": 2}[start])).train()
    optimiser = torch.optim.SGD(personal.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    split = ctx.rng("training", client.name, "validation-split")
    rows, held = split_validation(client.labels, None, ctx.training.validation, split)
    x = torch.from_numpy(client.images).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = torch.from_numpy(client.labels)

    def kl(teacher, answer):
        p = (teacher / temperature).softmax(1)
        return (p * (p.log() - (answer / temperature).log_softmax(1))).sum(1).mean() * temperature**2

    for epoch in range(epochs):
        if schedule == "cosine":
            optimiser.param_groups[0]["lr"] = lr * (1 + np.cos(np.pi * epoch / epochs)) / 2
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
    [
        {},
        {"gamma": 0.0},
        {"delta": 0.0},
        {"temperature": 1.0},
        {"epochs": 1, "lr": 0.05, "momentum": 0.0},
        {"start": "own"},
        {"schedule": "cosine", "epochs": 3},
    ],
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


@pytest.mark.parametrize(("start", "seed"), [("cluster", 1), ("own", 2)])
def test_no_epochs_leave_the_model_that_it_starts_from(start, seed):
    found, _ = run(epochs=0, start=start)
    assert all(torch.equal(found[name], value) for name, value in state(seed).items())


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


# --- several networks into one ----------------------------------------------------------------------------


def several_and_starts(ctx, client):
    """A gated model with its own two networks, the student, a class mix and a referral."""
    own, student = own_model(client, ctx, "both"), own_model(tiny_clients(2)[1], ctx, "balanced")
    architectures, states = (*own.architectures, *student.architectures), (*own.states, *student.states)
    shares = torch.tensor([[0.3, 0.3, 0.3], [0.3, 0.3, 0.3], [0.4, 0.4, 0.4]], dtype=torch.float32)
    prior, marks = torch.tensor([0.2, 0.5, 0.3]).log().float(), torch.tensor([1e4, 1e4, 0.5])
    several = Predictor(ctx.task, architectures, states, "consensus", shares, log_prior=prior, referral=marks)
    return several, Predictor(ctx.task, architectures, states)


def slow_one(client, several, starts, turns, ctx):
    """The several asked anew for every batch, image by image turned; the start with the lowest loss."""
    recipe, held = ctx.training, ctx.validation_rows(client)
    rows = np.array([row for row in range(len(client.labels)) if row not in held])
    losses = []
    for weights in starts.states:
        answers = Predictor(ctx.task, ("resnet8",), (weights,)).probabilities(client.images[held])
        losses.append(-sum(np.log(answers[i, client.labels[row]]) for i, row in enumerate(held)))
    one = network(starts.states[int(np.argmin(losses))]).train()
    optimiser = torch.optim.SGD(one.parameters(), lr=1.0, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    epochs = parts_personal.EPOCHS_INTO_ONE
    for epoch in range(epochs):
        rng = ctx.rng("personal", client.name, f"epoch-{epoch}")
        for group in optimiser.param_groups:
            group["lr"] = recipe.lr * (1 + np.cos(np.pi * epoch / epochs)) / 2
        for chosen in epoch_batches(len(rows), recipe.batch_size, rng):
            seen = []
            for row, kind in zip(rows[chosen], rng.integers(0, 8 if turns else 1, len(chosen)), strict=True):
                image = np.rot90(client.images[row], kind % 4)
                seen.append(image[:, ::-1] if kind >= 4 else image)
            soft = torch.from_numpy(several.probabilities(np.stack(seen)))
            x = torch.from_numpy(np.stack(seen)).permute(0, 3, 1, 2).to(torch.get_default_dtype()) / 127.5 - 1
            loss = (soft * (soft.log() - one(x).log_softmax(1))).sum(1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return one.state_dict()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("turns", [True, False])
def test_one_network_from_several_equals_a_plain_loop(turns, monkeypatch):
    monkeypatch.setattr(parts_personal, "EPOCHS_INTO_ONE", 2)
    client, ctx = tiny_clients(1)[0], tiny_context(validation=0.3, lr=0.05)
    several, starts = several_and_starts(ctx, client)
    monkeypatch.setattr(parts_personal, "better_beyond_chance", lambda won, lost: False)
    found = distil_into_one(client, several, starts, turns, ctx)
    assert len(found.states) == 1 and found.referral is None and found.log_prior is None
    expected = slow_one(client, several, starts, turns, tiny_context(validation=0.3, lr=0.05))
    for name, value in expected.items():
        torch.testing.assert_close(found.states[0][name], value, rtol=1e-6, atol=1e-8)
    other = slow_one(client, several, starts, not turns, tiny_context(validation=0.3, lr=0.05))
    assert any(not torch.allclose(found.states[0][name], value, atol=1e-6) for name, value in other.items())


@pytest.mark.parametrize("worse", [True, False])
def test_one_network_stays_only_where_the_several_are_not_better_beyond_chance(worse, monkeypatch):
    monkeypatch.setattr(parts_personal, "EPOCHS_INTO_ONE", 1)
    client, ctx = tiny_clients(1)[0], tiny_context(validation=0.3)
    several, starts = several_and_starts(ctx, client)
    asked = []
    monkeypatch.setattr(parts_personal, "better_beyond_chance", lambda *given: asked.append(given) or worse)
    found = distil_into_one(client, several, starts, True, ctx)
    assert (found is several) == worse
    ((title, table),) = ctx.record.diagnosis["tables"].items()
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert "client-0" in title and row["validation images"] == 7 and row["networks kept"] == (3 if worse else 1)
    assert asked == [(row["the reverse"], row["right where the several are wrong"])]
    if not worse:
        held = ctx.validation_rows(client)
        answers = [model.probabilities(client.images[held]).argmax(1) for model in (several, found)]
        pairs = [(a == y, b == y) for a, b, y in zip(*answers, client.labels[held], strict=True)]
        assert asked == [(pairs.count((True, False)), pairs.count((False, True)))]


def test_nothing_is_joined_where_there_is_one_network_or_nothing_to_try_it_on():
    client, ctx = tiny_clients(1)[0], tiny_context(validation=0.3)
    several, starts = several_and_starts(ctx, client)
    one = own_model(client, ctx, "balanced")
    assert distil_into_one(client, one, starts, True, ctx) is one
    few = tiny_context(validation=0.0)
    assert distil_into_one(client, several, starts, True, few) is several
    assert any("client-0" in text and "3 stay" in text for text in few.record.warnings)


def test_one_network_that_diverged_is_refused():
    client, ctx = tiny_clients(1)[0], tiny_context(validation=0.3)
    several, starts = several_and_starts(ctx, client)
    wild = replace(ctx, training=ctx.training.model_copy(update={"lr": 1e30}))
    with pytest.raises(MethodError) as caught:
        distil_into_one(client, several, starts, True, wild)
    assert caught.value.code == "diverged" and "training.lr" in caught.value.args[0]
