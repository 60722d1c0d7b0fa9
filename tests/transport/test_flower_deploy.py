"""Commands, the app folder and its lock; and that Flower stays in its room."""

from __future__ import annotations

import ast
import datetime
import io
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedbicross.bundle import keys
from fedbicross.errors import ConfigError, RunError
from fedbicross.messages import file_name
from fedbicross.transport import files
from fedbicross.transport.flower import NEWEST, OLDEST, TESTED, certificates, deploy, require_flower
from fedbicross.transport.flower.settings import (
    LogFile,
    RunOptions,
    ServerSettings,
    SiteSettings,
    settings_of_superlink,
    site_settings,
)
from imports import SOURCE, modules_of, reachable
from small import refuses

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_free_port_is_none_that_whoever_asks_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert deploy.free_port() < 32_768  # where Linux begins with those
    with socket.create_server(("127.0.0.1", deploy.free_port())) as taken:
        monkeypatch.setattr(deploy, "_OWN_PORTS", [taken.getsockname()[1]] * 100)
        with refuses(ConfigError, "port"):
            deploy.free_port()


# --- commands ------------------------------------------------------------------------------------------------


class Ready:
    """A folder with everything that `up` and `join` ask for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        server, north = keys.generate_key(), keys.generate_key()
        keys.save_private_key(folder / "server.key", server)
        keys.save_private_key(folder / "north.key", north)
        federation = files.new_federation(
            classes=["a", "b"],
            server=keys.public_text(server),
            clients={"north": keys.public_text(north)},
            model="resnet8",
            method="majority",
        )
        (folder / "federation.toml").write_text(files.federation_text(federation))
        certificates.make_certificates(folder / "certificates", ["localhost"])
        certificates.make_node_key(folder / "node.key")
        common = {"federation": str(folder / "federation.toml"), "work": str(folder / "work")}
        self.server = ServerSettings(**common, key=str(folder / "server.key"))
        self.site = SiteSettings(**common, key=str(folder / "north.key"), data=str(folder / "images"))


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    return Ready(tmp_path_factory.mktemp("ready"))


def silent(line: str) -> None:
    del line


def test_the_superlink_listens_on_the_loopback_only_with_every_lock_on(ready: Ready) -> None:
    with deploy.listen("127.0.0.1", 0) as listener:
        link, beside = deploy.superlink(ready.server, ready.folder / "certificates", listener, 7 << 20, silent)
        gate, runs = beside.values()
        assert gate.inherits == (listener.fileno(),)
        assert gate.command[gate.command.index("--listener") + 1] == str(listener.fileno())
    assert link.command[link.command.index("--host") + 1] == "127.0.0.1"
    for flag in (
        "--enable-supernode-auth",
        "--ssl-certfile",
        "--database",
        "--disable-runtime-dependency-installation",
    ):
        assert flag in link.command
    assert "--insecure" not in link.command
    assert gate.command[gate.command.index("--node-bytes") + 1] == str(7 << 20)
    assert "--insecure" not in runs.command
    assert runs.environment["FEDBICROSS_FLOWER_SERVER"] == str(ready.folder / "work/server.toml")
    for start in (link, gate, runs):
        assert start.environment["FLWR_TELEMETRY_ENABLED"] == "0"
        assert start.environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
        assert start.environment["FLWR_HOME"].startswith(str(ready.folder))
    config = tomllib.loads((ready.folder / "work/flower-home/config.toml").read_text())["superlink"]
    assert config[config["default"]]["root-certificates"] == str(ready.folder / "certificates/ca.crt")


@pytest.mark.slow
def test_the_supernode_is_told_its_own_places_in_a_file(ready: Ready) -> None:
    authority = ready.folder / "certificates/ca.crt"
    start = deploy.supernode(ready.site, "fed.example.org:8000", authority, ready.folder / "node.key", silent)
    assert "--insecure" not in start.command
    settings = start.command[start.command.index("--node-config") + 1]
    assert tomllib.loads(Path(settings).read_text())["data"] == str(ready.folder / "images")
    assert not any(str(ready.folder / "images") in word for word in start.command)  # others may read the process list


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"authority": Path("missing.crt")}, "missing_file"),
        ({"node_key": Path("missing.key")}, "missing_file"),
        ({"key": "server.key"}, "not_listed"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(ready: Ready, change: dict, code: str) -> None:
    given = {"authority": ready.folder / "certificates/ca.crt", "node_key": ready.folder / "node.key", **change}
    places = ready.site
    if "key" in given:
        places = places.model_copy(update={"key": str(ready.folder / given.pop("key"))})
    with refuses(ConfigError, code):
        deploy.supernode(places, "localhost:1", say=silent, **given)


def test_paths_are_made_absolute_and_relative_ones_refused() -> None:
    typed = {"federation": Path("f.toml"), "key": Path("k"), "work": Path("w"), "data": Path("d"), "device": "cpu"}
    assert site_settings(**typed).data == str(Path("d").absolute())
    with pytest.raises(ConfigError, match="absolute"):
        site_settings(**{**typed, "data": "d"})


def test_a_superlink_started_otherwise_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDBICROSS_FLOWER_SERVER", raising=False)
    with pytest.raises(ConfigError, match="fedbicross flower up"):
        settings_of_superlink()


def test_a_command_of_flowers_that_fails_is_one_line(tmp_path: Path) -> None:
    with refuses(RunError, "flower_command") as caught:
        deploy.call(["flwr", "ls", "nowhere"], tmp_path)
    assert "\n" not in str(caught.value)


def test_a_port_that_somebody_else_has_is_said_at_once() -> None:
    with deploy.listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError) as caught:
        deploy.listen("127.0.0.1", int(taken.getsockname()[1]), patience=0.0)
    assert caught.value.code == "port"


@pytest.mark.parametrize(
    ("days", "code"), [(-1, "certificate_early"), (1, None), (800, None), (824, None), (826, "certificate_expired")]
)
def test_certificates_outside_of_their_dates_do_not_start(ready: Ready, days: int, code: str | None) -> None:
    said: list[str] = []
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    file = ready.folder / "certificates/server.crt"
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=825)
    if code is None:
        certificates.check_dates(file, said.append, now)
        assert len(said) == (days > 795)
        assert all(f"expires on {end - datetime.timedelta(hours=1):%Y-%m-%d}" in line for line in said)
        return
    with refuses(ConfigError, code):
        certificates.check_dates(file, said.append, now)


def test_neither_server_nor_site_starts_with_an_expired_certificate(tmp_path: Path) -> None:
    old = Ready(tmp_path)
    shutil.rmtree(tmp_path / "certificates")
    certificates.make_certificates(tmp_path / "certificates", ["localhost"], days=0)
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    with deploy.listen("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match=f"{yesterday:%Y-%m-%d}") as caught:
        deploy.superlink(old.server, tmp_path / "certificates", listener, 1 << 20, silent)
    assert caught.value.code == "certificate_expired"
    with refuses(ConfigError, "certificate_expired"):
        deploy.supernode(old.site, "localhost:1", tmp_path / "certificates/ca.crt", tmp_path / "node.key", silent)
    (tmp_path / "broken.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match="no certificate"):
        certificates.check_dates(tmp_path / "broken.crt", silent)


# --- a run ---------------------------------------------------------------------------------------------------


def connect(ready: Ready) -> None:
    """`flower up`'s files, for a SuperLink that nobody started."""
    with deploy.listen("127.0.0.1", 0) as listener:
        deploy.superlink(ready.server, ready.folder / "certificates", listener, 1 << 20, silent)


