from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedbicross.errors import ConfigError
from fedbicross.runs.config import RunConfig, cases, load_config, merge, parse_assignment
from fedbicross.settings import as_toml, parse


def test_precedence_file_quick_flags_set(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('clients = 7\nmodel = "vgg8"\n[training]\nepochs = 50\nlr = 0.5\n')
    config = load_config(file, {"model": "wrn16_2"}, ["training.lr=0.25", "seeds=[1, 2]"], quick=True)
    assert (config.clients, config.model, config.training.epochs, config.training.lr) == (7, "wrn16_2", 8, 0.25)
    assert config.seeds == [1, 2]
    assert config.quick


def test_resolved_toml_reads_back_the_same() -> None:
    config = load_config(flags={"methods": ["ensemble:class_weighted"], "partition": {"alpha": 0.5}}, quick=True)
    assert parse(RunConfig, tomllib.loads(as_toml(config))) == config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"training": {"epochs": 10**9}}, "training.epochs"),
        ({"training": {"lr": float("nan")}}, "training.lr"),
        ({"training": {"lr": -0.1}}, "training.lr"),
        ({"client_models": ["resnet8", "transformer"]}, "unknown model 'transformer'; known: cnn"),
        ({"client_models": "vgg8"}, "client_models"),
        ({"client_models": ["vgg8"], "methods": ["fedisca:two_shots"]}, "next training starts"),
        (
            {
                "client_models": ["vgg8"],
                "methods": ["fedbicross"],
                "method": {"fedbicross": {"clustering": "parameters"}},
            },
            "clustering=parameters compares weights",
        ),
        ({"client_models": ["resnet8", "cnn"], "methods": ["fedisca"]}, "which 'cnn' does not have"),
        ({"method": {"e_fedisca": {"shots": -1}}, "methods": ["e_fedisca"]}, "method.e_fedisca.shots"),
        ({"method": {"fedisca": {"teachers_at_once": 0}}, "methods": ["fedisca"]}, "teachers_at_once"),
        ({"seeds": []}, "seeds"),
        ({"methods": [], "baselines": []}, "at least one"),
        ({"method": {"fedavg": {"rounds": 0}}, "methods": ["fedavg"]}, "method.fedavg.rounds"),
        ({"method": {"fedavg": {"rounds": 2}}, "methods": ["ensemble"]}, "does not run"),
    ],
)
def test_mistakes_are_one_line(flags: dict[str, Any], words: str) -> None:
    """Others, typed on the command line: tests/faults/test_bad_input.py."""
    with pytest.raises(ConfigError) as caught:
        load_config(flags=flags)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_architectures_go_round_the_clients_in_the_order_of_their_names() -> None:
    config = load_config(flags={"client_models": ["resnet18", "vgg16_bn"], "clients": 5, "methods": ["fedisca"]})
    assert config.client_models == ["resnet18", "vgg16"], "one name for one thing, so that equal models are shared"
    assert config.models_of(["b", "a", "d", "c", "e"]) == {
        "a": "resnet18",
        "b": "vgg16",
        "c": "resnet18",
        "d": "vgg16",
        "e": "resnet18",
    }
    assert load_config(flags={"model": "vgg8_bn"}).model == "vgg8"
    assert load_config().models_of(["a"]) == {}, "without the setting everybody has `model`"
    with pytest.raises(ConfigError, match="2 architectures for 1 clients"):
        config.models_of(["a"])


def test_one_architecture_for_all_is_no_mixture() -> None:
    same = {"model": "resnet8", "client_models": ["resnet8"], "methods": ["fedavg", "fedisca:two_shots"]}
    assert load_config(flags=same).architectures() == ["resnet8"]
    other = {**same, "client_models": ["vgg8"], "methods": ["fedisca"]}
    assert load_config(flags=other).architectures() == ["vgg8"]
    student = {"model": "cnn", "client_models": ["vgg8"], "methods": ["fedisca"]}
    assert load_config(flags=student).model == "cnn", "only clients need batch normalisation"


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("clients = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_config(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError):
        load_config(broken)


def test_assignments() -> None:
    assert parse_assignment("a.b = 3") == {"a": {"b": 3}}
    assert parse_assignment("a=word") == {"a": "word"}
    assert parse_assignment('a="3"') == {"a": "3"}
    assert parse_assignment("a=true") == {"a": True}
    for bad in ("a", "=3", "a..b=3"):
        with pytest.raises(ConfigError):
            parse_assignment(bad)


def test_merge_goes_table_by_table() -> None:
    low = {"a": {"x": 1, "y": 2}, "b": 1}
    assert merge(low, {"a": {"y": 3}, "c": 4}) == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}
    assert low == {"a": {"x": 1, "y": 2}, "b": 1}


