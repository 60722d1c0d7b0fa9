from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbicross.context import Context
from fedbicross.errors import MethodError, UploadError
from fedbicross.federation import simulate
from fedbicross.messages import Client, Upload
from fedbicross.methods import create
from fedbicross.methods.fedpft import FedPFT
from fedbicross.parts import pooled
from small import refuses, tiny_clients, tiny_context, with_tensor

TINY = {"fedpft": {"encoder": "tiny", "components": 3, "epochs": 30, "lr": 1e-2}}


class Known(FedPFT):
    """FedPFT on features given by the test instead of an encoder's: classes on a circle, two blobs each."""

    blobs = torch.tensor([[[6.0, 0], [0, 6.0]], [[-6.0, 0], [0, -6.0]], [[5.0, 5.0], [5.0, -5.0]]])


def known_features(client: Client, per_image: int = 2) -> torch.Tensor:
    rng = torch.Generator().manual_seed(int(client.labels.sum()) + len(client.labels))
    which = torch.randint(2, (len(client.labels),), generator=rng)
    centre = Known.blobs[torch.from_numpy(client.labels), which]
    return centre + 0.5 * torch.randn(len(client.labels), per_image, generator=rng)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled, "features", lambda config, client, ctx: known_features(client))


def many(count: int = 2, per_client: int = 600) -> list[Client]:
    rng = np.random.default_rng(0)
    images = np.zeros((per_client, 8, 8, 3), np.uint8)
    return [Client(f"client-{i}", images, rng.integers(0, 3, per_client)) for i in range(count)]


def test_known_mixtures_are_recovered(known: None) -> None:
    method = create("fedpft", {"fedpft": {"encoder": "tiny", "components": 2, "tolerance": 1e-6}})
    upload = method.upload(many(1)[0], tiny_context(size=8))
    for label in range(3):
        mine = upload.tensors["classes"] == label
        means = upload.tensors["means"][mine]
        distance = torch.cdist(means, Known.blobs[label]).min(1).values
        assert len(means) == 2
        assert float(distance.max()) < 0.15
        assert torch.allclose(upload.tensors["weights"][mine], torch.tensor([0.5, 0.5]), atol=0.08)
        assert torch.allclose(upload.tensors["scales"][mine], torch.tensor(0.5), atol=0.12)


@pytest.mark.slow
def test_the_head_is_about_as_good_as_one_trained_on_the_real_features(known: None) -> None:
    ctx, clients = tiny_context(size=8), many()
    method = create("fedpft", {"fedpft": {"encoder": "tiny", "components": 2, "epochs": 20, "lr": 1e-2}})
    reply = method.fuse([method.upload(client, ctx) for client in clients], ctx)[0]
    from sklearn.linear_model import LogisticRegression

    x = torch.cat([known_features(client) for client in clients]).numpy()
    y = np.concatenate([client.labels for client in clients])
    central = LogisticRegression(max_iter=1000).fit(x, y).score(x, y)
    answers = x @ reply.tensors["weight"].numpy().T + reply.tensors["bias"].numpy()
    assert (answers.argmax(1) == y).mean() > central - 0.03


def test_a_federation_learns_on_encoded_images() -> None:
    ctx, clients = tiny_context(), tiny_clients(3, per_client=40)
    predictor = simulate(create("fedpft", TINY), clients, ctx)["client-1"]
    assert (predictor.probabilities(clients[0].images).argmax(1) == clients[0].labels).mean() > 0.8


def test_no_real_feature_leaves() -> None:
    client = tiny_clients(1, per_client=60)[0]
    ctx = tiny_context()
    for components in (1, 20, 1000):
        method = create("fedpft", {"fedpft": {"encoder": "tiny", "components": components, "samples_per_component": 1}})
        upload = method.upload(client, ctx)
        real = pooled.features(method.config, client, ctx)
        sent = upload.tensors["means"]
        assert float(torch.cdist(sent.double(), real.double()).min()) > 1e-3
        drawn, _ = method.synthetic_tokens(upload, ctx)
        assert float(torch.cdist(drawn[:, 0].double(), real.double()).min()) > 0


def test_rare_absent_and_identical_classes() -> None:
    first, second = tiny_clients(2, per_client=30)
    labels = np.where(first.labels == 2, 0, first.labels)
    labels[0] = 2  # one image only
    rare = Client("rare", first.images, labels)
    same = Client("same", np.repeat(second.images[:1], 30, 0), np.full(30, 3))  # thirty times one image
    ctx = tiny_context(classes=5)
    method = create("fedpft", TINY)
    upload = method.upload(rare, ctx)
    assert upload.class_counts[2] == 0
    assert 2 not in upload.tensors["classes"].tolist()
    assert "too few images of class-2" in ctx.record.warnings[0]
    allowed = create("fedpft", {"fedpft": {**TINY["fedpft"], "smallest_group": 1}})
    assert 2 in allowed.upload(rare, ctx).tensors["classes"].tolist()
    answers = simulate(method, [rare, same], ctx)["rare"].probabilities(first.images)
    assert np.isfinite(answers).all()
    assert np.all(answers[:, [2, 4]] == 0)


