"""The torch-free face of fedbicross.models."""

import subprocess
import sys

import pytest

from fedbicross import models
from fedbicross.errors import ConfigError
from small import refuses


def test_importing_and_checking_names_needs_no_torch():
    code = (
        "import sys, fedbicross.models as m; m.check('resnet8', 1, 2, 28); m.info('cnn');"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_name_suggests_the_nearest():
    with refuses(ConfigError, "unknown_model", "did you mean 'resnet18'"):
        models.build("resnet_18", 3, 10, 28)


def test_the_names_of_other_libraries_mean_the_same_models():
    assert {models.canonical(alias) for alias in models.ALIASES} <= set(models.MODELS)
    assert not set(models.ALIASES) & set(models.MODELS)
    for alias, name in models.ALIASES.items():
        assert models.info(alias) is models.info(name)
        for count in (models.num_parameters, models.forward_flops, models.normalised_values):
            assert count(alias, 1, 2, 16) == count(name, 1, 2, 16)
        assert list(models.build(alias, 1, 2, 16).state_dict()) == list(models.build(name, 1, 2, 16).state_dict())
    assert models.canonical("resnet18") == "resnet18"
    with pytest.raises(ConfigError, match="did you mean 'vgg16'"):
        models.canonical("vgg16bn")


def test_hopeless_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="known: cnn, resnet18"):
        models.info("transformer")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("vgg8", 1, 2, 7), "image_too_small"),
        (("cnn", 1, 2, 0), "image_too_small"),
        (("cnn", 2, 2, 28), "bad_channels"),
        (("cnn", 1, 1, 28), "bad_classes"),
    ],
)
@pytest.mark.parametrize("function", [models.build, models.forward_flops, models.num_parameters])
def test_impossible_sizes_are_refused(function, arguments, code):
    with refuses(ConfigError, code):
        function(*arguments)


def test_descriptions_are_one_line():
    for name, info in models.MODELS.items():
        assert info.description and "\n" not in info.description, name