@pytest.mark.parametrize("method", ["primum", "ensemble:consensus"])
def test_a_method_on_balanced_networks_has_to_beat_training_them_alone(method: str) -> None:
    specs = load_config(flags={"methods": [method, "fedavg"]}).all_methods()
    assert specs[:3] == ["majority", "local_only", "local_only:balanced"] and specs[-2:] == [method, "fedavg"]
    assert load_config(flags={"methods": [method], "baselines": []}).all_methods() == [method]
    own = {"methods": [method], "baselines": ["majority"]}
    both = ["local_only:both"] if method == "primum" else []  # its own model at home
    assert load_config(flags=own).all_methods() == ["majority", "local_only:balanced", *both, method]
    named = {"methods": [method, "local_only:balanced"]}
    assert load_config(flags=named).all_methods().count("local_only:balanced") == 1
    same = {"methods": [method], "training": {"loss": "balanced"}}
    assert "local_only:balanced" not in load_config(flags=same).all_methods(), "local_only is trained so already"


def test_no_other_method_brings_it_along() -> None:
    flags = {"methods": ["fedavg", "ensemble:class_weighted", "primum:cross_entropy"]}
    assert "local_only:balanced" not in load_config(flags=flags).all_methods()


CASES = """
clients = 3
methods = ["fedavg", "ensemble"]
baselines = ["majority"]

[method.fedavg]
weighting = "uniform"

[case.two]
clients = 2
partition.alpha = 0.5

[case.alone]
methods = ["local_only"]
"""


def test_a_case_stands_over_the_rest_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "several.toml"
    file.write_text(CASES)
    assert cases(file) == ["two", "alone"]
    two, alone = (load_config(file, case=name) for name in cases(file))
    assert (two.name, two.clients, two.partition.alpha, two.methods) == ("two", 2, 0.5, ["fedavg", "ensemble"])
    assert two.method == {"fedavg": {"weighting": "uniform"}}
    assert (alone.name, alone.clients, alone.methods) == ("alone", 3, ["local_only"])
    assert alone.method == {}, "the file's settings of methods that this case does not run"
    over = load_config(file, {"name": "mine"}, ["clients=4", "partition.alpha=2.0"], case="two")
    assert (over.name, over.clients, over.partition.alpha) == ("mine", 4, 2.0), "flags and --set win over a case"


@pytest.mark.parametrize(
    ("text", "case", "code", "words"),
    [
        (CASES, None, "choose_case", "choose one with --case: two, alone"),
        (CASES, "tow", "unknown_case", "did you mean 'two'"),
        ("clients = 2", "two", "unknown_case", "no case 'two' in the file"),
        ("case = 3", "two", "bad_case", "[case.NAME]"),
        ("case = 3", None, "bad_case", "[case.NAME]"),
        ("[case]\ntwo = 2", "two", "bad_case", "[case.NAME]"),
        ("[case.two]\nclinets = 2", "two", "unknown_key", "did you mean 'clients'"),
        (CASES.replace("[method.fedavg]", "[method.fedavgg]"), "alone", "unknown_method", "did you mean 'fedavg'"),
        (CASES + "method.dense.epochs = 2", "alone", "unused_method", "does not run"),
    ],
)
def test_mistakes_about_cases(tmp_path: Path, text: str, case: str | None, code: str, words: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.toml", case=case)
    assert caught.value.code == code and words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="no case"):
        load_config(case="two")


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_every_configuration_of_the_repository_can_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbicross.runs.config._exists", lambda path: True)  # chest X-rays are not part of it
    for name in cases(file) or [None]:
        assert load_config(file, case=name).name == (name or file.stem)
