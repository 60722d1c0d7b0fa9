from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedbicross import models
from fedbicross.context import MemoryStore
from fedbicross.engine import train as module
from fedbicross.engine.recipe import Training
from fedbicross.engine.train import (
    Trained,
    balancing_shift,
    epoch_batches,
    split_validation,
    train_together,
    training,
    turn_and_mirror,
)
from fedbicross.errors import MethodError
from fedbicross.seeds import torch_rng
from small import refuses, tiny_clients

RECIPE = Training(recipe="modern", epochs=4, batch_size=8)


def fresh(seed: int = 0) -> torch.nn.Module:
    model = models.build("resnet8", 3, 3, 12)
    models.initialise(model, torch_rng(seed, "init"))
    return model


def train(*given: Any, **options: Any) -> Trained:
    return train_together([training(*given, **options)])[0]


def run(recipe: Training = RECIPE, **options: Any) -> Trained:
    client = tiny_clients(1)[0]
    return train(fresh(), "resnet8", client.images, client.labels, None, recipe, seed=0, stream=("t",), **options)


def same(a: Trained, b: Trained) -> bool:
    return all(torch.equal(a.state[name], b.state[name]) for name in a.state) and a.history == b.history


def slow_loss(logits: torch.Tensor, labels: list[int], loss: str) -> torch.Tensor:
    """-log p(y|x), image by image; balanced: of p(c|x) n(c), over the classes that there are."""
    counts = [labels.count(c) if loss == "balanced" else 1 for c in range(logits.shape[1])]
    total = torch.zeros(())
    for row, label in zip(logits, labels, strict=True):
        others = sum(counts[c] * row[c].exp() for c in range(len(counts)) if counts[c])
        total = total - (counts[label] * row[label].exp() / others).log()
    return total / len(labels)


def test_learns_and_repeats() -> None:
    first = run()
    assert same(first, run())
    assert first.history[-1]["train_loss"] < first.history[0]["train_loss"]
    assert (first.train_images, first.val_images) == (22, 2)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", ["cross_entropy", "balanced"])
def test_equals_a_plain_torch_loop(loss: str) -> None:
    """The slow obvious version: one batch, no validation, no augmentation, two epochs."""
    client = tiny_clients(1)[0]
    recipe = Training(epochs=2, batch_size=64, validation=0.0, lr=0.05, loss=loss)
    fast = train(fresh(), "resnet8", client.images, client.labels, None, recipe, seed=0, stream=("t",))
    model = fresh().train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    x = torch.from_numpy(client.images).permute(0, 3, 1, 2).float() / 255 * 2 - 1
    for epoch in range(2):
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate(epoch)
        optimiser.zero_grad()
        slow_loss(model(x), client.labels.tolist(), loss).backward()
        optimiser.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(fast.state[name], value, msg=name)


def test_killed_between_epochs_resumes_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    whole = run()

    class Killed(Exception):
        pass

    def kill(epoch: int, entry: dict[str, Any]) -> None:
        if epoch == 3:
            raise Killed

    store = MemoryStore()
    with pytest.raises(Killed):
        run(store=store, checkpoint="c", on_epoch=kill)
    assert store.load("c") is not None
    seen: list[int] = []
    again = run(store=store, checkpoint="c", on_epoch=lambda epoch, entry: seen.append(epoch))
    assert seen == [3, 4]
    assert same(whole, again)
    assert store.load("c") is None


@pytest.mark.parametrize("select", ["best", "last"])
def test_a_loss_that_is_not_finite_ends_it_at_that_epoch(select: str) -> None:
    store, seen = MemoryStore(), list[int]()
    recipe = RECIPE.model_copy(update={"lr": 1e30, "select": select})
    with refuses(MethodError, "diverged", r"site A.*not finite in epoch 1; lower training\.lr"):
        options = {"store": store, "checkpoint": "c", "on_epoch": lambda epoch, entry: seen.append(epoch)}
        run(recipe, label="site A", **options)
    assert not seen and store.load("c") is None


