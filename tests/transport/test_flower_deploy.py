"""Commands, the app folder and its lock; and that Flower stays in its room."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedbicross.bundle import keys
from fedbicross.errors import ConfigError, RunError
from fedbicross.transport import files
from fedbicross.transport.flower import NEWEST, OLDEST, TESTED, certificates, deploy, require_flower
from fedbicross.transport.flower.settings import (
    LogFile,
    ServerSettings,
    SiteSettings,
    Waiting,
    settings_of_superlink,
    site_settings,
)
from imports import SOURCE, modules_of, reachable

EXAMPLES = Path(__file__).parents[2] / "examples"


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


def test_the_superlink_listens_on_the_loopback_only_with_every_lock_on(ready: Ready) -> None:
    link, gate = deploy.superlink(ready.server, ready.folder / "certificates", "0.0.0.0", 8123)
    assert link.command[link.command.index("--host") + 1] == "127.0.0.1"
    for flag in (
        "--enable-supernode-auth",
        "--ssl-certfile",
        "--database",
        "--disable-runtime-dependency-installation",
    ):
        assert flag in link.command
    assert "--insecure" not in link.command
    assert gate.command[gate.command.index("--port") + 1] == "8123"
    for start in (link, gate):
        assert start.environment["FLWR_TELEMETRY_ENABLED"] == "0"
        assert start.environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
        assert start.environment["FLWR_HOME"].startswith(str(ready.folder))
    config = tomllib.loads((ready.folder / "work/flower-home/config.toml").read_text())["superlink"]
    assert config[config["default"]]["root-certificates"] == str(ready.folder / "certificates/ca.crt")


@pytest.mark.slow
def test_the_supernode_is_told_its_own_places_in_a_file(ready: Ready) -> None:
    authority = ready.folder / "certificates/ca.crt"
    start = deploy.supernode(ready.site, "fed.example.org:8000", authority, ready.folder / "node.key")
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
    with pytest.raises(ConfigError) as caught:
        deploy.supernode(places, "localhost:1", **given)
    assert caught.value.code == code


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
    with pytest.raises(RunError) as caught:
        deploy.call(["flwr", "ls", "nowhere"], tmp_path)
    assert caught.value.code == "flower_command"
    assert "\n" not in str(caught.value)


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
    assert Waiting.from_run_config(config) == Waiting()
    assert len(config) == len(Waiting.model_fields)
    with pytest.raises(ConfigError, match="unknown key"):
        Waiting.from_run_config({"deadlines": 1})


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
        with pytest.raises(ConfigError, match=r"pip install 'fedbicross\[flower\]'") as caught:
            require_flower()
        assert caught.value.code == "flower_version"
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
