"""Training of small modules on frozen features: resumable, the best epoch kept, dropout from named streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbicross import models
from fedbicross.context import Context
from fedbicross.errors import MethodError
from fedbicross.parts.heads import Fit, fit_head, hold_out_rows, seeded
from small import Killed, Mortal, refuses, tiny_clients, tiny_context


def head_and_data(hidden: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (40,), generator=rng)
    tokens = torch.randn(40, 2, 6, generator=rng) + labels.view(-1, 1, 1)
    head = models.heads.build("attention", 6, 3, hidden, 0.3)
    models.initialise(head, torch.Generator().manual_seed(1))
    return head, tokens, labels


def trained(ctx: Context, epochs: int = 6, **options: Any) -> dict[str, Tensor]:
    head, tokens, labels = head_and_data()
    validation = (tokens[30:], labels[30:])
    fit_head(
        "h", head, tokens[:30], labels[:30], ctx, epochs=epochs, batch=8, lr=1e-2, validation=validation, **options
    )
    return head.state_dict()


def test_training_killed_anywhere_ends_with_the_same_bytes() -> None:
    before = torch.get_rng_state()
    whole = trained(tiny_context())
    for files in (1, 3, 5):
        store = Mortal(files)
        with pytest.raises(Killed):
            trained(replace(tiny_context(), store=store, seconds_between_stages=0.0))
        again = trained(replace(tiny_context(), store=store))  # a new context on the same store
        assert all(torch.equal(whole[name], again[name]) for name in whole), files
    assert torch.equal(before, torch.get_rng_state()), "dropout comes from named streams"


@pytest.mark.parametrize("optimiser", ["adam", "adamw", "sgd"])
def test_a_head_learns_with_every_optimiser(optimiser: str) -> None:
    head, tokens, labels = head_and_data()
    history = fit_head("h", head, tokens, labels, tiny_context(), epochs=15, batch=8, lr=1e-2, optimiser=optimiser)  # type: ignore[arg-type]
    assert history[-1] < history[0] and len(history) == 15 and not head.training


def test_the_best_epoch_on_validation_is_kept_or_the_last() -> None:
    ctx = tiny_context()
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)

    def loss(rows: Tensor, generator: torch.Generator) -> Tensor:
        return -module.weight.sum()  # grows by lr every step

    def fit(score: Callable[[], float] | None, name: str) -> float:
        nn.init.zeros_(module.weight)
        optimiser = torch.optim.SGD(module.parameters(), lr=1.0)
        Fit(name, module, optimiser, loss, 1, batch=1, epochs=5, ctx=ctx, score=score).run(name)
        return float(module.weight.detach())

    assert fit(None, "last") == 5
    assert fit(lambda: abs(float(module.weight.detach()) - 3), "best") == 3


def test_patience_stops_and_keeps_the_best() -> None:
    ctx, module = tiny_context(), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)

    def loss(rows: Tensor, generator: torch.Generator) -> Tensor:
        return (module.weight.sum() - 2).abs()  # down to 0 at step 2, then oscillates between 0 and 1

    fit = Fit(
        "p", module, torch.optim.SGD(module.parameters(), lr=1.0), loss, 1, batch=1, epochs=50, ctx=ctx, patience=4
    )
    assert len(fit.run("p")) == 7, "best in epoch 3, four more in vain"


def test_a_loss_that_explodes_is_named() -> None:
    module = nn.Linear(1, 1)
    fit = Fit(
        "bad",
        module,
        torch.optim.SGD(module.parameters(), lr=1.0),
        lambda rows, generator: module.weight.sum() * float("nan"),
        3,
        batch=2,
        epochs=2,
        ctx=tiny_context(),
    )
    with refuses(MethodError, "diverged", "no longer finite in epoch 1"):
        fit.run("bad")


def test_seeded_dropout_depends_on_the_stream_alone() -> None:
    def draw(seed: int) -> Tensor:
        with seeded(torch.Generator().manual_seed(seed)):
            return nn.functional.dropout(torch.ones(100), 0.5)

    before = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(before, torch.get_rng_state())


def test_split_is_the_same_for_all_and_whole_patients_stay_together() -> None:
    client = tiny_clients(1, per_client=40)[0]
    rows, held_out = hold_out_rows(client, tiny_context())
    assert sorted([*rows.tolist(), *held_out.tolist()]) == list(range(40)) and len(held_out) == 4
    assert torch.equal(rows, hold_out_rows(client, tiny_context())[0])
    people = np.array([f"p{i // 4}" for i in range(40)])
    rows, held_out = hold_out_rows(replace(client, patients=people), tiny_context())
    assert not set(people[rows.numpy()]) & set(people[held_out.numpy()]) and len(held_out)
