"""Folded networks say what the networks themselves say with their stored statistics."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbicross import models
from fedbicross.engine.ensemble import Ensemble
from fedbicross.engine.fuse_batchnorm import FusedConv2d, fuse_batchnorm
from fedbicross.engine.norm import Norm
from small import later
from steps.tiny import Tiny, no_bn, noise, randomised


def fold(model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """The private copy that an ensemble makes, and that copy folded."""
    client = Ensemble([model], fast=True)._clients[0]
    return client.model, client.fused


@pytest.mark.parametrize("name", ["resnet8", "vgg8", "cnn", *later("resnet18", "resnet34", "vgg11")])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_architecture_that_can_be_folded_says_the_same(name: str, channels: int) -> None:
    model = randomised(models.build(name, channels, 5, 28), 0).eval()
    for module in model.modules():  # so that eighteen layers of random numbers stay within reach
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.mul_(100.0)
    _, network = fold(model)
    assert network is not None
    x = noise(3, channels, 28, 28)
    torch.testing.assert_close(network(x), model(x), rtol=1e-9, atol=1e-10)
    assert not any(isinstance(module, Norm | nn.BatchNorm2d) for module in network.modules())


def test_a_residual_network_has_its_relus_and_shortcuts_inside() -> None:
    _, network = fold(models.build("resnet18", 3, 8, 28))
    assert network is not None
    fused = [module for module in network.modules() if isinstance(module, FusedConv2d)]
    assert len(fused) == 20 and sum(module.relu for module in fused) == 17
    assert sum(module.bias is None for module in fused) == 3, "where two are added up, one has the shift of both"
    targets = [node.target for node in network.graph.nodes if node.op == "call_function"]  # type: ignore[union-attr]
    assert not targets, f"left outside: {targets}"


@pytest.mark.parametrize("name", ["wrn16_2"])
def test_a_pre_activation_network_is_not_folded(name: str) -> None:
    model = randomised(models.build(name, 3, 5, 12), 0).eval()
    assert fold(model)[1] is None
    x = noise(3, 3, 12, 12)
    with torch.no_grad():
        torch.testing.assert_close(Ensemble([model], fast=True).logits(x)[0], model(x), rtol=1e-9, atol=1e-10)


class Twice(nn.Module):
    """A convolution whose output is used twice, a sum with itself, and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(9, 9, 3, padding=1), nn.BatchNorm2d(9)
        self.stem, self.first = nn.Conv2d(3, 9, 1), nn.BatchNorm2d(9)
        self.head = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        x = F.relu(x) + x  # the output before the ReLU is needed too
        x = F.relu(self.bn(self.conv(x)))
        x = F.relu(self.bn(self.conv(x)) + 1.0)
        x = x + x
        logits: Tensor = self.head(F.relu(x + x).mean((2, 3)))
        return logits


class Shortcuts(nn.Module):
    """Sums in both orders, of two convolutions, and one that comes too early to be given its shortcut."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)))
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x + self.a(x))
        x = (self.b(x) + self.c(x)).relu()
        early = self.d(x)
        x = F.relu(early + torch.sin(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Misnamed(nn.Module):
    """What is called relu is none, and what is added is a number per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Tanh()
        self.conv2, self.bn2, self.head = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = F.relu(x.mean((2, 3), keepdim=True) + self.bn2(self.conv2(x)))
        x = F.relu(torch.add(self.bn(self.conv(x)), x, alpha=2))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class InPlace(nn.Module):
    """What is kept before an addition in place sees what it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        keep = x
        x += self.bn(self.conv(x))
        logits: Tensor = self.head((F.relu(x) + keep).mean((2, 3)))
        return logits


class Unusual(nn.Module):
    """Convolutions of few channels that are dilated, in groups, or not square."""

    def __init__(self) -> None:
        super().__init__()
        convs = [
            nn.Conv2d(3, 6, 3, dilation=2),
            nn.Conv2d(6, 6, 3, groups=3, padding=1),
            nn.Conv2d(6, 4, (1, 2), stride=2),
        ]
        self.layers = nn.Sequential(*(nn.Sequential(c, nn.BatchNorm2d(c.out_channels), nn.ReLU()) for c in convs))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(x).mean((2, 3)))
        return logits


@pytest.mark.parametrize("kind", [Tiny, no_bn, Twice, Shortcuts, Misnamed, InPlace, Unusual])
def test_odd_networks_say_the_same_or_are_left_alone(kind: type[nn.Module]) -> None:
    model = randomised(kind(), 1).eval()
    with torch.no_grad():
        found = Ensemble([model], fast=True).logits(noise(4, 3, 6, 6))[0]
    torch.testing.assert_close(found, model(noise(4, 3, 6, 6)), rtol=0, atol=1e-10)


class Chooses(nn.Module):
    """Which way it goes depends on the numbers: no tracer can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.conv(x)).mean((2, 3))
        return out if float(out.sum()) > 0 else -out


def test_a_network_that_cannot_be_traced_stays_as_it_is() -> None:
    assert fuse_batchnorm(Chooses()) is None


class Refuses(nn.Module):
    """In the place of a folded network: no pass may come here."""

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("a pass with a gradient was folded")


def test_gradients_to_the_images_take_the_other_path() -> None:
    """The kernel of a folded layer knows no gradient; on a CPU, where the plain one stands in, that would not show."""
    model, x = randomised(Tiny(), 2), noise(4, 3, 6, 6).requires_grad_(True)
    ensemble = Ensemble([model], fast=True)
    ensemble._clients[0].fused = Refuses()
    (ours,) = torch.autograd.grad(ensemble.logits(x).square().sum(), x)
    (theirs,) = torch.autograd.grad(Ensemble([model]).logits(x).square().sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    with torch.no_grad(), pytest.raises(AssertionError, match="was folded"):
        ensemble.logits(x)


def test_folding_leaves_the_network_itself_alone() -> None:
    given = randomised(models.build("resnet8", 3, 8, 28), 0)
    private, network = fold(given)
    assert network is not None
    for module in network.modules():
        if isinstance(module, FusedConv2d):
            module.weight.fill_(torch.nan)
    for name, value in private.state_dict().items():
        assert torch.equal(value, given.state_dict()[name]), name


class Standardised(nn.Conv2d):
    """A convolution that does something of its own with its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight - self.weight.mean(), self.bias)


def test_another_kind_of_convolution_is_not_folded() -> None:
    model = nn.Sequential(Standardised(3, 4, 1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert fold(randomised(model, 0))[1] is None


def test_a_folded_ensemble_travels_to_another_process() -> None:
    ensemble = Ensemble([randomised(Tiny(), 3)], fast=True)
    arrived = pickle.loads(pickle.dumps(ensemble.on("cpu")))
    x = noise(4, 3, 6, 6)
    assert torch.equal(arrived.logits(x), ensemble.logits(x))


@pytest.mark.parametrize(
    "conv", [nn.Conv2d(9, 5, 3, 2, 1), nn.Conv2d(9, 5, (1, 4), 3, (0, 2)), nn.Conv2d(9, 5, 3, dilation=2)]
)
def test_the_shape_that_a_shortcut_must_have(conv: nn.Conv2d) -> None:
    from fedbicross.engine.fuse_batchnorm import _output_shape

    x = torch.zeros(2, 9, 13, 11)
    assert isinstance(conv.padding, tuple)
    assert _output_shape(x, conv.weight, conv.stride, conv.padding, conv.dilation) == conv(x).shape