def test_a_client_too_small_to_send_anything() -> None:
    first, second = tiny_clients(2, per_client=30)
    lone = Client("lone", first.images[:1], first.labels[:1])
    ctx, method = tiny_context(), create("fedpft", TINY)
    empty = Upload.unpack(method.upload(lone, ctx).pack())
    assert not empty.tensors and not any(empty.class_counts)
    predictors = simulate(method, [lone, second], ctx)
    assert np.isfinite(predictors["lone"].probabilities(second.images)).all()
    with refuses(MethodError, "nothing_sent"):
        method.fuse([empty], ctx)


def test_counts_from_a_stranger_do_not_decide_how_much_is_drawn() -> None:
    ctx = tiny_context()
    method = create("fedpft", {"fedpft": {**TINY["fedpft"], "most_samples": 50}})
    upload = method.upload(tiny_clients(1)[0], ctx)
    claims = replace(upload, class_counts=[10**12 if n else 0 for n in upload.class_counts])
    assert len(method.synthetic_tokens(claims, ctx)[1]) == 50 * sum(n > 0 for n in upload.class_counts)


@pytest.mark.parametrize("spec", ["fedpft", "fedpft:spherical", "fedpft:full"])
def test_half_precision_halves_the_upload_and_stays_positive(spec: str) -> None:
    ctx, client = tiny_context(), tiny_clients(1)[0]
    half = create(spec, {"fedpft": {**TINY["fedpft"], "precision": "float16"}})
    upload = Upload.unpack(half.upload(client, ctx).pack())
    half.check_upload(upload)
    single = create(spec, TINY).upload(client, ctx)
    assert 2 * upload.tensors["means"].nbytes == single.tensors["means"].nbytes


def test_features_too_large_for_half_precision_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    method = create("fedpft", {"fedpft": {**TINY["fedpft"], "precision": "float16"}})
    monkeypatch.setattr(pooled, "features", lambda config, client, ctx: known_features(client) * 1e6)
    with refuses(MethodError, "overflow"):
        method.upload(many(1)[0], tiny_context(size=8))


def tensor(upload: Upload, name: str) -> torch.Tensor:
    return upload.tensors[name].clone()


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("tensor_names", lambda u: with_tensor(u, "features", torch.zeros(3))),
        ("tensor_type", lambda u: with_tensor(u, "means", tensor(u, "means").double())),
        ("tensor_type", lambda u: with_tensor(u, "classes", tensor(u, "classes").float())),
        ("tensor_shape", lambda u: with_tensor(u, "scales", tensor(u, "scales")[:, :-1])),
        ("tensor_shape", lambda u: with_tensor(u, "weights", tensor(u, "weights")[:-1])),
        ("tensor_shape", lambda u: with_tensor(u, "means", torch.zeros(1000, 4))),
        ("tensor_shape", lambda u: with_tensor(u, "means", torch.zeros(3, 0))),
        ("non_finite", lambda u: with_tensor(u, "means", tensor(u, "means") / 0)),
        ("bad_scale", lambda u: with_tensor(u, "scales", -tensor(u, "scales"))),
        ("bad_scale", lambda u: with_tensor(u, "scales", 0 * tensor(u, "scales"))),
        ("bad_weights", lambda u: with_tensor(u, "weights", tensor(u, "weights") * 2)),
        (
            "bad_weights",
            lambda u: with_tensor(u, "weights", torch.tensor([-1.0, 2.0] + [1.0] * 10)[: len(u.tensors["weights"])]),
        ),
        ("bad_classes", lambda u: with_tensor(u, "classes", tensor(u, "classes") + 7)),
        ("bad_classes", lambda u: with_tensor(u, "classes", tensor(u, "classes") - 7)),
        ("bad_counts", lambda u: replace(u, class_counts=[0, *u.class_counts[1:]])),
        ("bad_counts", lambda u: replace(u, class_counts=[-1, *u.class_counts[1:]])),
        ("bad_counts", lambda u: replace(u, class_counts=["many", *u.class_counts[1:]])),
    ],
)
def test_what_is_no_mixture_is_refused(code: str, spoil) -> None:
    method = create("fedpft", TINY)
    upload = method.upload(tiny_clients(1)[0], tiny_context())
    method.check_upload(upload)
    with refuses(UploadError, code):
        method.check_upload(spoil(upload))


def test_a_full_covariance_needs_a_positive_diagonal_only() -> None:
    ctx: Context = tiny_context()
    method = create("fedpft:full", TINY)
    upload = method.upload(tiny_clients(1)[0], ctx)
    assert bool((upload.tensors["scales"] < 0).any())  # off the diagonal
    method.check_upload(upload)
    spoiled = tensor(upload, "scales")
    spoiled[0, 0] = -1
    with pytest.raises(UploadError, match="not positive"):
        method.check_upload(with_tensor(upload, "scales", spoiled))
