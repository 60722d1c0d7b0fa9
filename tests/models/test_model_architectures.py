"""Shapes, sizes and costs of the architectures, against counts from the literature or by hand."""

import pytest
import torch
from torch import nn

from fedbicross import models
from fedbicross.models import factory

ALL = sorted(models.MODELS)


def initialised(name, channels=3, classes=10, image_size=28, seed=0):
    model = models.build(name, channels, classes, image_size)
    models.initialise(model, torch.Generator().manual_seed(seed))
    return model


def images(batch, channels, size, seed=1):
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))


def conv(inputs, outputs, kernel=3):
    return inputs * outputs * kernel * kernel


def bn(width):
    return 2 * width


def linear(inputs, outputs):
    return inputs * outputs + outputs


def test_the_literal_list_and_the_builders_agree():
    assert list(models.MODELS) == list(factory.BUILDERS)


@pytest.mark.parametrize(
    ("name", "classes", "image_size", "count"),
    [
        ("resnet18", 10, 28, 11_173_962),
        ("resnet18", 10, 64, 11_173_962),
        ("resnet34", 10, 28, 21_282_122),
        ("resnet18", 1000, 224, 11_689_512),
        ("resnet34", 1000, 224, 21_797_672),
        ("wrn16_2", 10, 28, 691_674),
    ],
)
def test_parameter_counts_of_the_literature(name, classes, image_size, count):
    assert models.num_parameters(name, 3, classes, image_size) == count
    if image_size == 28:
        assert sum(p.numel() for p in models.build(name, 3, classes, image_size).parameters()) == count


def test_resnet8_parameters_by_hand():
    stage1 = 2 * (conv(16, 16) + bn(16))
    stage2 = conv(16, 32) + conv(32, 32) + conv(16, 32, 1) + 3 * bn(32)
    stage3 = conv(32, 64) + conv(64, 64) + conv(32, 64, 1) + 3 * bn(64)
    expected = conv(3, 16) + bn(16) + stage1 + stage2 + stage3 + linear(64, 10)
    assert models.num_parameters("resnet8", 3, 10, 28) == expected == 78_042


def test_wrn16_2_parameters_by_hand():
    def stage(inputs, outputs):
        first = bn(inputs) + conv(inputs, outputs) + bn(outputs) + conv(outputs, outputs) + conv(inputs, outputs, 1)
        return first + 2 * (bn(outputs) + conv(outputs, outputs))

    expected = conv(3, 16) + stage(16, 32) + stage(32, 64) + stage(64, 128) + bn(128) + linear(128, 10)
    assert models.num_parameters("wrn16_2", 3, 10, 28) == expected


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("vgg8", [64, 128, 256, 512, 512]),
        ("vgg11", [64, 128, 256, 256, 512, 512, 512, 512]),
        ("vgg16", [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]),
    ],
)
def test_vgg_parameters_by_hand(name, widths):
    inputs = [3, *widths[:-1]]
    expected = sum(conv(a, b) + bn(b) for a, b in zip(inputs, widths, strict=True)) + linear(512, 10)
    assert models.num_parameters(name, 3, 10, 28) == expected
    # torchvision's vgg11_bn and vgg16_bn features, less the convolution biases that batch normalisation makes idle
    published = {"vgg11": 9_225_984, "vgg16": 14_723_136}
    if name in published:
        assert expected - linear(512, 10) == published[name] - sum(widths)


def test_cnn_parameters_by_hand():
    convolutions = (conv(1, 32) + 32) + (conv(32, 64) + 64)
    assert models.num_parameters("cnn", 1, 5, 28) == convolutions + linear(64 * 7 * 7, 128) + linear(128, 5)
    assert models.num_parameters("cnn", 1, 5, 224) == convolutions + linear(64 * 4 * 4, 128) + linear(128, 5)


