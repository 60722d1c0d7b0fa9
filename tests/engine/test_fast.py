"""The fast path, walked on the CPU: same code as on a GPU but for compilation, recording and streams.

What a GPU alone can show (recorded steps, streams) is in tests/steps/test_cuda.py and in benchmarks/gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbicross import models
from fedbicross.context import Context
from fedbicross.engine import ensemble as ensemble_module
from fedbicross.engine import fast as fast_path
from fedbicross.engine import norm as norm_module
from fedbicross.engine.ensemble import Ensemble
from fedbicross.engine.fast import Captured, prefetch, recorded, run_on_streams, scalar, worth_compiling
from fedbicross.engine.norm import Pass, matched
from fedbicross.federation import simulate
from fedbicross.methods import create
from fedbicross.parts.replay import Replay
from fedbicross.parts.teachers import load_teacher
from fedbicross.steps.inversion import Inversion, InversionSettings, balanced_labels
from fedbicross.steps.teachers import logits_and_bn_loss_of
from small import TINY_METHODS, tiny_clients, tiny_context
from steps.tiny import Tiny, noise, randomised


def both(precision: str = "fp32") -> tuple[Ensemble, Ensemble]:
    clients = [randomised(Tiny(), 0), randomised(Tiny(width=6), 1), randomised(Tiny(), 2)]
    if precision == "bf16":
        clients = [client.float() for client in clients]
    return Ensemble(clients, precision), Ensemble(clients, precision, fast=True)


def test_every_pass_equals_the_plain_one_in_float64() -> None:
    plain, fast = both()
    x = noise(8, 3, 6, 6)
    for name in ("logits", "batch_logits"):
        torch.testing.assert_close(getattr(fast, name)(x), getattr(plain, name)(x), rtol=0, atol=1e-10)
    for batches in (1, 2):
        ours, theirs = fast.batch_logits(x, batches), plain.batch_logits(x, batches)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    halves = torch.cat([plain.batch_logits(part) for part in (x[:4], x[4:])], dim=1)
    torch.testing.assert_close(fast.batch_logits(x, 2), halves, rtol=0, atol=1e-10)
    values = []
    for ensemble in (plain, fast):
        leaf = x.clone().requires_grad_(True)
        logits, bn = ensemble.logits_and_bn_loss(leaf)
        (gradient,) = torch.autograd.grad(logits.square().sum() + bn.sum(), leaf)
        values.append((logits.detach(), bn.detach(), gradient))
    for ours, theirs in zip(*values, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_variance_in_one_pass_survives_a_mean_far_from_zero() -> None:
    """E[x²] − E[x]² would lose every digit here; about the stored mean nothing is lost."""
    model = models.build("resnet8", 3, 3, 12)
    models.initialise(model, torch.Generator().manual_seed(0))
    first = next(m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d))
    conv = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d))
    with torch.no_grad():
        conv.weight.abs_()
    x = 1000 + torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        first.running_mean.copy_(conv(x).mean((0, 2, 3)))
    plain, fast = Ensemble([model.double()]), Ensemble([model.float()], fast=True)
    torch.testing.assert_close(
        fast.logits_and_bn_loss(x)[1].double(), plain.logits_and_bn_loss(x.double())[1], rtol=1e-3, atol=0
    )


def test_bf16_weights_are_kept_and_statistics_stay_wide() -> None:
    _, fast = both("bf16")
    model = fast._clients[0].model
    kinds = {type(m).__name__: {p.dtype for p in m.parameters(recurse=False)} for m in model.modules()}
    assert kinds["FastConv2d"] == {torch.bfloat16}
    assert all(b.dtype == torch.float32 for b in model.buffers() if b.is_floating_point())
    plain, _ = both("fp32")
    x = noise(64, 3, 6, 6).float()
    exact = Ensemble([randomised(Tiny(), 0).float()])
    close = Ensemble([randomised(Tiny(), 0).float()], "bf16", fast=True)
    difference = (exact.logits(x) - close.logits(x)).norm() / exact.logits(x).norm()
    assert 0 < float(difference) < 0.03  # bf16 has eight bits
    assert plain is not fast


def test_a_synthesis_ends_at_the_same_images() -> None:
    settings = InversionSettings(steps=6, batch=8)
    ends = []
    for ensemble in both():
        rng = torch.Generator().manual_seed(0)
        run = Inversion.start(ensemble, balanced_labels(8, 4), (3, 6, 6), settings, rng, torch.float64)
        for _ in range(6):
            run.step()
        ends.append(run.images)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-8)


class Counter:
    """A source of numbers that knows its place."""

    def __init__(self, last: int) -> None:
        self.done, self.last = 0, last

    def tensors(self) -> dict[str, Tensor]:
        return {"done": torch.tensor(self.done)}

    def __iter__(self) -> Any:
        while self.done < self.last:
            self.done += 1
            yield (torch.tensor(self.done),)


@pytest.mark.parametrize("fast", [False, True])
def test_ahead_hands_out_everything_in_order_with_its_place(fast: bool) -> None:
    source = prefetch(Counter(5), fast)
    seen = [(int(item[0]), int(source.tensors()["done"])) for item in source]
    assert seen == [(n, n) for n in range(1, 6)]


def test_nothing_shares_a_gpu_where_torch_cannot_clear_its_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "_clear_workspaces", lambda: None)
    assert fast_path.at_once("cuda") and not fast_path.at_once("cuda", jobs=1) and not fast_path.at_once("cpu")
    monkeypatch.setattr(fast_path, "_clear_workspaces", None)
    assert not fast_path.at_once("cuda")


def test_jobs_on_streams_keep_their_order() -> None:
    assert run_on_streams([lambda n=n: n * n for n in range(20)], "cpu") == [n * n for n in range(20)]


def test_without_a_gpu_a_captured_function_is_called() -> None:
    total = torch.zeros(())
    step = Captured(lambda x, lr: [total.add_(x.sum() * lr)], [total])
    step(torch.ones(3), scalar(2.0, "cpu"))
    step(torch.ones(3), scalar(2.0, "cpu"))
    assert float(total) == 12


def test_a_step_is_recorded_once_under_its_name_and_only_where_it_should_be() -> None:
    kept: dict[str, Any] = {}
    step = lambda x: [x + 1]  # noqa: E731
    assert recorded(kept, "a", step, [], fast=False) is step and not kept
    first, again, other = (recorded(kept, key, step, [], fast=True) for key in "aab")
    assert first is again and first is not other and isinstance(first, Captured)
    assert float(first(torch.zeros(()))[0]) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("spec", ["local_only", "fedisca", "e_fedisca", "fedbicross", "primum"])
def test_a_whole_method_ends_with_the_same_networks(spec: str) -> None:
    """Rounding differs in the last digits (statistics in one pass), and training repeats it a few times."""
    ends = []
    for fast in (False, True):
        ctx: Context = replace(tiny_context(), fast=fast)
        predictors = simulate(create(spec, {spec: TINY_METHODS.get(spec, {})}), tiny_clients(3), ctx)
        ends.append([value for p in predictors.values() for state in p.states for _, value in sorted(state.items())])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_passes_that_are_not_compiled_equal_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    matchings = []
    monkeypatch.setattr(norm_module, "matched", lambda *given: matchings.append(matched(*given)) or matchings[-1])
    plain, fast = both()
    fast.compile = ()
    x = noise(8, 3, 6, 6)
    torch.testing.assert_close(fast.batch_logits(x, 2), plain.batch_logits(x, 2), rtol=0, atol=1e-10)
    found = []
    for ensemble in (fast, plain):
        leaf = x.clone().requires_grad_(True)
        logits, terms = ensemble.logits_and_bn_loss(leaf)
        (gradient,) = torch.autograd.grad(logits.square().sum() + terms.sum(), leaf)
        found.append((logits.detach(), terms.detach(), gradient))
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)
    assert len(matchings) == 3 * 2  # clients and layers: it did take the other way


@pytest.mark.parametrize("compile_all", [False, True])
def test_a_grouped_step_keeps_no_activations(compile_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint makes a group's activations again, and stops in the middle of the pass."""
    monkeypatch.setattr(ensemble_module, "_PASSES", {})  # so that the passes are those of these clients
    _, fast = both()
    fast.at_once, fast.compile = 1, fast.compile if compile_all else ()
    leaf = noise(8, 3, 6, 6).requires_grad_(True)
    logits, terms = logits_and_bn_loss_of(fast, leaf)
    torch.autograd.grad(logits.square().sum() + terms.sum(), leaf)
    assert all(vars(client.current) == vars(Pass()) for client in fast._clients)


