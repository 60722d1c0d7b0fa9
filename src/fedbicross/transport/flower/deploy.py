"""The processes of a deployment, with every switch that keeps Flower offline.

Flower's commands are started as they are; nothing of its inside is touched. Nothing here imports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from fedbicross.atomic import write_atomic
from fedbicross.errors import ConfigError, RunError
from fedbicross.messages import file_name
from fedbicross.settings import as_toml, read_json
from fedbicross.transport.federation_file import find_client, load_federation
from fedbicross.transport.flower.certificates import CA, CERTIFICATE, SERVER_KEY, check_dates
from fedbicross.transport.flower.program import WITH_PARENT, WITH_THREADS
from fedbicross.transport.flower.settings import (
    LOG,
    SERVER_FILE,
    RunOptions,
    ServerSettings,
    SiteSettings,
    load_settings,
)
from fedbicross.transport.flower.summary import SUMMARY, Summary
from fedbicross.transport.flower.version import require_flower
from fedbicross.transport.work import make_private

CONNECTION = "fedbicross"  # the name of our SuperLink in Flower's configuration
DATABASE = "state.db"  # of the SuperLink, in its home
_QUICK = 256 << 20  # bytes that a disk writes in a moment
_LOST_RUNS = 3  # how often a run that Flower itself lost is begun again by one command
_OWN_PORTS = range(10_000, 32_768)  # by default below those that Linux, macOS and Windows give to who asks for any
_PATIENCE = 600.0  # seconds for which a SuperLink that does not answer is asked again
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else it would fetch packages at every run
}


@dataclass(frozen=True)
class Start:
    """A process to start: its words and its environment."""

    command: list[str]
    environment: dict[str, str]
    inherits: tuple[int, ...] = ()  # numbers of open files that it gets from this process

    def become(self) -> None:
        """Turn this process into that one, so that signals and exit codes need no middleman."""
        os.execve(self.command[0], self.command, self.environment)

    def begin(self) -> subprocess.Popen[bytes]:
        """Start it beside this process."""
        return subprocess.Popen(self.command, env=self.environment, pass_fds=self.inherits)


def superlink(
    places: ServerSettings,
    certificates: Path,
    listener: socket.socket,
    node_bytes: int,
    say: Callable[[str], None],
) -> tuple[Start, dict[str, Start]]:
    """The server's processes: the SuperLink, on the loopback only; beside it the gate at ``listener``, and what starts
    runs, which the SuperLink itself would not miss once it is gone.

    TLS on all, only registered nodes, state on disk, nothing fetched.
    """
    load_federation(places.federation_file)
    places.load_key()  # now rather than after days of waiting
    for name in (CA, CERTIFICATE):
        check_dates(_existing(certificates / name), say)
    home, inner = _home(Path(places.work)), free_port()
    settings = Path(places.work) / "server.toml"
    write_atomic(settings, as_toml(places).encode())
    authority, certificate, key = (str(_existing(certificates / name)) for name in (CA, CERTIFICATE, SERVER_KEY))
    connection = {"address": f"127.0.0.1:{inner}", "root-certificates": authority}
    write_atomic(home / "config.toml", _toml({"superlink": {"default": CONNECTION, CONNECTION: connection}}))
    link = [
        *_python("program", WITH_PARENT, _program("flower-superlink")),
        *("--host", "127.0.0.1", "--port", str(inner)),
        *("--database", str(home / DATABASE)),
        "--enable-supernode-auth",
        *("--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certfile", authority),
        "--disable-runtime-dependency-installation",
        *("--isolation", "process"),
    ]
    runs = [
        *_python("program", WITH_PARENT, _program("flower-superexec")),
        *("--runtime-api-address", f"127.0.0.1:{inner}", "--root-certificates", authority),
    ]
    gate = [
        *_python("gate", "--superlink", f"https://127.0.0.1:{inner}", "--authority", authority),
        *("--certificate", certificate, "--key", key, "--log", str(Path(places.work) / LOG)),
        *("--listener", str(listener.fileno()), "--node-bytes", str(node_bytes)),
    ]
    variables = environment(home)
    beside = {
        "the gate": Start(gate, variables, (listener.fileno(),)),
        "what starts runs": Start(runs, {**variables, SERVER_FILE: str(settings)}),
    }
    return Start(link, variables), beside


def listen(host: str, port: int, patience: float = 15.0) -> socket.socket:
    """The outer port; one that an earlier gate is about to leave is waited for."""
    end = time.monotonic() + patience
    while True:
        try:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            if time.monotonic() >= end:
                raise ConfigError("port", f"cannot listen on {host}:{port}: {error.strerror or error}") from None
            time.sleep(0.25)


def compact(work: Path) -> None:
    """Give back the disk that answers took in Flower's database, if that takes a moment and nobody else writes."""
    file = work.absolute() / "flower-home" / DATABASE
    if not file.is_file():
        return
    with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(file, timeout=2)) as base:
        pages, free, size = (
            int(base.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")
        )
        if (pages - free) * size <= _QUICK:  # what is in use is written anew, and all of Flower's calls wait for it
            base.execute("VACUUM")
        base.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def supernode(
    places: SiteSettings,
    address: str,
    authority: Path,
    node_key: Path,
    say: Callable[[str], None],
    local_port: int | None = None,
) -> Start:
    """A site's process. It opens no port to the outside; it calls the server."""
    places.name(load_federation(places.federation_file))
    trusted, own = str(_existing(authority)), str(_existing(node_key))
    check_dates(authority, say)
    home = _home(Path(places.work))
    settings = Path(places.work) / "site.toml"
    write_atomic(settings, as_toml(places).encode())
    lock_app(home)
    command = [
        *_python("program", WITH_THREADS, _program("flower-supernode")),
        *("--superlink", address),
        *("--root-certificates", trusted, "--auth-supernode-private-key", own),
        *("--host", "127.0.0.1", "--port", str(local_port or free_port())),
        *("--node-config", str(settings)),
    ]
    return Start(command, environment(home))


def lock_app(home: Path) -> None:
    """Install the app and close the folder, so that no other app, whoever sends it, can be started at this site.

    A Flower server may send code to its nodes. A node unpacks it under ``apps/`` first; where it cannot, it runs none.
    """
    apps = home / "apps"
    if _only_our_app(apps):
        apps.chmod(0o555)
        return
    if apps.exists():
        apps.chmod(0o755)
        shutil.rmtree(apps)
    with tempfile.TemporaryDirectory() as folder:
        app = write_app(Path(folder) / "fedbicross-flower")
        call(["flwr", "build", "--app", str(app)], home, cwd=Path(folder))
        (bundle,) = Path(folder).glob("*.fab")
        call(["flwr", "install", str(bundle)], home)
    apps.chmod(0o555)


def lock_is_void() -> bool:
    """File permissions do not bind root, and no folder of Windows."""
    return not hasattr(os, "geteuid") or os.geteuid() == 0


def _only_our_app(apps: Path) -> bool:
    """Whether the folder holds this version's app and nothing else."""
    found = [path for path in apps.rglob("*") if not path.is_dir()]
    return [path.name for path in found] == ["pyproject.toml"] and _app() == tomllib.loads(found[0].read_text("utf-8"))


def _app() -> dict[str, Any]:
    return tomllib.loads(resources.files("fedbicross.transport.flower").joinpath("app.toml").read_text("utf-8"))


def write_app(folder: Path) -> Path:
    """The app folder: one file that names what is installed."""
    folder.mkdir(parents=True)
    text = resources.files("fedbicross.transport.flower").joinpath("app.toml").read_bytes()
    (folder / "pyproject.toml").write_bytes(text)
    return folder


def register(work: Path, public_key: Path, name: str) -> None:
    """Let a site's node in: the server's allow-list."""
    call(["flwr", "supernode", "register", str(_existing(public_key)), CONNECTION, "--name", name], _home(work))


def run(
    work: Path,
    options: RunOptions,
    say: Callable[[str], None],
    trust: Collection[str] = (),
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Start the run, tell what the server notes, and return its summary once the server has written it.

    A run that ends without one was lost by Flower, not by us: what came is kept, so it is begun again, a few times.
    """
    federation = load_federation(load_settings(ServerSettings, _existing(work / "server.toml")).federation_file)
    for name in (*trust, *without):
        find_client(federation, name)
    lists = {"trust": ",".join(map(file_name, trust)), "without": ",".join(map(file_name, without))}
    options = options.model_copy(update=lists)
    options.check(federation)
    summary = work / federation.run_id / SUMMARY
    try:
        for left in reversed(range(_LOST_RUNS)):
            number, state = _run_once(work, options, summary, say)
            found = _summary_of(summary, number)
            if found.get("error"):
                raise RunError("flower_run", f"Flower run {number} ended: {found['error']}")
            if found:
                return found
            if state == "finished:stopped" or not left:
                raise RunError("flower_run", f"Flower run {number} ended as {state}; the reason is in {work / LOG}")
            say(f"Flower lost run {number} ({state}); it is begun again with what is here")
    finally:
        compact(work)
    raise AssertionError("unreachable")


def _run_once(work: Path, options: RunOptions, summary: Path, say: Callable[[str], None]) -> tuple[str, str]:
    """One run of Flower's: its number, and what Flower calls its end."""
    home, log = _home(work), work / LOG
    seen = log.stat().st_size if log.exists() else 0
    with tempfile.TemporaryDirectory() as folder:
        app = write_app(Path(folder) / "fedbicross-flower")
        said = ask(["flwr", "run", str(app), CONNECTION, "--run-config", options.run_config()], home)
    number = str(said["run-id"])
    say(f"Flower run {number}")
    try:
        return number, _follow(work, number, summary, seen, say)
    except KeyboardInterrupt:
        say(f"stopping Flower run {number}; what came is kept, and the same command goes on")
        call(["flwr", "stop", number, CONNECTION], home)
        raise


def _follow(work: Path, number: str, summary: Path, seen: int, say: Callable[[str], None]) -> str:
    """Tell what the server notes until Flower calls the run finished. Asking Flower starts a process: now and then."""
    asked = answered = time.monotonic()
    while True:
        time.sleep(1.0)
        seen = _tell_new_lines(work / LOG, seen, say)
        if _summary_of(summary, number) or time.monotonic() - asked >= 30:
            asked = time.monotonic()
            try:
                state = status(work, number)
            except RunError as error:  # its database may be locked for a while; the run goes on
                if asked - answered >= _PATIENCE:
                    raise
                say(str(error))
                continue
            answered = asked
            if state.startswith("finished"):
                _tell_new_lines(work / LOG, seen, say)
                return state


def _summary_of(file: Path, number: str) -> dict[str, Any]:
    """What the server wrote at the end of this very run; empty before that."""
    try:
        found = read_json(Summary, file.read_bytes(), str(file))
    except (FileNotFoundError, RunError):  # damaged: of an earlier run
        return {}
    return asdict(found) if str(found.flower_run) == number else {}


def status(work: Path, number: str) -> str:
    """What Flower calls the state of a run."""
    return str(ask(["flwr", "ls", CONNECTION, "--run-id", number], _home(work))["runs"][0]["status"])


def ask(words: Sequence[str], home: Path) -> dict[str, Any]:
    """Run one of Flower's commands that answer in JSON. Some return 0 and say in their answer that they failed."""
    said = call([*words, "--format", "json"], home)
    try:
        found = json.loads(said)
    except ValueError:
        raise _failed(words, said) from None
    if not isinstance(found, dict) or found.get("success") is not True:
        raise _failed(words, str(found.get("error-message", found)) if isinstance(found, dict) else said)
    return found


def call(words: Sequence[str], home: Path, cwd: Path | None = None) -> str:
    """Run one of Flower's commands to its end; what it printed."""
    done = subprocess.run(
        [_program(words[0]), *words[1:]], env=environment(home), cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise _failed(words, done.stderr or done.stdout)
    return done.stdout


def _failed(words: Sequence[str], said: str) -> RunError:
    text = " ".join(said.split())[-300:]
    hint = "; is `fedbicross flower up` running?" if "SuperLink is unavailable" in text else ""
    return RunError("flower_command", f"`{' '.join(words[:2])}` failed: {text or 'it said nothing'}{hint}")


def environment(home: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every Flower process: its home, no telemetry, no downloads, our programs on the path."""
    outer = dict(os.environ if given is None else given)
    path = os.pathsep.join([sysconfig.get_path("scripts"), outer.get("PATH", os.defpath)])
    return {**outer, **_QUIET, "FLWR_HOME": str(home), "PATH": path}


def free_port() -> int:
    """A port of this machine that nobody uses, and that the system by default gives to nobody who asks for any port.

    One of those may be gone between this look and the start of the program that it is for.
    """
    for port in random.SystemRandom().sample(_OWN_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError("port", f"no free port from {_OWN_PORTS[0]} to {_OWN_PORTS[-1]}")


def _tell_new_lines(log: Path, seen: int, say: Callable[[str], None]) -> int:
    if not log.exists():
        return seen
    with log.open("rb") as file:
        file.seek(seen)
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    for line in whole.decode("utf-8", "replace").splitlines():
        say(line)
    return seen + len(whole)


def _toml(values: dict[str, Any]) -> bytes:
    return tomli_w.dumps(values).encode()


def _home(work: Path) -> Path:
    require_flower()
    home = work.absolute() / "flower-home"
    try:
        make_private(home)
    except OSError as error:
        raise RunError("cannot_write", f"cannot write to {work}: {error.strerror}") from None
    return home


def _python(module: str, *words: str) -> list[str]:
    return [sys.executable, "-m", f"fedbicross.transport.flower.{module}", *words]


def _program(name: str) -> str:
    require_flower()
    found = shutil.which(name, path=environment(Path())["PATH"])
    if found is None:
        raise ConfigError("no_flower", f"the command {name} is missing; install Flower again")
    return found


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ConfigError("missing_file", f"{file} does not exist")
    return file.absolute()