def test_weights_that_end_up_not_finite_are_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step comes after the last loss was taken."""
    monkeypatch.setattr(module._Work, "validate", lambda self, x, y: [torch.tensor(0.5), torch.tensor(1.0)])

    def epoch(self: Any, rng: Any, rate: float) -> torch.Tensor:
        next(iter(self.network.params.values())).detach().fill_(torch.nan)
        return torch.tensor(1.0)

    monkeypatch.setattr(module._Work, "epoch", epoch)
    with pytest.raises(MethodError, match="weights are not finite"):
        run()


def test_pack_round_trip() -> None:
    trained = run()
    assert same(trained, Trained.unpack(trained.pack()))


def test_best_epoch_is_kept_and_last_on_request() -> None:
    last = run(RECIPE.model_copy(update={"select": "last"}))
    assert last.best_epoch == 4
    best = run(RECIPE.model_copy(update={"select": "best"}))
    scores = [(e["val_accuracy"], -e["val_loss"]) for e in best.history]
    assert best.best_epoch == 1 + scores.index(max(scores))


@pytest.mark.parametrize("count", [1, 2, 8, 9, 17])
def test_batches_cover_everything_once_and_never_hold_one_image(count: int) -> None:
    batches = epoch_batches(count, 8, np.random.default_rng(0))
    assert all(len(batch) >= 2 for batch in batches)
    if count > 1:
        assert sorted(np.concatenate(batches)) == list(range(count))


@pytest.mark.parametrize("model", ["resnet8", "vgg8", "wrn16_2", "cnn"])
def test_one_image_trains_without_nan(model: str) -> None:
    network = models.build(model, 3, 3, 12)
    models.initialise(network, torch_rng(0, "init"))
    image = np.full((1, 12, 12, 3), 9, np.uint8)
    trained = train(network, model, image, np.array([1]), None, RECIPE, seed=0, stream=("t",))
    assert all(torch.isfinite(value.float()).all() for value in trained.state.values())
    assert (trained.train_images, trained.val_images) == (1, 0)


def test_validation_split_keeps_patients_whole() -> None:
    rng = np.random.default_rng(0)
    patients = rng.integers(0, 9, 60).astype(str)
    train_rows, val_rows = split_validation(np.zeros(60, int), patients, 0.3, rng)
    assert sorted([*train_rows, *val_rows]) == list(range(60))
    assert not set(patients[train_rows]) & set(patients[val_rows])
    assert 0 < len(val_rows) <= 18


def test_validation_split_with_one_patient_trains_on_it() -> None:
    rows, held = split_validation(np.zeros(20, int), np.full(20, "p"), 0.5, np.random.default_rng(0))
    assert (len(rows), len(held)) == (20, 0)


def test_symmetries_are_the_eight_of_the_square() -> None:
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    expected = {
        tuple(torch.rot90(side, turns, dims=(2, 3)).flatten().tolist())
        for side in (image, image.flip(3))
        for turns in range(4)
    }
    out = turn_and_mirror(image.repeat(8, 1, 1, 1), torch.arange(8))
    assert torch.equal(out[0], image[0])
    assert {tuple(row.flatten().tolist()) for row in out} == expected


# --- balanced softmax -------------------------------------------------------------------------------------


def test_the_shift_is_the_log_of_the_class_mix() -> None:
    found = balancing_shift(torch.tensor([2, 0, 0, 0, 2, 0]), 4)
    assert found.exp().tolist() == pytest.approx([4 / 6, 0, 2 / 6, 0])
    assert found[1] == -torch.inf and found[3] == -torch.inf
    assert balancing_shift(torch.tensor([1, 1]), 2).tolist() == [-torch.inf, 0]


@pytest.mark.usefixtures("float64")
def test_a_class_that_the_client_lacks_is_neither_learnt_nor_pushed_down() -> None:
    client = tiny_clients(1)[0]
    labels = np.where(client.labels == 1, 2, client.labels)
    start = {name: value.clone() for name, value in fresh().state_dict().items()}
    heads = {}
    for loss in ("cross_entropy", "balanced"):
        recipe = Training(recipe="modern", epochs=2, batch_size=8, weight_decay=0.0, select="last", loss=loss)
        trained = train(fresh(), "resnet8", client.images, labels, None, recipe, seed=0, stream=("t",))
        heads[loss] = trained.state["head.weight"][1]
        assert all(np.isfinite(entry["val_loss"]) and np.isfinite(entry["train_loss"]) for entry in trained.history)
    torch.testing.assert_close(heads["balanced"], start["head.weight"][1], rtol=0, atol=0)
    assert not torch.allclose(heads["cross_entropy"], start["head.weight"][1])


def test_a_class_of_the_validation_images_only_does_not_count_as_absent() -> None:
    client = tiny_clients(1)[0]
    held = split_validation(client.labels, None, 0.1, module.numpy_rng(0, "t", "validation-split"))[1]
    labels = np.zeros_like(client.labels)
    labels[held[0]] = 2
    recipe = RECIPE.model_copy(update={"loss": "balanced"})
    trained = train(fresh(), "resnet8", client.images, labels, None, recipe, seed=0, stream=("t",))
    assert all(np.isfinite(entry["val_loss"]) for entry in trained.history)


def test_one_class_leaves_nothing_to_learn_and_ends_well() -> None:
    client = tiny_clients(1)[0]
    recipe = RECIPE.model_copy(update={"loss": "balanced"})
    labels = np.full_like(client.labels, 1)
    trained = train(fresh(), "resnet8", client.images, labels, None, recipe, seed=0, stream=("t",))
    assert all(entry["train_loss"] == 0 and entry["val_accuracy"] == 1 for entry in trained.history)
    assert all(torch.isfinite(value.float()).all() for value in trained.state.values())


def test_balanced_training_resumes_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    recipe, store = RECIPE.model_copy(update={"loss": "balanced"}), MemoryStore()
    whole = run(recipe)

    def kill(epoch: int, entry: dict[str, Any]) -> None:
        if epoch == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(recipe, store=store, checkpoint="c", on_epoch=kill)
    assert same(whole, run(recipe, store=store, checkpoint="c"))
    assert not same(whole, run())