def test_only_what_is_asked_for_often_is_compiled() -> None:
    assert worth_compiling({"match": 24_999, "batch": 25_000}) == {"batch"}
    assert worth_compiling({"match": 25_000, "batch": 0, "student": 1_000_000}) == {"match", "student"}


def test_clients_of_one_architecture_share_a_compilation() -> None:
    _, fast = both()
    fast.expect(["resnet18", "resnet18", "vgg8"], {"match": 12_500, "batch": 12_499})
    assert fast.compile == {"match"}
    fast.expect(["resnet18", "resnet8", "vgg8"], {"match": 12_500})
    assert not fast.compile and not fast.subset([0]).compile


def test_a_pass_is_compiled_once_for_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(fast_path, "compiled", lambda f: torch.compile(f, backend=backend, fullgraph=True))
    monkeypatch.setattr(ensemble_module, "_PASSES", {})
    clients = [randomised(Tiny(), seed) for seed in range(3)]
    plain, fast, x = Ensemble(clients), Ensemble(clients, fast=True), noise(8, 3, 6, 6)
    for name in ("batch_logits", "logits_and_bn_loss"):
        ours, theirs = getattr(fast, name)(x), getattr(plain, name)(x)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    assert len(graphs) == 2  # one for each kind of pass


def test_generators_compile_only_where_that_pays() -> None:
    ctx = replace(tiny_context(), fast=True)
    uploads = [create("dense").upload(client, ctx) for client in tiny_clients(5)]
    long, short = create("dense"), create("dense", {"dense": {"epochs": 2}})
    kinds = [Replay("dense", method.config, uploads, ctx).ensemble.compile for method in (long, short)]
    assert kinds == [{"match", "stored", "features"}, set()]


