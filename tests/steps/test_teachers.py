from __future__ import annotations

import pytest
import torch

from fedbicross import models
from fedbicross.engine.ensemble import Ensemble
from fedbicross.errors import MethodError
from fedbicross.steps import teachers
from small import refuses

SHAPE = (3, 4, 12)


def state(name, seed=0):
    network = models.build(name, *SHAPE)
    models.initialise(network, torch.Generator().manual_seed(seed))
    return network.state_dict()


@pytest.mark.usefixtures("float64")
def test_networks_of_any_architecture_keep_their_order():
    names = ["resnet8", "vgg8", "resnet8"]
    states = [state(name, seed) for seed, name in enumerate(names)]
    ensemble = teachers.load_teachers(["a", "b", "c"], names, states, SHAPE)
    x = torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    logits = ensemble.logits(x)
    assert logits.shape == (3, 5, 4)
    for row, name, weights in zip(logits, names, states, strict=True):
        network = models.build(name, *SHAPE)
        network.load_state_dict(weights)
        torch.testing.assert_close(row, network.eval()(x).detach())


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("head.weight", float("nan"), "non_finite"),
        ("head.bias", float("-inf"), "non_finite"),
        ("running_var", float("nan"), "non_finite"),
        ("running_var", -1e-6, "bad_statistics"),
    ],
)
def test_damaged_weights_are_refused_with_client_and_tensor(key, value, code):
    bad = {name: tensor.clone() for name, tensor in state("resnet8").items()}
    name = next(name for name in bad if name.endswith(key))
    bad[name].view(-1)[-1] = value
    with refuses(MethodError, code) as caught:
        teachers.load_teachers(["good", "bad"], ["resnet8"] * 2, [state("resnet8"), bad], SHAPE)
    assert "'bad'" in str(caught.value) and repr(name) in str(caught.value)


def test_a_variance_of_zero_and_whole_numbers_are_fine():
    good = {name: tensor.clone() for name, tensor in state("resnet8").items()}
    next(tensor for name, tensor in good.items() if name.endswith("running_var")).zero_()
    teachers.check_state("good", {**good, "count": torch.tensor(-1)})


@pytest.mark.parametrize("how", ["other architecture", "missing", "extra", "other classes"])
def test_weights_that_do_not_fit_are_refused_in_one_line(how):
    bad = dict(state("vgg8" if how == "other architecture" else "resnet8"))
    if how == "missing":
        del bad["head.bias"]
    if how == "extra":
        bad["secret"] = torch.zeros(1)
    if how == "other classes":
        bad["head.weight"], bad["head.bias"] = torch.zeros(7, 64), torch.zeros(7)
    with refuses(MethodError, "wrong_weights") as caught:
        teachers.load_teachers(["mallory"], ["resnet8"], [bad], SHAPE)
    assert "'mallory' did not send a resnet8" in str(caught.value) and "\n" not in str(caught.value)


def test_batch_normalisation_is_required_of_every_client():
    ensemble = teachers.load_teachers(["a", "b"], ["resnet8", "cnn"], [state("resnet8"), state("cnn")], SHAPE)
    with refuses(MethodError, "needs_bn_stats") as caught:
        teachers.need_batchnorm(ensemble, ["a", "b"], "fedisca")
    assert "fedisca" in str(caught.value) and "'b'" in str(caught.value)
    teachers.need_batchnorm(ensemble.subset([0]), ["a"], "fedisca")


@pytest.mark.usefixtures("float64")
def test_groups_of_clients_give_the_same_numbers_and_gradients():
    networks = [models.build(name, 3, 4, 12) for name in ("resnet8", "wrn16_2", "resnet8", "vgg8", "resnet8")]
    for seed, network in enumerate(networks):
        models.initialise(network, torch.Generator().manual_seed(seed))
    whole, grouped = Ensemble(networks), Ensemble(networks)
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(9)).requires_grad_(True)

    def everything(ensemble):
        logits, features = teachers.logits_and_features_of(ensemble, x)
        again, bn = teachers.logits_and_bn_loss_of(ensemble, x)
        values = [logits, again, bn, *features, teachers.logits_of(ensemble, x)]
        (gradient,) = torch.autograd.grad(sum(value.square().sum() for value in values), x)
        return [*values, gradient]

    expected = everything(whole)
    assert len(whole.groups()) == 1
    for grouped.at_once in (1, 2, 3):
        assert len(grouped.groups()) > 1
        for found, value in zip(everything(grouped), expected, strict=True):
            torch.testing.assert_close(found, value)
