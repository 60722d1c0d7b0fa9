"""What FedISCA, E-FedISCA and FedBiCross share: resuming, refusing, costs, and the diagnosis of a run."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import slow
from PIL import Image

from fedbicross.context import Context, MemoryStore
from fedbicross.engine.ensemble import Ensemble
from fedbicross.errors import ConfigError, MethodError
from fedbicross.federation import records, simulate
from fedbicross.messages import Client, Upload
from fedbicross.methods import create
from fedbicross.methods.base import check_needs
from fedbicross.runs.config import load_config
from fedbicross.steps import inversion
from small import TINY_METHODS, Killed, Mortal, later, tiny_clients, tiny_context

NAMES = ["fedisca", "e_fedisca", "fedbicross"]
each = pytest.mark.parametrize("name", NAMES)
GENERATIVE = ["dafl", "dense", "co_boosting"]  # their other tests: test_generative.py
all_of_both = pytest.mark.parametrize("name", [*NAMES, *GENERATIVE])
# What hardly depends on the method: one of each kind in `make check`.
one_of_both = pytest.mark.parametrize("name", ["fedisca", "dafl", *later(*NAMES[1:], *GENERATIVE[1:])])


@pytest.fixture(scope="module")
def uploads(trained: Context) -> list[Upload]:
    return [create("fedisca:class_weighted").upload(client, trained) for client in tiny_clients(3)]


def tiny(spec: str, **settings: Any) -> Any:
    name = spec.partition(":")[0]
    return create(spec, {name: {**TINY_METHODS[name], **settings}})


# --- killed and resumed ----------------------------------------------------------------------------------


def fuse(method: Any, uploads: Sequence[Upload], store: MemoryStore) -> tuple[list[bytes], dict[str, Any], Context]:
    ctx = tiny_context()
    ctx.store, ctx.seconds_between_stages = store, 0
    replies = method.fuse(uploads, ctx)
    return [reply.pack() for reply in replies], ctx.record.as_json(), ctx


RESUMED = [
    "fedisca",
    "fedisca:ema",
    "fedisca:no_noise",
    "fedisca:no_synthesis",
    "e_fedisca",
    "e_fedisca:ema",
    "fedbicross",
    "fedbicross:ema",
    "fedbicross:uniform",
]
SHORT = {"epochs": 2, "steps": 2}
CASES = [
    *((spec, {}) for spec in RESUMED),
    ("fedisca", {"memory": 3}),
    *((spec, SHORT) for spec in (*GENERATIVE, "dense:authors_code", "co_boosting:authors_code")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "settings"), CASES)
def test_killed_at_a_checkpoint_goes_on_to_the_same_bytes(spec: str, settings: dict, uploads: list[Upload]) -> None:
    method = tiny(spec, **settings)
    whole = Mortal(budget=1000)
    expected, record, _ = fuse(method, uploads, whole)
    count = len(whole.names)
    assert count >= 5, "every step, or all but the last, is kept, and the picture"
    store, kills = Mortal(0), sorted({1, 2, 3, count // 2 + 1, count - 2, count - 1})
    for files in kills:  # one run, killed again and again
        store.budget = files - len(store.names)
        with pytest.raises(Killed):
            fuse(method, uploads, store)
    store.budget = 1000
    again, resumed, _ = fuse(method, uploads, store)
    assert again == expected, f"killed after {kills} of {count} files"
    assert resumed == record, "the diagnosis tells of the whole run, not only of its end"
    repeated = 0 if settings is SHORT else len(kills)
    assert len(store.names) <= count + repeated, "the work before a kill is not repeated"


@pytest.mark.slow
def test_whole_runs_resume_and_forget_their_checkpoints(trained: Context) -> None:
    clients, method = tiny_clients(3), tiny("fedbicross")
    ctx = replace(trained, scope="seed-0/whole", store=MemoryStore())
    whole = {name: p.pack() for name, p in simulate(method, clients, ctx).items()}
    store = Mortal(14)
    for budget in (14, 1000):
        store.budget = budget
        ctx = tiny_context()
        ctx.store, ctx.scope, ctx.seconds_between_stages = store, "seed-0/whole", 0
        try:
            again = {name: p.pack() for name, p in simulate(method, clients, ctx).items()}
        except Killed:
            assert any(name.startswith("stages/") for name in store.names)
    assert again == whole
    assert store.load("stages/seed-0/whole/cluster-models.safetensors") is None


# --- bad input -------------------------------------------------------------------------------------------


def damaged(upload: Upload, key: str, value: float) -> Upload:
    tensors = {name: tensor.clone() for name, tensor in upload.tensors.items()}
    name = next(name for name in tensors if name.endswith(key))
    tensors[name].view(-1)[0] = value
    return replace(upload, tensors=tensors)


@all_of_both
@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("weight", float("nan"), "non_finite"),
        ("running_mean", float("inf"), "non_finite"),
        ("running_var", -1.0, "bad_statistics"),
    ],
)
def test_damaged_weights_are_refused_by_name(
    name: str, key: str, value: float, code: str, uploads: list[Upload]
) -> None:
    bad = [uploads[0], damaged(uploads[1], key, value), uploads[2]]
    store = Mortal(1000)
    with pytest.raises(MethodError) as caught:
        fuse(tiny(name), bad, store)
    assert caught.value.code == code and "'client-1'" in str(caught.value)
    assert not store.names, "before any work"


@one_of_both
def test_weights_of_another_architecture_are_refused_by_name(name: str, uploads: list[Upload]) -> None:
    other = tiny_context(model="vgg8")
    wrong = Upload("client-1", uploads[0].task, create(name).upload(tiny_clients(1)[0], other).tensors)
    with pytest.raises(MethodError) as caught:
        tiny(name).fuse([uploads[0], wrong], tiny_context())
    assert caught.value.code == "wrong_weights" and "'client-1' did not send a resnet8" in str(caught.value)


@each
def test_a_network_without_batch_normalisation_is_refused_early(name: str) -> None:
    with pytest.raises(ConfigError) as early:
        load_config(flags={"model": "cnn", "methods": [name]})
    assert early.value.code == "needs_batchnorm" and name in str(early.value)
    load_config(flags={"model": "cnn", "methods": ["ensemble"]})

    ctx = tiny_context(model="cnn")
    method, clients = tiny(name), tiny_clients(2)
    sent = [method.upload(client, ctx) for client in clients]
    with pytest.raises(MethodError) as checked:
        check_needs(method, sent)
    with pytest.raises(MethodError) as direct:
        method.fuse(sent, ctx)
    assert checked.value.code == direct.value.code == "needs_bn_stats"
    assert "'client-0'" in str(direct.value)
    answers = simulate(create("ensemble"), clients, ctx)["client-0"].probabilities(clients[0].images)
    assert np.isfinite(answers).all()


@each
def test_bad_settings_are_refused_by_name(name: str) -> None:
    for key, value in {"steps": 0, "batch": 1, "temperature": 0.0, "lr": -1.0, "adaptation": "no"}.items():
        with pytest.raises(ConfigError, match=f"method.{name}.{key}"):
            create(name, {name: {key: value}})


@each
def test_a_class_that_nobody_has_is_survived_and_said(name: str) -> None:
    clients, ctx = tiny_clients(3, classes=2), tiny_context(classes=4)
    for spec in (name, f"{name}:class_weighted"):
        ctx.scope = f"seed-0/{spec.replace(':', '-')}"
        predictors = simulate(tiny(spec), clients, ctx)
        assert np.isfinite(predictors["client-0"].probabilities(clients[0].images)).all()
        warnings = [text for record in records(ctx, list(predictors), 1) for text in record["warnings"]]
        assert any("does not recognise its own images" in text and "class-3" in text for text in warnings)


@pytest.mark.usefixtures("float64")
@each
def test_identical_clients_are_one_client(name: str, uploads: list[Upload]) -> None:
    """Averaging a teacher with itself changes nothing."""
    settings = {"clusters": 1} if name == "fedbicross" else {}
    alone = tiny(name, **settings).fuse(uploads[:1], tiny_context())[0]
    twins = tiny(name, **settings).fuse([uploads[0], replace(uploads[0], client="twin")], tiny_context())[0]
    slow.assert_same_state(twins.tensors, alone.tensors)


@one_of_both
def test_a_student_that_diverges_is_an_error_in_words(name: str, uploads: list[Upload]) -> None:
    with pytest.raises(MethodError) as caught:
        clip = {"clip": None} if name in GENERATIVE else {}
        tiny(name, lr=1e30, schedule="constant", **clip).fuse(uploads, tiny_context())
    assert caught.value.code == "diverged" and "lower the student's lr" in str(caught.value)


# --- what leaves, what it costs, which streams -----------------------------------------------------------


@each
def test_class_counts_leave_only_where_the_teacher_needs_them(name: str, trained: Context) -> None:
    client = tiny_clients(3)[0]
    assert create(name).upload(client, trained).class_counts is None
    assert "class" not in create(name).upload_summary
    counted = create(f"{name}:class_weighted")
    assert counted.upload(client, trained).class_counts == client.class_counts(3)
    assert "number of training images per class" in counted.upload_summary
    assert "class_counts" in counted.needs


def test_the_papers_values_are_the_defaults() -> None:
    fedisca, e_fedisca, fedbicross = (create(name).config for name in NAMES)
    for config in (fedisca, e_fedisca, fedbicross):
        found = (config.batch, config.lr_synthesis, config.alpha_tv, config.alpha_bn, config.temperature)
        assert (*found, config.momentum_adaptation) == (256, 5e-2, 2.5e-5, 10.0, 20.0, 0.9)
    assert (fedisca.steps, fedisca.epochs) == (500, 100)
    assert (e_fedisca.steps, e_fedisca.memory, e_fedisca.threshold, e_fedisca.epochs) == (1000, 500, 50.0, 100)
    assert (fedbicross.steps, fedbicross.probes, fedbicross.validation_share) == (500, 256, 0.2)
    assert (fedbicross.gamma, fedbicross.delta, fedbicross.epochs_personal) == (0.5, 0.3, 10)


@one_of_both
def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(name: str, uploads: list[Upload]) -> None:
    first, second, third = tiny_context(), tiny_context(), tiny_context()
    third.seed = 1
    made = [tiny(name).fuse(uploads, ctx)[0].pack() for ctx in (first, second, third)]
    assert made[0] == made[1] != made[2]


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@each
def test_clients_in_groups_give_the_same_students_up_to_rounding(
    name: str, uploads: list[Upload], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    groups = Ensemble.groups

    def watched(ensemble: Ensemble) -> list[Ensemble]:
        found = groups(ensemble)
        sizes.append([len(group) for group in found])
        return found

    monkeypatch.setattr(Ensemble, "groups", watched)
    settings = {"clusters": 1} if name == "fedbicross" else {}
    whole = tiny(name, **settings).fuse(uploads, tiny_context())[0]
    assert sizes and all(found == [3] for found in sizes), "three tiny clients fit"
    sizes.clear()
    chosen = tiny(name, **settings, teachers_at_once=2).fuse(uploads, tiny_context())[0]
    assert sizes and all(found == [2, 1] for found in sizes)
    slow.assert_same_state(chosen.tensors, whole.tensors)
    sizes.clear()
    monkeypatch.setattr(inversion, "MEMORY_CPU", 1)  # bytes: nothing fits, so one client at a time
    alone = tiny(name, **settings).fuse(uploads, tiny_context())[0]
    assert sizes and all(found == [1, 1, 1] for found in sizes)
    slow.assert_same_state(alone.tensors, whole.tensors)


# --- the diagnosis of a run ------------------------------------------------------------------------------


@each
def test_a_record_tells_what_happened(name: str, trained: Context) -> None:
    clients = tiny_clients(3, per_client=24)
    ctx = replace(trained, scope=f"seed-0/{name}")
    simulate(tiny(name), clients, ctx)
    found = json.loads(ctx.store.load(f"records/fuse/seed-0/{name}/server.json"))
    diagnosis, titles = found["diagnosis"], ["cluster 0", "cluster 1"] if name == "fedbicross" else ["student"]
    for title in titles:
        scalars = diagnosis["scalars"]
        assert 0 <= scalars[f"{title}: soft-label entropy (0 sure, 1 uniform)"] <= 1
        assert -1 <= scalars[f"{title}: spatial structure of the images (0 is noise)"] <= 1
        assert 0 <= scalars[f"{title}: student agrees with its teacher on synthetic images"] <= 1
        table = diagnosis["tables"][f"{title}: how well the images fit their class"]
        assert [row[0] for row in table["rows"]] == ["class-0", "class-1", "class-2"]
        assert table["columns"][1] == "teacher's cross-entropy" and all(row[1] >= 0 for row in table["rows"])
        losses = diagnosis["curves"][f"{title}: distillation loss"]
        assert losses["x"] == [1, 2, 3, 4, 5, 6] and len(losses["series"]["distillation"]) == 6
        synthesis = diagnosis["curves"]["synthesis loss" if name == "e_fedisca" else f"{title}: synthesis loss"]
        assert set(synthesis["series"]) == {"synthesis", "cross-entropy", "batch norm"}
        strip = diagnosis["image_strips"][f"{title}: synthetic images"]
        assert strip["rows"] == ["class-0", "class-1", "class-2"]
        assert strip["columns"] == ["step 1", "step 2", "step 3"]
        picture = Image.open(io.BytesIO(ctx.store.load(strip["images"])))
        assert picture.format == "PNG" and picture.width >= 36 and picture.height >= 36
    if name == "fedbicross":
        clusters = diagnosis["tables"]["cluster of each client"]["rows"]
        assert [row[0] for row in clusters] == ["client-0", "client-1", "client-2"]
        kl = np.array(diagnosis["heatmaps"]["disagreement of clients on noise (KL of row to column)"]["values"])
        assert kl.shape == (3, 3) and (np.diag(kl) == 0).all() and (kl >= 0).all()
        for k in range(2):
            weights = diagnosis["heatmaps_over_time"][f"cross-cluster weights of cluster {k}"]
            assert weights["x"] == [0, 1, 2, 3, 4, 5, 6]
            columns = np.array(weights["values"]).T
            assert columns[0].tolist() == [0.5, 0.5], "the beginning, not the end, comes first"
            assert np.allclose(columns.sum(1), 1, atol=1e-3)
            assert (columns[0] != columns[-1]).any()
        final = diagnosis["heatmaps"]["final cross-cluster weights (row listens to column)"]["values"]
        assert final[1] == [row[-1] for row in weights["values"]]


def test_fixed_weights_do_not_count_as_collapsed(uploads: list[Upload]) -> None:
    ctx = tiny_context()
    tiny("fedbicross:intra").fuse(uploads, ctx)
    assert not any("collapsed" in warning for warning in ctx.record.warnings)
    ctx = tiny_context()
    tiny("fedbicross", lr_weights=50.0).fuse(uploads, ctx)
    assert any("collapsed" in warning and "lr_weights" in warning for warning in ctx.record.warnings)


@each
def test_a_run_too_short_for_structure_says_so(name: str, uploads: list[Upload]) -> None:
    ctx = tiny_context()
    tiny(name, lr_synthesis=1e-6).fuse(uploads, ctx)
    assert any("no structure" in warning and "alpha_bn" in warning for warning in ctx.record.warnings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), [("fedisca", {"steps": 40}), ("dense", {"steps": 25, "lr_generator": 0.02, "alpha_bn": 0.1})]
)
def test_a_student_that_does_not_learn_is_noticed(name: str, settings: dict[str, Any]) -> None:
    """Clients that are sure of their classes, and a student whose rate is nothing."""
    clients, ctx = tiny_clients(3, per_client=60), tiny_context(epochs=10)
    method = tiny(name, lr=1e-12, epochs=1, batch=30, **settings)
    method.fuse([method.upload(client, ctx) for client in clients], ctx)
    assert any("has not learned its teacher" in warning for warning in ctx.record.warnings)


@each
def test_client_names_appear_shortened(name: str, trained: Context) -> None:
    clients = [Client("n" * 500 + str(i), c.images, c.labels) for i, c in enumerate(tiny_clients(2))]
    ctx = tiny_context()
    method = tiny(name)
    method.fuse([method.upload(client, ctx) for client in clients], ctx)
    assert "n" * 50 not in json.dumps(ctx.record.as_json())
