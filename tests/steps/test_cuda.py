"""The steps on a GPU: the same numbers as on the CPU, and no step that waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from fedbicross import models as architectures
from fedbicross.engine import combine
from fedbicross.engine.device import set_precision
from fedbicross.engine.ensemble import Ensemble
from fedbicross.engine.fast import Captured
from fedbicross.steps import adaptation, bilevel, clustering, distill, inversion
from fedbicross.steps import noise as structured
from fedbicross.steps.inversion import Inversion, InversionSettings

from .tiny import Tiny, noise, randomised

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any operation that makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ensembles() -> tuple[Ensemble, Ensemble]:
    models = [randomised(Tiny(), 0), randomised(Tiny(width=6), 1)]
    on_cpu = Ensemble(models)
    return on_cpu, Ensemble([model.cuda() for model in models])


def test_ensemble_and_adaptation_give_the_cpu_numbers() -> None:
    on_cpu, on_gpu = ensembles()
    x = noise(8, 3, 6, 6)
    trajectory = [noise(8, 3, 6, 6, seed=t) for t in range(3)]
    with no_waiting():
        gpu_trajectory = [batch.pin_memory().cuda(non_blocking=True) for batch in trajectory]
        on_device = x.pin_memory().cuda(non_blocking=True)
        logits, bn = on_gpu.logits_and_bn_loss(on_device)
        batch_logits = on_gpu.batch_logits(on_device)
        adapted = on_gpu.adapted_logits(on_device, adaptation.adapt(on_gpu, gpu_trajectory))
    torch.testing.assert_close(logits.cpu(), on_cpu.logits(x))
    torch.testing.assert_close(bn.cpu(), on_cpu.logits_and_bn_loss(x)[1])
    torch.testing.assert_close(batch_logits.cpu(), on_cpu.batch_logits(x))
    torch.testing.assert_close(adapted.cpu(), on_cpu.adapted_logits(x, adaptation.adapt(on_cpu, trajectory)))


def test_inversion_gives_the_cpu_numbers_without_waiting() -> None:
    on_cpu, on_gpu = ensembles()
    chosen = InversionSettings(steps=5, batch=8)
    labels = inversion.balanced_labels(8, 4)
    cpu_run = Inversion.start(on_cpu, labels, (3, 6, 6), chosen, torch.Generator().manual_seed(0), torch.float64)
    state = {name: tensor.cuda() for name, tensor in cpu_run.tensors().items()}
    gpu_run = Inversion(on_gpu, chosen, state)
    with no_waiting():
        for _ in range(5):
            gpu_run.step()
        structured_value = inversion.structure(gpu_run.images)
    for _ in range(5):
        cpu_run.step()
    torch.testing.assert_close(gpu_run.images.cpu(), cpu_run.images, rtol=0, atol=1e-8)
    assert structured_value.isfinite()
    own = Inversion.start(on_gpu, labels, (3, 6, 6), chosen, torch.Generator("cuda").manual_seed(0), torch.float64)
    assert own.step().total.isfinite()


def test_distillation_and_weights_do_not_wait() -> None:
    logits, student = noise(3, 8, 4).cuda(), noise(8, 4, seed=1).cuda()
    counts = torch.randint(0, 9, (3, 4), device="cuda")
    weights = combine.class_weights(counts)
    w = bilevel.cross_cluster_weights("uniform", 3, device="cuda").double()
    with no_waiting():
        original = combine.combine_logits(logits, "mean_logits", 20.0)
        adapted = combine.combine_logits(logits, "class_weighted", 20.0, weights)
        loss = distill.mixed_kd_loss(student, original, adapted, 0.3, 20.0)
        gradient = bilevel.hypergradient([student], [torch.stack([student, -student, student])], 0.1)
        rows = bilevel.weight_step(w, gradient, 0.5)
        mirror = bilevel.weight_step(w, gradient, 0.5, "mirror")
    assert loss.isfinite() and torch.allclose(rows.sum(1), torch.ones_like(rows[0]))
    assert mirror.isfinite().all()
    assert bilevel.cross_cluster_weights("similarity", 3, noise(3, 5).cuda()).shape == (3, 3)


@pytest.mark.parametrize("kind", ["pink", "dead_leaves", "oriented"])
def test_noise_is_made_on_the_device_and_is_reproducible(kind: structured.NoiseKind) -> None:
    first, again = (
        structured.structured_noise(kind, (4, 3, 28, 28), torch.Generator("cuda").manual_seed(5)) for _ in range(2)
    )
    assert first.is_cuda and torch.equal(first, again)
    assert first.min() >= -1 and first.max() <= 1 and first.std() > 0.3


def test_memory_keeps_its_rule_without_waiting() -> None:
    memory = structured.Memory(3)
    losses = torch.tensor([90.0, 10.0, 80.0, 20.0, 70.0], device="cuda")
    batches = torch.arange(5.0, device="cuda").view(5, 1, 1, 1, 1).expand(5, 2, 1, 2, 2)
    memory.add(batches[0], losses[0])
    with no_waiting():
        for step in range(1, 5):
            memory.add(batches[step], losses[step])
    assert memory.batches()[:, 0, 0, 0, 0].tolist() == [4, 1, 3]


def test_clustering_takes_device_tensors() -> None:
    _, on_gpu = ensembles()
    features = clustering.prediction_matrix(on_gpu, noise(6, 3, 6, 6).cuda())
    assert clustering.cluster(features, 2, 0).labels == (0, 1)
    assert clustering.choose_k(features, 2, 0).k in (1, 2)
    assert clustering.soft_label_entropy(features.view(2, 6, 4)).isfinite()
    images = noise(6, 3, 4, 4).cuda()
    signature = clustering.subspace_signature(images, torch.arange(6).cuda() % 2)
    assert clustering.pacfl([signature, signature], k=1).labels == (0, 0)


@pytest.mark.parametrize(("precision", "off"), [("fp32", 1e-4), ("bf16", 0.03)])
def test_every_way_to_make_a_pass_says_the_same(precision: str, off: float) -> None:
    """Folded, as it is, and compiled, each recorded, against the plain pass in fp32."""
    networks = [randomised(architectures.build("resnet8", 3, 8, 28), seed).float().cuda() for seed in (0, 1)]
    x = noise(16, 3, 28, 28).float().cuda()

    def passes(ensemble: Ensemble, x: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_(True)
        logits, terms = ensemble.logits_and_bn_loss(leaf)
        (gradient,) = torch.autograd.grad(logits.square().mean() + terms.sum(), leaf)
        with torch.no_grad():
            return [ensemble.logits(x), ensemble.batch_logits(x, 2), logits.detach(), terms.detach(), gradient]

    try:
        set_precision("fp32")
        expected = passes(Ensemble(networks), x)
        for compiled in (False, True):
            fast = Ensemble(networks, precision, fast=True)
            fast.compile = fast.compile if compiled else ()
            assert all(client.fused is not None for client in fast._clients)
            recorded = Captured(partial(passes, fast))
            for found in (recorded(x), recorded(x)):  # as recorded, and again
                apart = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
                assert max(apart[:-1]) < off, apart
                assert apart[-1] < 10 * off, apart  # the gradient: on a CPU 0.12 in bf16
    finally:
        set_precision("bf16")
