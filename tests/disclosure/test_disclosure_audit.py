"""The audit finds what is there, and nothing where nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from disclosure.subjects import BY_HEART, SMALL, context, people, upload_of
from disclosure.test_disclosure_statement import KEY, body
from fedbicross import pipeline
from fedbicross.disclosure import audit as auditing
from fedbicross.disclosure import shadows, statement
from fedbicross.disclosure.audit import Findings, audit
from fedbicross.disclosure.effort import Effort, effort
from fedbicross.disclosure.policy import worst_advantage, worst_auc
from fedbicross.engine import private
from fedbicross.engine.recipe import PrivateTraining
from fedbicross.errors import ConfigError, DataError
from fedbicross.messages import Client, Upload
from fedbicross.methods import create
from fedbicross.methods.ensemble import EnsembleMethod
from fedbicross.methods.majority import Majority
from small import TINY_METHODS, Mortal, survive, tiny_clients, tiny_context

METHOD = EnsembleMethod(EnsembleMethod.Config())


def audited(who: str, ctx: Any = None, trying: Effort = SMALL) -> Findings:
    ctx = ctx or context()
    return audit(METHOD, upload_of(who, ctx), people()["site"], people()["held out"], ctx, trying)


@pytest.fixture(scope="module")
def by_heart() -> Findings:
    return audited("site")


@pytest.fixture(scope="module")
def stranger() -> Findings:
    """Few gentle steps: the same network on any processor, so that what chance shows does not hang on rounding."""
    return audited("strangers", context(epochs=3, lr=0.01))


@pytest.mark.slow
def test_finds_a_network_trained_by_heart(by_heart: Findings) -> None:
    found = by_heart.public["membership"]["likelihood_ratio"]
    assert found["tpr_at_0.01"]["value"] >= 0.2
    assert found["auc"]["low"] > 0.6
    assert found["advantage"] > 0.3
    assert by_heart.public["canaries"]["epsilon"] > 1
    assert worst_auc(by_heart.public) >= found["auc"]["high"]  # type: ignore[operator]


def test_finds_nothing_in_a_network_that_never_saw_the_images(stranger: Findings) -> None:
    for name in ("likelihood_ratio", "confidence"):
        area = stranger.public["membership"][name]["auc"]
        assert area["low"] <= 0.5 <= area["high"]
    assert len(stranger.memorised) < 0.1 * len(people()["site"].labels)


@pytest.mark.slow
def test_the_two_groups_differ_in_nothing_but_membership(by_heart: Findings) -> None:
    area = by_heart.public["membership"]["difference_without_membership"]
    assert area["low"] < 0.6
    assert area["high"] > 0.4


def test_shadows_attacked_by_each_other_show_the_recipe(by_heart: Findings) -> None:
    assert by_heart.public["membership"]["shadows_attacked"] > 0.6


def test_names_what_is_known_by_heart_to_the_site_alone(by_heart: Findings) -> None:
    named = by_heart.memorised
    assert by_heart.public["memorised"] == len(named) > 20
    assert [one.score for one in named] == sorted((one.score for one in named), reverse=True)
    labels = people()["site"].labels
    assert all(labels[one.row] == one.label for one in named)
    gains = [one.right_with_it for one in named if one.right_with_it is not None]
    assert np.mean(gains) > 0.05  # shadows that saw them are surer of them
    assert "row" not in repr(by_heart.public)


def test_inverted_images_beside_both_groups(by_heart: Findings) -> None:
    found = by_heart.public["reconstruction"]
    assert found is None  # a network without batch normalisation gives nothing to match
    assert by_heart.pictures == b""


def test_same_audit_twice_is_the_same() -> None:
    trying = replace_effort(images=20, epochs=1)
    assert audited("site", context(epochs=1), trying).public == audited("site", context(epochs=1), trying).public


def test_canaries_say_nothing_where_nothing_was_learnt() -> None:
    """Steps below the last bit. (Those of 1e-6 are found out: training without noise has no small ε.)"""
    found = audited("site", context(epochs=1, lr=1e-30))
    assert found.public["canaries"]["epsilon"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("noise", [True, False], ids=["noise", "none"])
def test_canaries_tell_private_training_from_one_without_noise(noise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """DP-SGD by the same hands, with labels that nothing but memory could know. Without its noise it is found out, so
    that a claim which does not hold would be."""
    pytest.importorskip("opacus")
    if not noise:
        noisy = private.noisy
        monkeypatch.setattr(private, "noisy", lambda sums, source, scale, batch: noisy(sums, source, 0.0, batch))
    ctx = context(dp=PrivateTraining(epsilon=0.5, max_grad_norm=10.0))
    upload = pipeline.make_upload(METHOD, people()["site"], ctx, "site")
    found = audit(METHOD, upload, people()["site"], people()["held out"], ctx, SMALL).public["canaries"]
    assert upload.privacy is not None and upload.privacy.epsilon <= 0.5
    assert found["epsilon"] <= upload.privacy.epsilon if noise else found["epsilon"] > 1


@pytest.fixture
def batchnorm() -> Any:
    ctx = context(epochs=1)
    return replace(ctx, task=replace(ctx.task, model="resnet8"))


def test_reconstruction_measures_both_sides(batchnorm: Any) -> None:
    found = audited("site", batchnorm, replace_effort(images=20, epochs=1))
    inverted = found.public["reconstruction"]
    assert inverted["images"] == 8
    assert inverted["compared_with"] == 20
    assert 0 <= inverted["closest_training"] <= inverted["nearest_training"]
    assert 0 <= inverted["closer_by_chance"][0] <= inverted["closer_by_chance"][1] <= 1
    assert found.pictures.startswith(b"\x89PNG")


def replace_effort(**changes: Any) -> Effort:
    return effort(**{**SMALL.model_dump(), **changes})


def test_copies_of_training_images_are_seen() -> None:
    """What an inversion that gives images away would look like."""
    ctx = context()
    subjects = shadows.choose_subjects(people()["site"], people()["held out"], ctx, None)
    real = torch.from_numpy(subjects.images).permute(0, 3, 1, 2).float() / 255
    copies, _ = auditing.compare_with_inverted(real[:20], subjects, ctx)
    assert copies["closest_training"] == 0 < copies["closest_held_out"]
    assert copies["closer_to_training"] == 1 > copies["closer_by_chance"][1]
    others, _ = auditing.compare_with_inverted(real[-20:], subjects, ctx)  # half of the controls are compared with
    assert others["closest_held_out"] == 0 < others["closest_training"]
    assert others["closer_to_training"] < 0.5
    blank, _ = auditing.compare_with_inverted(torch.full((20, 3, 8, 8), 0.5), subjects, ctx)
    assert blank["auc"]["low"] <= 0.5 <= blank["auc"]["high"]
    assert blank["closer_by_chance"] == [0, 1]  # twenty equal images are no evidence


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_to_the_same_end(batchnorm: Any) -> None:
    trying = replace_effort(images=20, epochs=1)
    whole = audited("site", replace(batchnorm, store=Mortal(10**6)), trying)
    store = Mortal()
    again = survive(store, 2, lambda: audited("site", replace(batchnorm, store=store), trying))
    assert again.public == whole.public
    assert again.pictures == whole.pictures
    left = [name for name in store.names if "client_models" in name and store.load(name)]
    assert len(left) == 1  # the upload's own network; shadows are not kept


def test_shadows_share_out_whole_patients() -> None:
    ctx = context(epochs=1)
    site = people()["site"]
    patients = np.arange(60) // 5
    known = Client("site", site.images, site.labels, patients)
    controls = Client("site", people()["held out"].images, people()["held out"].labels, np.arange(120) // 5 + 1000)
    subjects = shadows.choose_subjects(known, controls, ctx, None)
    assert subjects.patients is not None
    found = shadows.train_shadows(subjects, ctx, 4)
    for inside in found.inside:
        for patient in np.unique(subjects.patients):
            assert len(set(inside[subjects.patients == patient])) == 1
    assert np.array_equal(found.inside[0], ~found.inside[1])
    assert found.inside.sum(0).tolist() == [2] * 180


def test_validation_images_of_a_shadow_are_not_inside() -> None:
    ctx = context(epochs=1, validation=0.2)
    subjects = shadows.choose_subjects(people()["site"], people()["held out"], ctx, None)
    assert subjects.is_member.sum() == 48
    assert not set(subjects.rows[:48]) & set(ctx.validation_rows(people()["site"]))
    found = shadows.train_shadows(subjects, ctx, 4)
    assert found.inside.sum(1).tolist() == [68] * 4  # of 84, less a fifth


def test_subjects_are_refused_where_there_are_too_few() -> None:
    few = Client("site", people()["held out"].images[:3], people()["held out"].labels[:3])
    with pytest.raises(DataError) as caught:
        shadows.choose_subjects(people()["site"], few, context(), None)
    assert caught.value.code == "too_few_images"


def test_an_upload_that_holds_nothing_has_nothing_to_audit() -> None:
    ctx = context()
    empty = Majority(Majority.Config()).upload(people()["site"], ctx)
    found = audit(Majority(Majority.Config()), empty, people()["site"], people()["held out"], ctx, SMALL)
    assert found.public == {"kind": "nothing"}


def test_features_are_measured_as_those_of_a_run() -> None:
    ctx, (client, controls) = tiny_context(), tiny_clients(2)
    method = create("fedpft", TINY_METHODS)
    found = audit(method, method.upload(client, ctx), client, controls, ctx, SMALL)
    assert found.public["kind"] == "features"
    assert found.public["features"]["real_sequences"] == len(client.labels)
    assert found.public["features"]["attack"]["images"] == len(client.labels)
    assert found.pictures.startswith(b"\x89PNG")
    _, page = statement.sign(body(found.public), KEY)
    assert b"rebuilt from other people" in page


def test_an_upload_of_another_kind_is_said_to_be_unaudited() -> None:
    ctx = context()
    other = Upload("site", ctx.task, {"sums": torch.zeros(3)})
    found = audit(METHOD, other, people()["site"], people()["held out"], ctx, SMALL)
    assert found.public == {"kind": "not_audited"}
    assert worst_auc(found.public) is None
    assert worst_advantage(found.public) is None


def test_tensors_beside_the_network_are_named() -> None:
    ctx = context(epochs=1)
    upload = upload_of("site", ctx)
    more = replace(upload, tensors={**upload.tensors, "pacfl.signature": torch.zeros(2, 2)})
    found = audit(METHOD, more, people()["site"], people()["held out"], ctx, replace_effort(images=20, epochs=1))
    assert found.public["other_tensors"] == ["pacfl.signature"]


def test_shadows_follow_the_method_and_stop_early_where_asked() -> None:
    ctx = context()
    assert shadows.for_shadows(ctx, "balanced", None).training.loss == "balanced"
    assert shadows.for_shadows(ctx, None, 3).training.epochs == 3
    assert shadows.for_shadows(ctx, None, 1000).training.epochs == BY_HEART["epochs"]
    private = context(dp=PrivateTraining(epsilon=1.0, epochs=7))
    assert [shadows.for_shadows(private, None, n).training.as_trained.epochs for n in (3, 1000)] == [3, 7]


@pytest.mark.parametrize(("given", "code"), [({"shadows": 5}, "bad_value"), ({"shadow": 4}, "unknown_key")])
def test_bad_settings_have_a_name(given: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        effort(**given)
    assert caught.value.code == code


def test_settings_that_are_not_named_have_defaults() -> None:
    assert effort(shadows=None) == Effort()
    assert effort(quick=True, shadows=6).shadows == 6
    assert effort(quick=True).epochs == 20
