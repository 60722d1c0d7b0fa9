"""Every warning in words can be triggered, and only by its cause."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from fedbicross.bundle import pack, unpack
from fedbicross.context import Record
from fedbicross.engine.ensemble import Ensemble
from fedbicross.parts import diagnosis
from fedbicross.parts.diagnosis import (
    Curves,
    Strip,
    describe_personal,
    describe_student,
    describe_synthesis,
    describe_variety,
    describe_weights,
)
from fedbicross.steps.trajectory import Sample, Teacher

CLASSES = ("a", "b", "c")


class Brightness(nn.Module):
    """Class c is an image of brightness c - 1; the sharper, the surer."""

    def __init__(self, sharpness):
        super().__init__()
        self.sharpness, self.unused = sharpness, nn.Parameter(torch.zeros(1))

    def forward(self, x):
        centre = torch.tensor([-1.0, 0.0, 1.0])
        return -self.sharpness * (x.mean((1, 2, 3))[:, None] - centre).square() + 0 * self.unused


def teacher(*sharpness):
    return Teacher(Ensemble([Brightness(s) for s in sharpness]))


def smooth(levels):
    """Images of the given brightness with a gentle slope, which is structure."""
    slope = torch.linspace(-0.5, 0.5, 12).view(1, 1, 1, 12).expand(len(levels), 1, 12, 12)
    return slope + torch.tensor(levels).view(-1, 1, 1, 1)


LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
FITTING = smooth([-1.0, 0.0, 1.0, -1.0, 0.0, 1.0])


def synthesis(teacher, images, labels=LABELS):
    record = Record()
    describe_synthesis(record, "student", teacher, images, labels, CLASSES)
    json.dumps(record.as_json(), allow_nan=False)
    return record


def test_good_images_give_numbers_and_no_warning():
    record = synthesis(teacher(20.0), FITTING)
    assert record.warnings == []
    assert record.diagnosis["scalars"]["student: soft-label entropy (0 sure, 1 uniform)"] < 0.1
    assert record.diagnosis["scalars"]["student: spatial structure of the images (0 is noise)"] > 0.5
    rows = record.diagnosis["tables"]["student: how well the images fit their class"]["rows"]
    assert [row[0] for row in rows] == ["a", "b", "c"]
    assert all(loss < 0.01 and hit == 1 for _, loss, hit in rows)


def test_uniform_soft_labels():
    record = synthesis(teacher(1e-3), FITTING)
    assert len(record.warnings) == 1
    assert "nearly uniform" in record.warnings[0] and "class_weighted" in record.warnings[0]
    opposed = synthesis(teacher(20.0, -20.0), FITTING)
    assert any("nearly uniform" in warning for warning in opposed.warnings), "sure clients that contradict each other"


def test_the_entropy_is_that_of_the_teacher_as_it_is_combined():
    clients = Ensemble([Brightness(20.0), Brightness(-20.0)])
    weights = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    record = synthesis(Teacher(clients, combine="class_weighted", class_weights=weights), FITTING)
    assert record.diagnosis["scalars"]["student: soft-label entropy (0 sure, 1 uniform)"] < 0.1


def test_images_without_structure():
    noise = torch.randn(FITTING.shape, generator=torch.Generator().manual_seed(0)) * 0.1
    record = synthesis(teacher(20.0), FITTING.mean((2, 3), keepdim=True) + noise)
    assert len(record.warnings) == 1
    assert "no structure" in record.warnings[0] and "alpha_bn" in record.warnings[0]


def test_images_that_the_teacher_does_not_recognise():
    record = synthesis(teacher(20.0), smooth([-1.0, 0.0, 0.0, -1.0, 0.0, 0.1]))
    assert len(record.warnings) == 1
    assert "images of c" in record.warnings[0] and "no client of it has that class" in record.warnings[0]
    rows = record.diagnosis["tables"]["student: how well the images fit their class"]["rows"]
    assert rows[2][1] > 1 and rows[2][2] == 0


def test_a_class_without_images_is_left_out():
    record = synthesis(teacher(20.0), FITTING[:2], LABELS[:2])
    rows = record.diagnosis["tables"]["student: how well the images fit their class"]["rows"]
    assert [row[0] for row in rows] == ["a", "b"] and record.warnings == []


@pytest.mark.parametrize(("agreement", "warned"), [(1.0, False), (2 / 3, False), (1 / 3, True), (0.0, True)])
def test_a_student_that_has_not_learned(agreement, warned):
    soft = torch.eye(3).repeat(2, 1)
    answers = soft.clone()
    wrong = 6 - round(6 * agreement)
    answers[:wrong] = answers[:wrong].roll(1, dims=1)
    record = Record()
    describe_student(record, "student", answers, soft)
    assert record.diagnosis["scalars"]["student: student agrees with its teacher on synthetic images"] == pytest.approx(
        agreement, abs=1e-4
    )
    assert [("has not learned" in warning) for warning in record.warnings] == ([True] if warned else [])


def test_collapsed_weights():
    record = Record()
    history = [[[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.995, 0.005]]]
    describe_weights(record, history, [0, 10])
    assert len(record.warnings) == 2
    assert "cluster 0 collapsed onto itself" in record.warnings[0]
    assert "cluster 1 collapsed onto cluster 0" in record.warnings[1]
    assert all("lr_weights" in warning and "mirror" in warning for warning in record.warnings)
    over_time = record.diagnosis["heatmaps_over_time"]["cross-cluster weights of cluster 1"]
    assert over_time == {
        "x": [0, 10],
        "rows": ["from cluster 0", "from cluster 1 (own)"],
        "values": [[0.5, 0.995], [0.5, 0.005]],
    }
    final = record.diagnosis["heatmaps"]["final cross-cluster weights (row listens to column)"]
    assert final["values"] == [[1.0, 0.0], [0.995, 0.005]]


def test_balanced_or_given_weights_are_not_collapsed():
    record = Record()
    describe_weights(record, [[[0.9, 0.1], [0.2, 0.8]]], [0])
    describe_weights(record, [[[1.0, 0.0], [0.0, 1.0]]], [0], learned=False)
    describe_weights(record, [[[1.0]]], [0])
    assert record.warnings == []


# --- curves and strips -----------------------------------------------------------------------------------


def test_curves_are_thinned_and_survive_a_checkpoint():
    curves = Curves(total=1000)
    for step in range(1, 501):
        curves.add(step, loss=torch.tensor(1 / step), other=torch.tensor(2.0 * step))
    again = Curves(total=1000)
    again.load(unpack(pack("stage", curves.tensors(), {}), "stage")[0])
    for made in (curves, again):
        for step in range(501, 1001):
            made.add(step, loss=torch.tensor(1 / step), other=torch.tensor(2.0 * step))
    plot = curves.plot(["loss"], "loss")
    assert plot == again.plot(["loss"], "loss")
    assert plot["x"] == list(range(5, 1001, 5)) and len(plot["x"]) == diagnosis.MOST_POINTS
    assert plot["series"]["loss"][0] == 0.2 and set(plot["series"]) == {"loss"}
    assert plot["xlabel"] == "step" and plot["ylabel"] == "loss"


def test_a_curve_that_leaves_the_numbers_has_a_gap():
    curves = Curves(total=3)
    for step, value in enumerate([1.0, float("nan"), float("inf")], start=1):
        curves.add(step, loss=torch.tensor(value))
    assert curves.plot(["loss"], "loss")["series"]["loss"] == [1.0, None, None]


def sample(t, value):
    return Sample(t, torch.full((6, 1, 2, 2), value), torch.empty(0), torch.empty(0), 0.0, None)


@pytest.mark.parametrize(("steps", "moments"), [(1, [1]), (3, [1, 2, 3]), (500, [1, 71, 143, 214, 286, 357, 429, 500])])
def test_a_strip_goes_from_noise_to_the_end(steps, moments):
    strip = Strip(steps, classes=3)
    for t in range(1, steps + 1):
        strip.add(sample(t, -5.0 if t == 1 else 0.0 if t < steps else 5.0))
    strip.add(sample(1, 0.0))  # the next trajectory: the first one is shown
    assert strip.taken == moments and len(moments) <= diagnosis.STRIP_COLUMNS
    grid = strip.grid()
    assert grid.shape == (3, len(moments), 2, 2, 1) and grid.dtype.name == "uint8"
    if steps > 1:
        assert (
            (grid[:, 0] == 0).all() and (grid[:, -1] == 255).all() and (grid[:, 1] == (128 if steps > 2 else 255)).all()
        )
    again = Strip(steps, classes=3)
    again.load(unpack(pack("stage", strip.tensors(), {}), "stage")[0])
    assert again.taken == strip.taken and (again.grid() == grid).all()


def test_images_that_are_all_alike_are_noticed_by_class():
    record = Record()
    describe_variety(record, "student", [0.5, 0.001, float("nan")], CLASSES, "lower it")
    json.dumps(record.as_json(), allow_nan=False)
    assert record.diagnosis["tables"]["student: variety of the images"]["rows"] == [["a", 0.5], ["b", 0.001]]
    assert (
        len(record.warnings) == 1
        and "collapsed" in record.warnings[0]
        and "for all of b; lower it" in record.warnings[0]
    )
    record = Record()
    describe_variety(record, "student", [0.5, 0.3, 0.1], CLASSES, "lower it")
    assert record.warnings == []


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"cluster model": 0.9, "own model": 0.2, "personal": 0.5}, ["worse than its cluster model"]),
        ({"cluster model": 0.2, "own model": 0.9, "personal": 0.5}, ["worse than training alone"]),
        ({"cluster model": 0.9, "own model": 0.9, "personal": 0.5}, ["its cluster model", "training alone"]),
        ({"cluster model": 0.5, "own model": 0.5, "personal": 0.5}, []),
        ({}, []),
    ],
)
def test_a_personal_model_that_is_worse_is_warned_about(scores, said):
    record = Record()
    describe_personal(record, "client-0", scores)
    assert len(record.warnings) == len(said)
    for text, warning in zip(said, record.warnings, strict=True):
        assert text in warning and warning.startswith("client-0")
    assert bool(record.diagnosis) == bool(scores)