def test_a_run_without_a_superlink_says_so(ready: Ready) -> None:
    connect(ready)
    with refuses(RunError, "flower_command", "is `fedbicross flower up` running"):
        deploy.run(ready.folder / "work", RunOptions(), silent)


@pytest.mark.parametrize(
    "said", ["", "nonsense", "[]", '{"success": false, "error-message": "no"}', '{"run-id": null}']
)
def test_an_answer_of_flowers_that_is_no_yes(said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deploy, "call", lambda words, home: said)
    with refuses(RunError, "flower_command"):
        deploy.ask(["flwr", "run"], tmp_path)


class Flower:
    """Runs of Flower's that end as told; the last one may leave a summary."""

    def __init__(self, ready: Ready, ends: list[str], **summary: Any) -> None:
        connect(ready)
        for file in (ready.folder / "work").glob("*/flower.json"):  # of another test
            file.unlink()
        self.ends, self.summary, self.begun = ends, summary, 0

    def run_once(self, work: Path, options: RunOptions, summary: Path, say: Any) -> tuple[str, str]:
        del work, options, say
        self.begun += 1
        if self.begun == len(self.ends) and self.summary:
            summary.parent.mkdir(parents=True, exist_ok=True)
            summary.write_text(json.dumps({"run": "a-run", "flower_run": self.begun, **self.summary}))
        return str(self.begun), self.ends[self.begun - 1]


