from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbicross.context import Context
from fedbicross.errors import MethodError, UploadError
from fedbicross.federation import pooled, simulate
from fedbicross.messages import Client, Upload
from fedbicross.methods import create
from fedbicross.parts.pooled import features
from small import dealt, refuses, tiny_clients, tiny_context, with_tensor

TINY = {"fedcgs": {"encoder": "tiny"}}


def head(clients: list[Client], ctx: Context, spec: str) -> dict[str, torch.Tensor]:
    method = create(spec, TINY)
    uploads = [Upload.unpack(method.upload(client, ctx).pack()) for client in clients]  # the bytes that travel
    return dict(method.fuse(uploads, ctx)[0].tensors)


@pytest.mark.parametrize("spec", ["fedcgs", "fedcgs:within"])
def test_any_partition_of_the_same_images_gives_the_same_classifier(spec: str) -> None:
    ctx = tiny_context()
    everyone = pooled(tiny_clients(3, per_client=30))
    whole = head([everyone], ctx, spec)
    rng = np.random.default_rng(0)
    partitions = [rng.integers(0, 5, 90), np.sort(rng.integers(0, 3, 90)), everyone.labels, np.arange(90)]
    for owner in partitions:  # random, contiguous, one class each, one image each
        split = head(dealt(everyone, owner), ctx, spec)
        for name in ("weight", "bias"):  # relative: with fewer images than features, weights reach thousands
            largest = float(whole[name].abs().max())
            # One step of float32, which features have: which way a tie is rounded depends on the processor.
            assert float((split[name] - whole[name]).abs().max()) <= 2**-23 * max(largest, 1)


def test_the_model_is_the_gaussian_classifier_of_the_pooled_features() -> None:
    ctx = tiny_context()
    clients = tiny_clients(3, per_client=40)
    predictor = simulate(create("fedcgs", TINY), clients, ctx)["client-0"]
    everyone = pooled(clients)
    config = create("fedcgs", TINY).config
    x = features(config, everyone, ctx).double().numpy()
    sigma = np.cov(x.T)
    sigma += 1e-3 * np.trace(sigma) / len(sigma) * np.eye(len(sigma))
    inverse = np.linalg.inv(sigma)
    scores = []
    for c in range(3):
        mean = x[everyone.labels == c].mean(0)
        scores.append(x @ inverse @ mean - 0.5 * mean @ inverse @ mean + np.log((everyone.labels == c).mean()))
    logits = np.stack(scores, 1)
    expected = np.exp(logits - logits.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    found = predictor.probabilities(everyone.images)
    assert np.abs(found - expected).max() < 1e-3
    assert (found.argmax(1) == everyone.labels).mean() > 0.9


def test_classes_that_nobody_has_and_a_class_with_one_image() -> None:
    clients = tiny_clients(2)
    lonely = Client("lonely", clients[0].images[:1], np.array([4]))
    ctx = tiny_context(classes=6)
    method = create("fedcgs", TINY)
    answers = simulate(method, [*clients, lonely], ctx)["lonely"].probabilities(clients[0].images)
    assert np.isfinite(answers).all()
    assert np.all(answers[:, [3, 5]] == 0)
    ctx = tiny_context(classes=6)
    method.upload(lonely, ctx)
    assert "one image of class-4" in ctx.record.warnings[0]


def test_local_prior_moves_the_answers_to_what_the_client_sees() -> None:
    clients = tiny_clients(2, per_client=60)
    skewed = Client("skewed", clients[0].images, np.where(clients[0].labels == 2, 2, 2))
    ctx = tiny_context()
    plain = simulate(create("fedcgs", TINY), [*clients, skewed], ctx)["skewed"]
    moved = simulate(create("fedcgs:local_prior", TINY), [*clients, skewed], replace(ctx, scope="seed-0/local"))[
        "skewed"
    ]
    assert moved.probabilities(clients[1].images)[:, 2].mean() > plain.probabilities(clients[1].images)[:, 2].mean()


def test_the_mean_over_windows_is_what_the_predictor_computes() -> None:
    clients = tiny_clients(2, per_client=40)
    ctx = tiny_context()
    method = create("fedcgs:hierarchy", TINY)
    predictor = simulate(method, clients, ctx)["client-0"]
    x = features(method.config, clients[0], ctx)
    state = predictor.states[0]
    expected = torch.softmax(x @ state["head.weight"].T + state["head.bias"], 1).numpy()
    assert np.abs(predictor.probabilities(clients[0].images) - expected).max() < 1e-3


def good(ctx: Context) -> Upload:
    return create("fedcgs", TINY).upload(tiny_clients(1)[0], ctx)


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("tensor_names", lambda u: with_tensor(u, "images", torch.zeros(3))),
        ("tensor_names", lambda u: replace(u, tensors={})),
        ("tensor_type", lambda u: with_tensor(u, "gram", u.tensors["gram"].float())),
        ("tensor_type", lambda u: with_tensor(u, "gram", u.tensors["gram"][None])),
        ("tensor_shape", lambda u: with_tensor(u, "gram", u.tensors["gram"][:-1])),
        ("tensor_shape", lambda u: with_tensor(u, "class_sums", u.tensors["class_sums"][:2])),
        ("tensor_shape", lambda u: with_tensor(u, "class_sums", torch.zeros(3, 0, dtype=torch.float64))),
        ("non_finite", lambda u: with_tensor(u, "class_sums", u.tensors["class_sums"] * float("nan"))),
        ("bad_counts", lambda u: replace(u, class_counts=None)),
        ("bad_counts", lambda u: replace(u, class_counts=[1, 2])),
        ("bad_counts", lambda u: replace(u, class_counts=[1, 2, -3])),
        ("bad_counts", lambda u: replace(u, class_counts=[1, 2, 2.5])),
        ("bad_counts", lambda u: replace(u, class_counts=[1, 2, 10**30])),
        ("bad_statistics", lambda u: replace(u, class_counts=[0, *u.class_counts[1:]])),
        ("bad_statistics", lambda u: with_tensor(u, "gram", -u.tensors["gram"])),
        ("bad_statistics", lambda u: with_tensor(u, "class_sums", u.tensors["class_sums"] * 10)),
    ],
)
def test_what_no_images_could_have_given_is_refused(code: str, spoil) -> None:
    ctx = tiny_context()
    upload = good(ctx)
    create("fedcgs", TINY).check_upload(upload)
    with refuses(UploadError, code):
        create("fedcgs", TINY).check_upload(spoil(upload))


def test_encoders_are_not_mixed_and_somebody_needs_an_image() -> None:
    ctx = tiny_context()
    upload = good(ctx)
    other = replace(upload, client="other", extra={"encoder": {**upload.extra["encoder"], "digest": "0" * 64}})
    with refuses(UploadError, "encoder_mismatch"):
        create("fedcgs", TINY).fuse([upload, other], ctx)
    nothing = replace(
        upload,
        class_counts=[0, 0, 0],
        tensors={name: torch.zeros_like(value) for name, value in upload.tensors.items()},
    )
    with pytest.raises(MethodError, match="no client has an image"):
        create("fedcgs", TINY).fuse([nothing], ctx)
