"""`fedbicross audit`: a finished run's features; a site's upload, its statement, and the policy before it leaves."""

from __future__ import annotations

import json
import stat
from contextlib import chdir
from pathlib import Path

import pytest

from cli.console import call
from cli.test_cli_exchange import ok, set_up
from fedbicross.runs import runner
from fedbicross.runs.config import load_config

SMALL = ("--shadows", "4", "--images", "20", "--canaries", "20", "--steps", "2", "--device", "cpu")
HELD = "hold_out=0.4"  # of 36 images a site
RULES = "[audit]\nmax_auc = {}\neffort = {{shadows = 4, images = 20, canaries = 20, inverted = 2, steps = 1}}\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli-audit") / "run"
    flags = {
        "data": {"train_size": 80, "test_size": 30},
        "model": "resnet8",
        "clients": 2,
        "partition": {"alpha": 1.0},
        "methods": ["fedpft"],
        "baselines": [],
        "method": {"fedpft": {"encoder": "tiny", "components": 1, "epochs": 1}},
    }
    runner.run(load_config(None, flags), folder)
    return folder


def test_table_and_json(run: Path) -> None:
    done = call("audit", "run", run, "--epochs", "1", "--images", "5", "--json")
    assert done.json()["rows"][0]["method"] == "fedpft"
    done = call("audit", "run", run, "--epochs", "1", "--images", "5", "--clients", "client-1")
    assert "best of other people" in done.out
    assert "client-1" in done.out


def test_errors_are_one_line(run: Path) -> None:
    done = call("audit", "run", run, "--methods", "falcon")
    assert done.code == 2
    assert done.err.strip().startswith("error[audit_method]")


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site that has trained, and whose file has not left yet."""
    root = tmp_path_factory.mktemp("cli-audit-upload")
    set_up(root, "fedavg", ("north", "south"), HELD)
    with chdir(root / "north"):
        ok("client", "train", "--data", "images", "--key", "north.key", "--federation", agreement(root))
    return root / "north"


def agreement(root: Path) -> Path:
    return next(path for path in root.rglob("federation.toml"))


def test_upload_is_audited_and_the_statement_checked(hospital: Path) -> None:
    with chdir(hospital):
        file = agreement(hospital.parent)
        given = ("--data", "images", "--key", "north.key", "--federation", file, *SMALL)
        done = ok("audit", "upload", "north.safetensors", *given)
        assert "membership with shadow networks: AUC" in done.out
        assert "not covered: " in done.out
        assert "not made in this work folder" not in done.out
        statement = Path("north.audit.json")
        assert Path("north.audit.html").read_text().startswith("<!doctype html>")
        checked = ok("audit", "verify", statement, "--federation", file, "--upload", "north.safetensors")
        assert "signed by 'north'" in checked.out
        assert "as signed" in checked.out
        key = f"north={Path('north.pub').absolute()}"
        assert ok("audit", "verify", statement, "--key", key, "--json").json()["method"] == "fedavg"
        (private,) = Path("fedbicross-work").rglob("*-private.json")
        assert stat.S_IMODE(Path("fedbicross-work").stat().st_mode) == 0o700
        for one in json.loads(private.read_bytes())["known_by_heart"]:
            assert Path(one["file"]).is_file()
        again = call("audit", "upload", "north.safetensors", *given)
        assert (again.code, "error[exists]" in again.err) == (4, True)  # a filed statement is never replaced
        as_json = ok("audit", "upload", "north.safetensors", *given, "--out", "second.json", "--json").json()
        assert as_json["found"]["kind"] == "network"


def test_a_changed_statement_page_or_upload_is_refused(hospital: Path, tmp_path: Path) -> None:
    with chdir(hospital):
        file = agreement(hospital.parent)
        if not Path("north.audit.json").exists():
            given = ("--data", "images", "--key", "north.key", "--federation", file, *SMALL)
            ok("audit", "upload", "north.safetensors", *given)
        text, page = Path("north.audit.json").read_text(), Path("north.audit.html").read_text()
    forged = tmp_path / "forged.json"
    forged.write_text(text.replace('"fedavg"', '"primum"'))
    done = call("audit", "verify", forged, "--federation", file)
    assert (done.code, "error[signature]" in done.err) == (5, True)
    forged.write_text(text)
    (tmp_path / "forged.html").write_text(page + " ")
    done = call("audit", "verify", forged, "--federation", file)
    assert (done.code, "error[other_page]" in done.err) == (5, True)
    (tmp_path / "forged.html").unlink()
    done = call("audit", "verify", forged, "--federation", file, "--upload", hospital / "south.pub")
    assert done.code == 5
    done = call("audit", "verify", forged, "--key", "north")
    assert (done.code, "error[usage]" in done.err) == (2, True)


def test_only_the_sites_own_upload_is_audited(hospital: Path) -> None:
    with chdir(hospital):
        file, key = agreement(hospital.parent), hospital.parent / "south" / "south.key"
        given = ("--data", "images", "--key", key, "--federation", file, *SMALL, "--out", "other.json")
        done = call("audit", "upload", "north.safetensors", *given)
        assert (done.code, "error[wrong_site]" in done.err) == (2, True)
        assert not Path("other.json").exists()


def test_train_with_a_policy_writes_nothing_that_it_refuses(tmp_path: Path) -> None:
    set_up(tmp_path, "fedavg", ("north", "south"), HELD)
    file = agreement(tmp_path)
    with chdir(tmp_path / "north"):
        train = ("client", "train", "--data", "images", "--key", "north.key", "--federation", file, "--device", "cpu")
        Path("policy.toml").write_text('methods = ["primum"]')
        done = call(*train)
        assert (done.code, "error[policy_method]" in done.err) == (7, True)
        Path("policy.toml").write_text(RULES.format(0.5))
        done = call(*train)
        assert (done.code, "error[policy_audit]" in done.err) == (7, True)
        assert not list(Path().rglob("*upload.safetensors"))
        assert not Path("north.safetensors").exists()
        Path("policy.toml").write_text(RULES.format(1.0))
        done = ok(*train)
        assert "others get:  A model made of" in done.out
        assert "is the statement to file" in done.out + done.err
        assert Path("north.safetensors").is_file()


def test_audit_says_when_the_policy_keeps_a_file_here(hospital: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('methods = ["primum"]\n')
    with chdir(hospital):
        file = agreement(hospital.parent)
        given = ("--data", "images", "--key", "north.key", "--federation", file, *SMALL)
        done = call("audit", "upload", "north.safetensors", *given, "--out", tmp_path / "kept.json", "--policy", rules)
    assert (done.code, "error[policy_audit]" in done.err) == (7, True)
    checked = ok("audit", "verify", tmp_path / "kept.json", "--federation", file)
    assert "does not let uploads of fedavg leave" in checked.out