def test_a_run_that_flower_lost_is_begun_again(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    flower = Flower(ready, ["finished:failed", "finished:completed"], error="", undelivered=[])
    monkeypatch.setattr(deploy, "_run_once", flower.run_once)
    said: list[str] = []
    compacted: list[Path] = []
    monkeypatch.setattr(deploy, "compact", compacted.append)
    assert deploy.run(ready.folder / "work", RunOptions(), said.append)["flower_run"] == 2
    assert compacted == [ready.folder / "work"], "the space of answers is given back"
    assert said == ["Flower lost run 1 (finished:failed); it is begun again with what is here"]


@pytest.mark.parametrize(
    ("ends", "summary", "begun"),
    [
        (["finished:failed"] * 9, {}, 3),
        (["finished:stopped"], {}, 1),
        (["finished:failed"], {"error": "error[quorum]: 1 uploads came"}, 1),
    ],
)
def test_a_run_that_failed_is_an_error(
    ends: list[str], summary: dict[str, str], begun: int, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    flower = Flower(ready, ends, **summary)
    monkeypatch.setattr(deploy, "_run_once", flower.run_once)
    with refuses(RunError, "flower_run") as caught:
        deploy.run(ready.folder / "work", RunOptions(), silent)
    assert summary.get("error", "finished") in str(caught.value)
    assert flower.begun == begun


def test_a_database_that_is_locked_for_a_while_does_not_end_the_following(
    ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [RunError("flower_command", "database is locked"), "running", "finished:completed"]
    moments = iter(range(0, 1_000_000, 20))

    def status(work: Path, number: str) -> str:
        del work, number
        answer = answers.pop(0)
        if isinstance(answer, RunError):
            raise answer
        return str(answer)

    monkeypatch.setattr(deploy, "status", status)
    monkeypatch.setattr(deploy.time, "monotonic", lambda: float(next(moments)))
    monkeypatch.setattr(deploy.time, "sleep", lambda seconds: None)
    said: list[str] = []
    assert deploy._follow(ready.folder, "1", ready.folder / "none", 0, said.append) == "finished:completed"
    assert said == ["error[flower_command]: database is locked"]
    answers[:] = [RunError("flower_command", "gone")] * 1000
    with pytest.raises(RunError, match="gone"):
        deploy._follow(ready.folder, "1", ready.folder / "none", 0, said.append)


@pytest.mark.parametrize("words", [[], ["--json"]])
@pytest.mark.parametrize("undelivered", [[], ["south"]])
def test_a_run_that_delivered_less_than_it_made_is_no_success(
    words: list[str], undelivered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedbicross.cli.app import app

    summary = {"delivered": {"north": "model_made"}, "missing": ["east"], "late": [], "undelivered": undelivered}
    summary |= {"declined": {"east": "policy_method"}, "unusable": {"west": "encoder_mismatch"}}
    monkeypatch.setattr(deploy, "run", lambda *given: summary)
    done = CliRunner().invoke(app, ["flower", "run", *words])
    assert all(word in done.stdout for word in ("north", "policy_method", "west", "encoder_mismatch"))
    if not undelivered:
        assert done.exit_code == 0
        return
    assert isinstance(done.exception, RunError)
    assert (done.exception.code, done.exception.exit_status) == ("undelivered", 4)
    assert "south" in str(done.exception)


def test_what_the_operator_decides_is_handed_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbicross.cli.app import app

    given: list[tuple[Any, ...]] = []

    def run(
        work: Path, options: RunOptions, say: Any, trust: Sequence[str] = (), without: Sequence[str] = ()
    ) -> dict[str, Any]:
        given.append((work, options, list(trust), list(without)))
        names: dict[str, Any] = {name: {} for name in ("delivered", "unusable", "declined")}
        return names | {name: [] for name in ("missing", "late", "undelivered")}

    monkeypatch.setattr(deploy, "run", run)
    asked = "--work w --hold-on-notes --trust north --trust south --without east --quorum 2 --deadline-hours 2"
    for words in (asked.split(), []):
        assert CliRunner().invoke(app, ["flower", "run", *words]).exit_code == 0
    chosen = RunOptions(hold_on_notes=True, quorum=2, deadline_seconds=7200)
    decided, default = given
    assert decided == (Path("w"), chosen, ["north", "south"], ["east"])
    assert default[1:] == (RunOptions(), [], [])


def test_the_names_of_sites_travel_with_the_run(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    flower, seen = Flower(ready, ["finished:completed"], error="", undelivered=[]), list[RunOptions]()

    def run_once(work: Path, options: RunOptions, summary: Path, say: Any) -> tuple[str, str]:
        seen.append(options)
        return flower.run_once(work, options, summary, say)

    monkeypatch.setattr(deploy, "_run_once", run_once)
    deploy.run(ready.folder / "work", RunOptions(hold_on_notes=True), silent, trust=["north"])
    with refuses(ConfigError, "not_listed", "nobody"):
        deploy.run(ready.folder / "work", RunOptions(), silent, without=["nobody"])
    with refuses(ConfigError, "quorum", "of the federation 0 sites"):
        deploy.run(ready.folder / "work", RunOptions(quorum=1), silent, without=["north"])
    assert seen == [RunOptions(hold_on_notes=True, trust=file_name("north"))]


@pytest.mark.slow
def test_what_answers_took_in_the_database_is_given_back(tmp_path: Path) -> None:
    """Flower deletes an answer once it is read, and keeps the file as large as it was."""
    home = tmp_path / "flower-home"
    home.mkdir()
    deploy.compact(tmp_path)  # nothing there yet
    file = home / deploy.DATABASE
    flower = sqlite3.connect(file)  # stays open, as the SuperLink does
    flower.execute("PRAGMA journal_mode=WAL")
    flower.execute("CREATE TABLE objects (content BLOB)")
    for _ in range(20):
        flower.execute("INSERT INTO objects VALUES (?)", (os.urandom(1 << 20),))
    flower.execute("INSERT INTO objects VALUES ('stays')")
    flower.commit()
    flower.execute("DELETE FROM objects WHERE content != 'stays'")
    flower.commit()

    def size() -> int:
        return sum(path.stat().st_size for path in home.iterdir())

    assert size() > 20 << 20
    writer = sqlite3.connect(file)
    writer.execute("BEGIN IMMEDIATE")
    deploy.compact(tmp_path)  # somebody writes: not now
    assert size() > 20 << 20
    writer.rollback()
    deploy.compact(tmp_path)
    assert size() < 1 << 20
    assert flower.execute("SELECT content FROM objects").fetchall() == [("stays",)]
    flower.close()
    writer.close()


# --- the app and its lock ------------------------------------------------------------------------------------


def test_the_example_is_the_app() -> None:
    from flwr.cli.build import build_fab_from_disk, build_fab_from_files

    app = (SOURCE / "transport/flower/app.toml").read_bytes()
    assert (EXAMPLES / "flower/pyproject.toml").read_bytes() == app
    # The lock at the sites goes by this bundle: whoever starts the run, and however, it has to be the same one.
    bundle = build_fab_from_disk(EXAMPLES / "flower")
    assert bundle == build_fab_from_files({"pyproject.toml": app})[0]
    with zipfile.ZipFile(io.BytesIO(bundle)) as inside:
        assert sorted(inside.namelist()) == [".info/CONTENT", "pyproject.toml"]  # no code travels


def test_the_apps_settings_are_those_of_the_server() -> None:
    config = tomllib.loads((SOURCE / "transport/flower/app.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert RunOptions.from_run_config(config) == RunOptions()
    assert len(config) == len(RunOptions.model_fields)
    with pytest.raises(ConfigError, match="unknown key"):
        RunOptions.from_run_config({"deadlines": 1})


def test_options_arrive_as_they_were_chosen() -> None:
    """Through Flower's own reader of --run-config, quotes and all."""
    from flwr.common.config import parse_config_args

    names = ['St. "Mary", north', "Süd = 1", "west"]
    listed = {name: keys.public_text(keys.generate_key()) for name in names}
    server = keys.public_text(keys.generate_key())
    federation = files.new_federation(classes=["a", "b"], server=server, clients=listed, model="resnet8")
    trust = ",".join(map(file_name, names[:2]))
    chosen = RunOptions(quorum=2, hold_on_notes=True, trust=trust, deadline_seconds=90)
    read = RunOptions.from_run_config(parse_config_args([chosen.run_config()]))
    assert read == chosen and read.sites("trust", federation) == names[:2]
    assert RunOptions().sites("trust", federation) == []


def test_what_the_federation_does_not_have_is_refused_before_anybody_is_asked(ready: Ready) -> None:
    connect(ready)
    with refuses(ConfigError, "quorum", "of the federation 1 sites"):
        deploy.run(ready.folder / "work", RunOptions(quorum=2), silent)
    with refuses(ConfigError, "not_listed", "nobody"):
        deploy.run(ready.folder / "work", RunOptions(), silent, trust=["nobody"])


@pytest.mark.parametrize(
    "kept", ["{", "[]", "null", '{"flower_run": 1}', '{"run": 1, "flower_run": 1}', '{"run": "a"}']
)
def test_a_damaged_summary_of_an_earlier_run_is_none(kept: str, tmp_path: Path) -> None:
    (tmp_path / "flower.json").write_text(kept)
    assert deploy._summary_of(tmp_path / "flower.json", "1") == {}
    (tmp_path / "flower.json").write_text('{"run": "a", "flower_run": 1}')
    assert deploy._summary_of(tmp_path / "flower.json", "1")["complete"] is False


@pytest.mark.slow
def test_no_other_app_can_be_unpacked_at_a_site(tmp_path: Path) -> None:
    """Flower sends apps from the server to the nodes. Ours is there already; the folder takes no other."""
    from flwr.cli.build import build_fab_from_files

    home = tmp_path / "home"
    apps = home / "apps"
    for name in ("left.over.1.0", "other"):
        (apps / name).mkdir(parents=True)
        (apps / name / "evil.py").touch()
    deploy.lock_app(home)
    before = apps.stat()
    assert [path.name.split(".")[0] for path in apps.iterdir()] == ["fedbicross"]  # whatever was there is gone
    deploy.lock_app(home)  # a restart of the node: nothing to do
    assert (apps.stat().st_ino, apps.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    app = (SOURCE / "transport/flower/app.toml").read_text()
    bundles = {"ours": app, "foreign": app.replace('publisher = "fedbicross"', 'publisher = "somebody"')}
    for name, text in bundles.items():
        (tmp_path / name).write_bytes(build_fab_from_files({"pyproject.toml": text.encode()})[0])
    script = """
import os, sys
from pathlib import Path
from flwr.cli.install import install_from_fab
data = Path(sys.argv[1]).read_bytes()
print(install_from_fab(data, Path(sys.argv[2]), skip_prompt=True))  # loads all that it needs
if os.getuid() == 0:
    os.setuid(65534)  # the lock does not hold root
print(install_from_fab(data, skip_prompt=True))
"""
    for path in (tmp_path, *tmp_path.parents):
        if path == tmp_path or path.name.startswith(("pytest-", "popen-")):  # pytest's own; a worker has one more
            path.chmod(0o755)

    def unpack(name: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", script, str(tmp_path / name), str(tmp_path / f"elsewhere-{name}")]
        surroundings = {**deploy.environment(home), "TMPDIR": "/tmp"}
        return subprocess.run(words, env=surroundings, cwd="/", capture_output=True, text=True)

    fine, refused = unpack("ours"), unpack("foreign")
    assert fine.returncode == 0, fine.stderr
    assert str(apps) in fine.stdout
    assert refused.returncode != 0
    assert "PermissionError" in refused.stderr
    assert (tmp_path / "elsewhere-foreign/apps").is_dir()  # nothing but the lock was in its way
    assert [path.name.split(".")[0] for path in apps.iterdir()] == ["fedbicross"]


# --- Flower stays in its room --------------------------------------------------------------------------------


def imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_only_this_room_imports_flower_and_what_comes_with_it() -> None:
    room = SOURCE / "transport/flower"
    strangers = {"flwr", "httpx", "uvicorn", "starlette", "fastapi", "grpc"}
    users = {file for file in SOURCE.rglob("*.py") if imported(file) & strangers}
    assert {file.relative_to(room).name for file in users} == {
        "client.py",
        "envelope.py",
        "gate.py",
        "pending.py",
        "server.py",
    }


def test_the_servers_side_cannot_reach_the_data_package() -> None:
    found = reachable(modules_of("fedbicross.transport.flower.server"))
    assert SOURCE / "transport/files.py" in found
    assert not [file for file in found if SOURCE / "data" in file.parents]


def test_the_command_line_loads_neither_flower_nor_torch() -> None:
    loaded = "import sys, fedbicross.cli.app, fedbicross.transport.flower.deploy"
    script = f"{loaded}; print({{'flwr', 'torch'}} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_the_version_is_stated_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pyproject = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    wanted, *_ = pyproject["project"]["optional-dependencies"]["flower"]
    assert wanted == f"flwr>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    assert require_flower().startswith("1.4")
    for version in ("1.40.9", "1.43.0", "2.0.0", "0.19"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        with refuses(ConfigError, "flower_version", r"pip install 'fedbicross\[flower\]'"):
            require_flower()
    for version in (TESTED, "1.42.1"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        assert require_flower() == version


def test_without_flower_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, ready: Ready) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    from fedbicross.cli.app import app

    done = CliRunner().invoke(app, ["flower", "run", "--work", str(ready.folder / "work")])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == "error[no_flower]: Flower is not installed; pip install 'fedbicross[flower]'"


def test_the_diary_keeps_one_line_per_entry(tmp_path: Path) -> None:
    heard: list[str] = []
    log = LogFile(tmp_path / "deep" / "log", heard.append)
    log.say("one\ntwo")
    update = log.start("work", 100)
    for step in range(1, 101):
        update(step, "")
    lines = (tmp_path / "deep/log").read_text().splitlines()
    assert len(lines) == len(heard) == 12
    assert lines[0].endswith("one two")
    assert heard[-1] == "work: 100/100"