def test_resnet18_has_the_papers_batch_normalisation():
    layers = [m for m in models.build("resnet18", 3, 10, 28).modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(layers) == 20
    assert sum(layer.num_features for layer in layers) == 4_800


def test_normalised_values_by_hand():
    # ResNet-18: the stem and four convolutions at 28 px, then four and a shortcut a stage at 14, 7 and 4 px.
    resnet18 = 5 * 64 * 28**2 + 5 * 128 * 14**2 + 5 * 256 * 7**2 + 5 * 512 * 4**2
    assert models.normalised_values("resnet18", 3, 10, 28) == resnet18
    vgg8 = 64 * 28**2 + 128 * 14**2 + 256 * 7**2 + 512 * 3**2 + 512
    assert models.normalised_values("vgg8", 1, 10, 28) == vgg8
    assert models.normalised_values("cnn", 1, 10, 28) == 0


@pytest.mark.parametrize("name", ALL)
def test_batch_normalisation_is_plain_and_declared(name):
    modules = list(models.build(name, 1, 2, 28).modules())
    layers = [m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert bool(layers) == models.MODELS[name].has_batchnorm
    for layer in layers:
        assert type(layer) is nn.BatchNorm2d
        assert (layer.momentum, layer.eps, layer.affine, layer.track_running_stats) == (0.1, 1e-5, True, True)


def test_forward_flops_of_resnet18():
    flops = models.forward_flops("resnet18", 3, 10, 28)
    assert flops == pytest.approx(0.91e9, rel=0.01)
    assert models.forward_flops("resnet18", 3, 1000, 224) == pytest.approx(3.63e9, rel=0.01)
    assert isinstance(flops, int)


def test_forward_flops_of_cnn_by_hand():
    multiply_adds = conv(1, 32) * 28 * 28 + conv(32, 64) * 14 * 14 + 64 * 7 * 7 * 128 + 128 * 5
    assert models.forward_flops("cnn", 1, 5, 28) == 2 * multiply_adds


@pytest.mark.parametrize("name", ALL)
def test_one_training_step_on_two_small_images_reaches_every_parameter(name):
    model = initialised(name, channels=1, classes=4)
    loss = nn.functional.cross_entropy(model(images(2, 1, 28)), torch.tensor([0, 3]))
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize(
    ("name", "size"),
    [(n, s) for n in ALL for s in (8, 28, 64)] + [("resnet8", 224), ("resnet18", 224), ("cnn", 224)],
)
def test_forward_is_head_of_features(name, size):
    model = initialised(name, 3, 5, size).eval()
    x = images(1, 3, size)
    with torch.no_grad():
        features, logits = model.features(x), model(x)
    assert features.shape == (1, model.head.in_features)
    assert isinstance(model.head, nn.Linear)
    assert logits.shape == (1, 5)
    assert torch.equal(logits, model.head(features))
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["resnet8", "resnet18", "wrn16_2"])
def test_resnet_strides_halve_the_image_at_each_later_stage(name):
    model = initialised(name).eval()
    sizes = []
    for key, module in model.trunk.named_children():
        if key.startswith("stage"):
            module.register_forward_hook(lambda m, i, out: sizes.append(out.shape[-1]))
    model(images(1, 3, 28))
    assert sizes == [28, 14, 7, 4][: len(sizes)]


def test_large_images_get_the_large_stem():
    assert models.build("resnet8", 3, 2, 64).trunk.stem.conv.kernel_size == (3, 3)
    assert models.build("resnet8", 3, 2, 65).trunk.stem.conv.kernel_size == (7, 7)


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith("_gn")])
def test_group_normalisation_keeps_images_apart(name):
    """The same network but for its normalisation, whose answer to an image does not hang on the others in the batch."""
    plain, grouped = models.build(name.removesuffix("_gn"), 3, 2, 16), models.build(name, 3, 2, 16)
    pairs = zip(plain.modules(), grouped.modules(), strict=True)
    replaced = [(a, b) for a, b in pairs if isinstance(a, nn.BatchNorm2d)]
    assert replaced and all(type(b) is nn.GroupNorm and b.num_channels == a.num_features for a, b in replaced)
    assert not [key for key in grouped.state_dict() if "running" in key or "batches" in key]
    models.initialise(grouped, torch.Generator().manual_seed(0))
    grouped.train()
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([grouped(image[None]) for image in images])
    assert torch.allclose(grouped(images), alone, atol=1e-4)
