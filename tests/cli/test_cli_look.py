"""The verbs that run nothing: `validate`, `list`, `data`, help and version."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedbicross
from cli.console import CONFIG, call, config_file, console, environment, snapshot, write_npz
from data.downloads import Server, serving
from fedbicross.data import DATASETS, PARTITIONS
from fedbicross.methods import method_names
from fedbicross.models import MODELS
from fedbicross.models.encoders import ENCODERS
from small import first_in_check

VERBS = ("demo", "run", "resume", "report", "track", "check", "validate", "list", "data")


def test_version_and_help() -> None:
    version = console("--version")
    assert (version.code, version.out, version.err) == (0, fedbicross.__version__ + "\n", "")
    shown = call("--help")
    assert shown.code == 0
    for verb in VERBS:
        assert f"  {verb}" in shown.out, verb
    for verb in VERBS:
        alone = call(verb, "--help")
        assert alone.code == 0 and "Usage:" in alone.out, verb


def commands() -> list[list[str]]:
    """Every command there is, by the words that call it."""
    from fedbicross.cli.app import app

    found = [[info.name or ""] for info in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        for info in group.typer_instance.registered_commands:
            found.append([group.name or "", info.name or getattr(info.callback, "__name__", "").replace("_", "-")])
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_describes_every_argument_without_stray_signs(words: list[str]) -> None:
    shown = call(*words, "--help")
    assert shown.code == 0 and "\\" not in shown.out
    _, _, arguments = shown.out.partition("Arguments:\n")
    for entry in re.split(r"\n(?=  \S)", arguments.partition("\n\n")[0]) if arguments else ():
        assert re.search(r"\s{2}[a-z`]\S* ", entry), f"{entry!r} is not described"


@pytest.mark.parametrize("group", ["", "bench", "client", "data", "federation", "flower", "server"])
def test_no_line_of_a_list_of_commands_is_cut_off(group: str) -> None:
    shown = call(*group.split(), "--help").out
    assert "..." not in shown.partition("Commands:")[2] and "Commands:" in shown


def test_no_verb_at_all_shows_the_help() -> None:
    outcome = call()
    assert "Usage:" in outcome.out + outcome.err
    assert outcome.code in (0, 2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["rnu"], "did you mean 'run'?"),
        (["run", "--clinets", "3"], "did you mean '--clients'?"),
        (["run", "--nope"], "--nope"),
        (["run", "--clients", "five"], "--clients"),
        (["run", "--seed", "0.5"], "--seed"),
        (["list", "things"], "things"),
        (["resume"], "folder"),
        (["data", "shwo"], "did you mean 'show'?"),
        (["data", "show", "x", "--size", "8"], "did you mean '--image-size'?"),
    ],
)
def test_a_mistyped_command_is_one_line(args: list[str], words: str) -> None:
    outcome = call(*args)
    assert outcome.code == 2
    assert outcome.err.startswith("error[usage]: ") and outcome.err.count("\n") == 1
    assert words in outcome.err.lower() and outcome.err.lower().count("did you mean") <= 1
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("typed", "offered"),
    first_in_check(
        [
            ("fedbicross re", ["resume", "report"]),
            ("fedbicross run --parti", ["--partition"]),
            ("fedbicross run --methods fedavg,prim", [f"fedavg,{name}" for name in method_names() if "primum" in name]),
            ("fedbicross run --model resnet1", ["resnet18", "resnet18_gn"]),
            ("fedbicross run --partition nat", ["natural"]),
            ("fedbicross run --data cel", ["cells"]),
            ("fedbicross list enc", ["encoders"]),
            ("fedbicross run --metric macro", ["macro_auc"]),
            ("fedbicross federation init --model resnet8_", ["resnet8_gn"]),
            ("fedbicross federation init --method ensemble:cons", ["ensemble:consensus"]),
        ]
    ),
)
def test_a_shell_completes(typed: str, offered: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_FEDBICROSS_COMPLETE": "complete_bash"}
    outcome = console(env=words)
    assert (outcome.code, outcome.out.split()) == (0, offered), outcome.err


def test_an_unknown_verb_in_a_process_of_its_own() -> None:
    outcome = console("rnu")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)


def test_exit_codes_are_those_of_the_docstring() -> None:
    from fedbicross import cli, errors

    documented = " ".join((cli.__doc__ or "").split())
    for kind, words in (
        (errors.ConfigError, "2 configuration"),
        (errors.DataError, "3 data"),
        (errors.RunError, "4 run folder"),
        (errors.UploadError, "5 upload"),
        (errors.MethodError, "6 method"),
    ):
        assert words.startswith(f"{kind.exit_status} ") and words in documented


def test_validate_prints_the_whole_configuration(tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    config = config_file(tmp_path)
    outcome = call("validate", config, "--set", "training.lr=0.125")
    assert (outcome.code, outcome.err) == (0, "")
    found = tomllib.loads(outcome.out)
    assert (found["training"]["lr"], found["clients"], found["data"]["train_size"]) == (0.125, 3, 60)
    assert found["partition"]["kind"] == "dirichlet", "defaults are filled in"
    second = tmp_path / "resolved.toml"
    second.write_text(outcome.out)
    assert call("validate", second).out == outcome.out, "what was resolved resolves to itself"
    assert call("validate", config, "--json").json()["data"]["image_size"] == 8
    assert call("validate", config, "--quick", "--json").json()["data"]["train_size"] == 4000
    assert set(snapshot(tmp_path)) - set(before) == {"tiny.toml", "resolved.toml"}


def test_validate_and_run_take_a_case_of_a_file(tmp_path: Path) -> None:
    config = config_file(tmp_path, CONFIG + "[case.crowd]\nclients = 9\n[case.pair]\nclients = 2\n")
    assert call("validate", config, "--case", "crowd", "--json").json()["clients"] == 9
    for verb in ("validate", "run"):
        outcome = call(verb, config)
        assert outcome.code == 2 and "choose one with --case: crowd, pair" in outcome.err
        assert "did you mean 'pair'" in call(verb, config, "--case", "pear").err


def test_validate_says_who_has_which_architecture_and_who_cannot_work_with_that(tmp_path: Path) -> None:
    text = 'client_models = ["vgg8_bn", "resnet8"]\n' + CONFIG
    outcome = call("validate", config_file(tmp_path, text))
    assert outcome.code == 2 and outcome.err.startswith("error[mixed_models]: fedavg cannot work with clients"), outcome
    outcome = call("validate", config_file(tmp_path, text.replace('"fedavg"', '"fedisca"')))
    assert outcome.out.startswith("# clients, in the order of their names: vgg8, resnet8, and so on from the start\n")
    assert tomllib.loads(outcome.out)["client_models"] == ["vgg8", "resnet8"], "still a file that can be run"


def test_validate_names_the_mistake(tmp_path: Path) -> None:
    outcome = call("validate", config_file(tmp_path, CONFIG.replace("epochs", "epoch")))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error[unknown_key]: unknown key 'training.epoch'; did you mean 'epochs'?\n"
    assert call("validate", tmp_path / "absent.toml").code == 2


def test_looking_does_not_wait_for_torch(tmp_path: Path) -> None:
    config_file(tmp_path)
    code = (
        "import sys; from fedbicross.cli import main\n"
        "for words in ('--version', '--help', 'validate tiny.toml', 'list methods', 'list models'):\n"
        "    sys.argv[1:] = words.split()\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, words\n"
        "    assert not {'torch', 'sklearn', 'matplotlib'} & set(sys.modules), words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("methods", method_names()),
        ("datasets", list(DATASETS)),
        ("models", list(MODELS)),
        ("partitions", list(PARTITIONS)),
        ("encoders", list(ENCODERS)),
    ],
)
def test_list(kind: str, names: list[str]) -> None:
    outcome = call("list", kind)
    assert outcome.code == 0, outcome.err
    firsts = {line.split()[0] for line in outcome.out.splitlines() if line.strip()}
    assert set(names) <= firsts, "each name whole and at the start of a line"
    found = call("list", kind, "--json").json()
    assert set(found) == set(names)
    assert all(isinstance(text, str) and text for text in found.values())


def test_data_show(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "own.npz")
    outcome = call("data", "show", path, "--image-size", "8", "--grid", tmp_path / "new" / "grid.png")
    assert outcome.code == 0, outcome.err
    assert "own: 8 px, 3 channel(s)" in outcome.out
    assert "class-0" in outcome.out and "train     15   test      6" in outcome.out
    assert (tmp_path / "new" / "grid.png").read_bytes().startswith(b"\x89PNG")
    found = call("data", "show", path, "--image-size", "8", "--json").json()
    assert found["train"] == [15, 15] and found["test"] == [6, 6] and found["classes"] == ["class-0", "class-1"]


def test_data_show_grid_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "own.npz")
    outcome = call("data", "show", path, "--image-size", "8", "--grid", path / "grid.png")
    assert outcome.code in (2, 3, 4) and outcome.err.startswith("error[") and outcome.err.count("\n") == 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    source = tmp_path / "source"
    source.mkdir()
    with serving(write_npz(source / "breastmnist.npz", size=28).read_bytes()) as running:
        yield running


def test_data_fetch(server: Server, tmp_path: Path) -> None:
    digest = hashlib.sha256(server.body).hexdigest()
    place = tmp_path / "new" / "data"
    args = ("data", "fetch", "breastmnist", "--data-dir", place, "--url", server.url, "--sha256", digest)
    outcome = call(*args)
    assert outcome.code == 0, outcome.err
    assert outcome.out == f"{place / 'breastmnist.npz'}\n"
    assert f"downloading breastmnist: {len(server.body)}/{len(server.body)}" in outcome.err
    assert (place / "breastmnist.npz").read_bytes() == server.body
    again = call(*args, "--json")
    assert again.json() == {"path": str(place / "breastmnist.npz")}
    assert server.ranges == [None], "a file that is there is not asked for again"
    shown = call("data", "show", "breastmnist", "--data-dir", place, "--json").json()
    assert sum(shown["train"]) == 30


def test_data_fetch_interrupted_then_resumed(server: Server, tmp_path: Path) -> None:
    server.mode = "cut"
    args = ("data", "fetch", "breastmnist", "--data-dir", tmp_path / "d", "--url", server.url)
    outcome = call(*args)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.splitlines()[-1].startswith("error[interrupted]: ") and "again" in outcome.err
    assert "Traceback" not in outcome.err
    assert sorted(snapshot(tmp_path / "d")) == ["breastmnist.npz.part"]
    server.mode = "good"
    assert call(*args).code == 0
    assert server.ranges == [None, f"bytes={len(server.body) // 2}-"]
    assert (tmp_path / "d" / "breastmnist.npz").read_bytes() == server.body
    assert "breastmnist.npz.part" not in snapshot(tmp_path / "d")


def test_data_fetch_offline(server: Server, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    outcome = call("data", "fetch", "breastmnist", "--data-dir", tmp_path / "d", "--url", server.url)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.startswith("error[offline]: ") and outcome.err.count("\n") == 1
    assert "by hand" in outcome.err
    assert not (tmp_path / "d").exists() or not snapshot(tmp_path / "d")


def test_data_fetch_to_where_nothing_can_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = call("data", "fetch", "breastmnist", "--data-dir", tmp_path / "file" / "d", "--url", server.url)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.startswith("error[cannot_write]: ") and outcome.err.count("\n") == 1


def test_a_reader_that_goes_away_is_no_crash(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "from fedbicross.cli import main; main()", "list", "datasets", "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_json_is_ascii_safe_and_sorted(tmp_path: Path) -> None:
    out = call("list", "partitions", "--json").out
    assert json.dumps(json.loads(out), indent=1, sort_keys=True) + "\n" == out