def test_statistics_for_the_adapted_teacher_are_measured_in_bf16_too() -> None:
    plain, fast = (
        Ensemble([randomised(Tiny(), 0).float()]),
        Ensemble([randomised(Tiny(), 0).float()], "bf16", fast=True),
    )
    x = noise(64, 3, 6, 6).float()
    found = [e.update_statistics(e.initial_statistics(), x, 0.5)[0]["block.1"] for e in (plain, fast)]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == torch.float32 and float((ours - theirs).norm() / theirs.norm()) < 0.03
    adapted = fast.adapted_logits(x, fast.update_statistics(fast.initial_statistics(), x, 0.5))
    assert adapted.dtype == torch.float32 and adapted.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("fedbicross", set()),  # 500 steps of five clients: over before anything would be compiled
        ("fedbicross:repeated", {"match", "batch", "stored"}),
        ("fedisca", {"match", "batch", "stored"}),
        ("fedisca:no_synthesis", {"batch", "stored"}),
        ("e_fedisca", {"batch", "stored"}),  # one synthesis only
        ("e_fedisca:no_synthesis", {"batch", "stored"}),
    ],
)
def test_what_a_method_compiles_at_the_papers_settings(spec: str, expected: set[str]) -> None:
    ctx, clients = replace(tiny_context(size=8, epochs=1), fast=True), tiny_clients(5, per_client=4, size=8)
    method: Any = create(spec)
    uploads = [method.upload(client, ctx) for client in clients]
    assert load_teacher(method.config, spec, uploads, ctx).ensemble.compile == expected
