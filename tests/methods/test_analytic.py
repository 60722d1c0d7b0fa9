from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from fedbicross import federation, steps
from fedbicross.context import Context
from fedbicross.errors import ConfigError, MethodError, UploadError
from fedbicross.federation import simulate
from fedbicross.messages import Client, Upload
from fedbicross.methods import create
from fedbicross.parts import moments, pooled
from fedbicross.parts import private as parts_private
from fedbicross.privacy.gaussian import noise_for
from small import dealt, refuses, tiny_clients, tiny_context

TINY = {"analytic": {"encoder": "tiny"}}


def everyone(count: int = 120) -> Client:
    return federation.pooled(tiny_clients(3, per_client=count // 3))


def partitions(labels: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(5, 0.1), 3)  # of each class to each of five clients
    return {
        "iid": rng.integers(0, 5, len(labels)),
        "dirichlet": np.array([rng.choice(5, p=shares[label]) for label in labels]),
        "one class each": labels,
        "one image each": np.arange(len(labels)),
    }


def solution(clients: list[Client], spec: str, ctx: Context) -> steps.sufficient_statistics.LinearHead:
    """The head in float64, from the bytes that travel: a reply rounds it to float32."""
    method = create(spec, TINY)
    uploads = [Upload.unpack(method.upload(client, ctx).pack()) for client in clients]
    for upload in uploads:
        method.check_upload(upload)
    total, noise = moments.total(method.config, uploads, ctx)
    assert noise == 0
    if method.config.head == "ridge":
        return steps.sufficient_statistics.ridge_head(total, ridge=method.config.ridge)
    return steps.sufficient_statistics.gaussian_head(total, kind="within", ridge=method.config.ridge, prior="counts")


def centralised(whole: Client, spec: str, ctx: Context) -> tuple[np.ndarray, np.ndarray]:
    """Weights and intercepts from the pooled features themselves, by another library or by the textbook."""
    config = create(spec, TINY).config
    x = pooled.features(config, whole, ctx).double().numpy()
    y = np.eye(3)[whole.labels]
    assert np.linalg.norm(x, axis=1).max() <= 1 + 1e-12
    if config.head == "ridge":
        alpha = config.ridge * x.var(0).sum() * len(x) / x.shape[1]
        model = Ridge(alpha=alpha, solver="cholesky").fit(x, y)
        variance = max(np.square(y - model.predict(x)).mean(), 1e-3)  # the factor has a limit
        return model.coef_ / variance, model.intercept_ / variance
    means = np.stack([x[whole.labels == c].mean(0) for c in range(3)])
    centred = x - means[whole.labels]
    sigma = centred.T @ centred / (len(x) - 3)
    sigma += config.ridge * np.trace(sigma) / len(sigma) * np.eye(len(sigma))
    shifted = means - x.mean(0)
    weight = np.linalg.solve(sigma, shifted.T).T
    bias = -0.5 * (shifted * weight).sum(1) - weight @ x.mean(0) + np.log(y.mean(0))
    return weight, bias


@pytest.mark.parametrize("spec", ["analytic", "analytic:lda"])
def test_it_is_the_centralised_solution_whatever_the_split(spec: str) -> None:
    ctx, whole = tiny_context(), everyone(300)
    weight, bias = centralised(whole, spec, ctx)
    for name, owner in partitions(whole.labels).items():
        head = solution(dealt(whole, owner), spec, ctx)
        for found, expected in ((head.weight.numpy(), weight), (head.bias.numpy(), bias)):
            worst = np.abs(found - expected).max() / np.abs(expected).max()
            assert worst < 1e-6, (name, worst)


def test_what_every_client_gets_is_that_head_on_shortened_features() -> None:
    ctx, whole = tiny_context(), everyone()
    weight, bias = centralised(whole, "analytic", ctx)
    models = simulate(create("analytic", TINY), dealt(whole, partitions(whole.labels)["dirichlet"]), ctx)
    x = pooled.features(create("analytic", TINY).config, whole, ctx).double().numpy()
    scores = x @ weight.T + bias
    expected = np.exp(scores - scores.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    for model in models.values():
        found = model.probabilities(whole.images)
        assert np.abs(found - expected).max() < 1e-3
        assert (found.argmax(1) == whole.labels).mean() > 0.9


def test_windows_fewer_features_and_no_limit_on_length() -> None:
    ctx, clients = tiny_context(), tiny_clients(2, per_client=40)
    for number, settings in enumerate(
        (
            {"hierarchy": True},
            {"clip": 1e6},
            {"hierarchy": True, "clip": None},
            {"clip": None},
            {"projection": 40},
            {"projection": 40, "clip": None},
            {"projection": 40, "hierarchy": True},
            {"projection": 40, "hierarchy": True, "clip": None},
            {"projection": 128},  # no fewer than there are
        )
    ):
        method = create("analytic", {"analytic": {**TINY["analytic"], **settings}})
        model = simulate(method, clients, replace(ctx, scope=f"seed-0/{number}"))
        answers = model["client-0"].probabilities(clients[1].images)
        assert (answers.argmax(1) == clients[1].labels).mean() > 0.9


def test_a_class_that_nobody_has_is_never_predicted() -> None:
    ctx = tiny_context(classes=5)
    for spec in ("analytic", "analytic:lda"):
        answers = simulate(create(spec, TINY), tiny_clients(2), replace(ctx, scope=f"seed-0/{spec}"))
        probabilities = answers["client-0"].probabilities(tiny_clients(1)[0].images)
        assert np.isfinite(probabilities).all() and np.all(probabilities[:, 3:] == 0)


def test_the_gate_takes_it() -> None:
    ctx, clients = tiny_context(), tiny_clients(3, per_client=60)
    models = simulate(create("analytic:personal", TINY), clients, ctx)
    for client in clients:
        assert (models[client.name].probabilities(client.images).argmax(1) == client.labels).mean() > 0.9
    with refuses(ConfigError, "no_gate"):
        create("analytic:local_prior:personal", TINY)


# --- with noise -----------------------------------------------------------------------------------------------------


def private(**settings: object) -> dict[str, dict[str, object]]:
    return {"analytic": {"encoder": "tiny", "epsilon": 1.0, **settings}}


def test_the_noise_is_as_large_as_it_must_be() -> None:
    """Differences to the sums without noise have the spread that ε, δ and the shares ask for, entry by entry."""
    ctx, client = tiny_context(), everyone()
    open_, noisy = (create("analytic", table).upload(client, ctx) for table in (TINY, private()))
    noise = noise_for(1.0, 1e-5)
    width = open_.tensors["class_sums"].shape[1]
    index = torch.arange(1, width + 1)
    diagonal = index * (index + 1) // 2 - 1
    gram = noisy.tensors["gram"] - open_.tensors["gram"]
    off = torch.ones(len(gram), dtype=torch.bool)
    off[diagonal] = False
    sums = noisy.tensors["class_sums"] - open_.tensors["class_sums"]
    for found, expected in (
        (gram[off], noise / moments.GRAM**0.5 / 2**0.5),
        (gram[diagonal], noise / moments.GRAM**0.5),
        (sums, noise / moments.SUMS**0.5),
    ):
        many = found.numel() ** 0.5
        assert abs(float(found.std()) / expected - 1) < 5 / many  # five standard errors or more
        assert abs(float(found.mean())) < 5 * expected / many
    # all of it together is one release: squares of sensitivity over noise add up to 1 / multiplier²
    assert pytest.approx(1) == moments.COUNTS + moments.SUMS + moments.GRAM


def test_one_image_moves_the_sums_by_no_more_than_stated() -> None:
    ctx, client = tiny_context(), everyone()
    config = create("analytic", private(clip=0.7)).config
    fewer = Client("pooled", client.images[:-1], client.labels[:-1])
    found = [
        steps.sufficient_statistics.statistics(pooled.features(config, c, ctx), torch.from_numpy(c.labels), 3)
        for c in (client, fewer)
    ]
    scales = steps.sufficient_statistics.triangle_scales(found[0].gram.shape[0])
    packed = [steps.sufficient_statistics.pack_triangle(one.gram) / scales for one in found]  # as the noise sees it
    assert float((packed[0] - packed[1]).norm()) <= 0.7**2 * (1 + 1e-9)
    assert float((found[0].class_sums - found[1].class_sums).norm()) <= 0.7 * (1 + 1e-9)
    assert float((found[0].counts - found[1].counts).norm()) == 1


def test_all_images_of_a_patient_move_the_sums_by_no_more_than_one_image_may() -> None:
    ctx, client = tiny_context(), everyone()
    patients = np.array([f"p{i // 4}" for i in range(len(client.labels))])  # four images each, of several classes
    method = create("analytic", private(unit="patient"))
    whole = Client("pooled", client.images, client.labels, patients)
    fewer = Client("pooled", client.images[4:], client.labels[4:], patients[4:])
    found = []
    for one in (whole, fewer):
        weights = parts_private.weights(method.config, one)
        assert weights is not None and float(weights.sum()) == pytest.approx(len(set(one.patients)))
        x = pooled.features(method.config, one, ctx)
        found.append(steps.sufficient_statistics.statistics(x, torch.from_numpy(one.labels), 3, weights))
    scales = steps.sufficient_statistics.triangle_scales(found[0].gram.shape[0])
    packed = [steps.sufficient_statistics.pack_triangle(one.gram) / scales for one in found]
    assert float((packed[0] - packed[1]).norm()) <= 1 + 1e-9
    assert float((found[0].class_sums - found[1].class_sums).norm()) <= 1 + 1e-9
    assert float((found[0].counts - found[1].counts).norm()) <= 1 + 1e-9
    upload = method.upload(whole, ctx)
    method.check_upload(upload)
    assert (
        upload.privacy is not None and upload.privacy.unit == "patient" and "for each patient" in upload.privacy.words
    )
    with pytest.raises(UploadError, match="privacy of each image"):
        method.check_upload(create("analytic", private()).upload(whole, ctx))
    with refuses(MethodError, "no_patients"):
        method.upload(client, ctx)


def test_the_upload_says_how_private_it_is() -> None:
    ctx = tiny_context()
    upload = Upload.unpack(create("analytic", private()).upload(everyone(), ctx).pack())
    assert upload.privacy is not None
    assert (upload.privacy.epsilon, upload.privacy.delta) == (1.0, 1e-5)
    assert upload.privacy.releases[0].noise_multiplier == noise_for(1.0, 1e-5)
    assert all(count >= 0 and type(count) is int for count in upload.class_counts or [])
    assert Upload.unpack(create("analytic", TINY).upload(everyone(), ctx).pack()).privacy is None


def test_a_simulation_repeats_its_noise_and_real_sites_do_not() -> None:
    client, method = everyone(), create("analytic", private())
    ctx = tiny_context()
    first, again = (method.upload(client, ctx).pack() for _ in range(2))
    assert first == again
    assert method.upload(client, replace(ctx, seed=1)).pack() != first
    secret = replace(ctx, secret_noise=True)
    assert method.upload(client, secret).pack() != method.upload(client, secret).pack()


@pytest.mark.slow
def test_much_privacy_budget_is_almost_no_noise() -> None:
    ctx, whole = tiny_context(), everyone(600)
    table = private(epsilon=100.0)
    models = simulate(create("analytic", table), dealt(whole, partitions(whole.labels)["iid"]), ctx)
    for model in models.values():
        assert (model.probabilities(whole.images).argmax(1) == whole.labels).mean() > 0.8


def test_with_too_few_images_for_the_noise_it_says_so() -> None:
    with refuses(MethodError, "no_images", "told from noise"):
        simulate(create("analytic", private(epsilon=0.05)), tiny_clients(2), tiny_context())


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("not_private", lambda u: replace(u, privacy=None)),
        ("not_private", lambda u: replace(u, privacy=u.privacy.model_copy(update={"epsilon": 2.0}))),
        ("not_private", lambda u: replace(u, privacy=u.privacy.model_copy(update={"delta": 1e-3}))),
        ("tensor_names", lambda u: replace(u, tensors={})),
        ("magnitude", lambda u: replace(u, tensors={**u.tensors, "gram": torch.full_like(u.tensors["gram"], 1e300)})),
        ("bad_counts", lambda u: replace(u, class_counts=[-1, 2, 3])),
    ],
)
def test_what_a_server_refuses(code: str, spoil) -> None:
    ctx, method = tiny_context(), create("analytic", private())
    upload = method.upload(everyone(), ctx)
    method.check_upload(upload)
    with refuses(UploadError, code):
        method.check_upload(spoil(upload))


@pytest.mark.parametrize(
    "settings", [{"epsilon": 1.0, "clip": None}, {"epsilon": 0.0}, {"delta": 0.0}, {"clip": 0.0}, {"epsilon": -1.0}]
)
def test_settings_that_make_no_sense(settings: dict[str, object]) -> None:
    with refuses(ConfigError, "bad_value"):
        create("analytic", {"analytic": {**TINY["analytic"], **settings}})
