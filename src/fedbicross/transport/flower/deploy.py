"""Certificates, node keys and the processes of a deployment, with every switch that keeps Flower offline.

Flower's commands are started as they are; nothing of its inside is touched. Nothing here imports it.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fedbicross.errors import ConfigError, RunError
from fedbicross.runs.store import write_atomic
from fedbicross.settings import as_toml
from fedbicross.transport.federation_file import load_federation
from fedbicross.transport.flower import require_flower
from fedbicross.transport.flower.places import LOG, SERVER_FILE, SUMMARY, ServerPlaces, SitePlaces, Waiting, load_places

CA, CERTIFICATE, SERVER_KEY = "ca.crt", "server.crt", "server.key"
CONNECTION = "fedbicross"  # the name of our SuperLink in Flower's configuration
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else it would fetch packages at every run
}


# --- certificates and keys -----------------------------------------------------------------------------------


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 825) -> None:
    """A certificate authority of one's own and a server certificate for ``hosts``.

    The authority's private key is used once and forgotten, so that nobody can make a second server certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)  # clocks differ a little
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])

    def certificate(subject: str, key: ec.EllipticCurvePrivateKey, *extensions: tuple[Any, bool]) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("fedbicross federation"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + datetime.timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(authority_key, hashes.SHA384())

    def usage(signs_certificates: bool) -> x509.KeyUsage:
        others = dict.fromkeys(
            (
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        return x509.KeyUsage(
            digital_signature=not signs_certificates,
            key_cert_sign=signs_certificates,
            crl_sign=signs_certificates,
            **others,
        )

    authority = certificate(
        "fedbicross federation",
        authority_key,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (usage(True), True),
    )
    every_host = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))
    server = certificate(
        every_host[0],
        server_key,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (usage(False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([_host(name) for name in every_host]), False),
    )
    for name in (CA, CERTIFICATE, SERVER_KEY):
        _check_absent(folder / name)
    _write_private(folder / SERVER_KEY, server_key, openssh=False)
    write_atomic(folder / CERTIFICATE, _pem(server))
    write_atomic(folder / CA, _pem(authority))


def make_node_key(file: Path) -> None:
    """The key by which a SuperNode shows who it is: ``file`` (private) and ``file.pub`` (to hand over)."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = file.with_name(file.name + ".pub")
    for path in (file, public):
        _check_absent(path)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(file, key, openssh=True)
    write_atomic(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def _host(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise ConfigError("host", f"{name!r} is neither a host name nor an address") from None


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(certificate.public_bytes(Encoding.PEM))


def _write_private(file: Path, key: Any, openssh: bool) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    form = PrivateFormat.OpenSSH if openssh else PrivateFormat.PKCS8
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(key.private_bytes(Encoding.PEM, form, NoEncryption()))
    except OSError as error:
        raise ConfigError("key_write", f"cannot create {file}: {error.strerror}") from None


def _check_absent(file: Path) -> None:
    if file.exists():
        raise ConfigError("key_exists", f"{file} exists; keys and certificates are never overwritten")


# --- processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A process to start: its words and its environment."""

    command: list[str]
    environment: dict[str, str]

    def become(self) -> None:
        """Turn this process into that one, so that signals and exit codes need no middleman."""
        os.execve(self.command[0], self.command, self.environment)

    def begin(self) -> subprocess.Popen[bytes]:
        """Start it beside this process."""
        return subprocess.Popen(self.command, env=self.environment)


def superlink(places: ServerPlaces, certificates: Path, host: str, port: int) -> tuple[Start, Start]:
    """The server's two processes: the SuperLink, on the loopback only, and the gate on ``host:port`` before it.

    TLS on both, only registered nodes, state on disk, nothing fetched.
    """
    load_federation(places.federation_file)
    places.load_key()  # now rather than after days of waiting
    home, inner = _home(Path(places.work)), free_port()
    settings = Path(places.work) / "server.toml"
    write_atomic(settings, as_toml(places).encode())
    authority, certificate, key = (str(_existing(certificates / name)) for name in (CA, CERTIFICATE, SERVER_KEY))
    connection = {"address": f"127.0.0.1:{inner}", "root-certificates": authority}
    write_atomic(home / "config.toml", _toml({"superlink": {"default": CONNECTION, CONNECTION: connection}}))
    link = [
        _program("flower-superlink"),
        *("--host", "127.0.0.1", "--port", str(inner)),
        *("--database", str(home / "state.db")),
        "--enable-supernode-auth",
        *("--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certfile", authority),
        "--disable-runtime-dependency-installation",
    ]
    gate = [
        *(sys.executable, "-m", "fedbicross.transport.flower.gate"),
        *("--superlink", f"https://127.0.0.1:{inner}", "--authority", authority),
        *("--certificate", certificate, "--key", key, "--host", host, "--port", str(port)),
    ]
    surroundings = environment(home)
    return Start(link, {**surroundings, SERVER_FILE: str(settings)}), Start(gate, surroundings)


def supernode(
    places: SitePlaces, address: str, authority: Path, node_key: Path, local_port: int | None = None
) -> Start:
    """A site's process. It opens no port to the outside; it calls the server."""
    places.name(load_federation(places.federation_file))
    trusted, own = str(_existing(authority)), str(_existing(node_key))
    home = _home(Path(places.work))
    settings = Path(places.work) / "site.toml"
    write_atomic(settings, as_toml(places).encode())
    lock_app(home)
    command = [
        _program("flower-supernode"),
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
    """File permissions do not bind root."""
    return os.geteuid() == 0


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


def run(work: Path, waiting: Waiting, say: Callable[[str], None]) -> dict[str, Any]:
    """Start the run, tell what the server notes, and return its summary once Flower calls the run completed."""
    home, log = _home(work), work / LOG
    federation = load_federation(load_places(ServerPlaces, _existing(work / "server.toml")).federation_file)
    seen = log.stat().st_size if log.exists() else 0
    numbers = " ".join(f"{key.replace('_', '-')}={value}" for key, value in waiting.model_dump().items())
    with tempfile.TemporaryDirectory() as folder:
        app = write_app(Path(folder) / "fedbicross-flower")
        said = call(["flwr", "run", str(app), CONNECTION, "--run-config", numbers, "--format", "json"], home)
    number = str(json.loads(said)["run-id"])
    say(f"Flower run {number}")
    summary = work / federation.run_id / SUMMARY
    try:
        state = _follow(work, number, summary, seen, say)
    except KeyboardInterrupt:
        say(f"stopping Flower run {number}; what came is kept, and the same command goes on")
        call(["flwr", "stop", number, CONNECTION], home)
        raise
    if state != "finished:completed":
        raise RunError("flower_run", f"Flower run {number} ended as {state}; the reason is in {log}")
    return _summary_of(summary, number)


def _follow(work: Path, number: str, summary: Path, seen: int, say: Callable[[str], None]) -> str:
    """Tell what the server notes until Flower calls the run finished. Asking Flower starts a process: now and then."""
    asked = time.monotonic()
    while True:
        time.sleep(1.0)
        seen = _tell_new_lines(work / LOG, seen, say)
        if _summary_of(summary, number) or time.monotonic() - asked >= 30:
            asked = time.monotonic()
            state = status(work, number)
            if state.startswith("finished"):
                _tell_new_lines(work / LOG, seen, say)
                return state


def _summary_of(file: Path, number: str) -> dict[str, Any]:
    """What the server wrote at the end of this very run; empty before that."""
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    return found if str(found["flower_run"]) == number else {}


def status(work: Path, number: str) -> str:
    """What Flower calls the state of a run."""
    said = call(["flwr", "ls", CONNECTION, "--run-id", number, "--format", "json"], _home(work))
    return str(json.loads(said)["runs"][0]["status"])


def call(words: Sequence[str], home: Path, cwd: Path | None = None) -> str:
    """Run one of Flower's commands to its end; what it printed."""
    done = subprocess.run(
        [_program(words[0]), *words[1:]], env=environment(home), cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        text = " ".join((done.stderr or done.stdout).split())[-300:]
        raise RunError("flower_command", f"`{' '.join(words[:3])}` failed: {text}")
    return done.stdout


def environment(home: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every Flower process: its home, no telemetry, no downloads, our programs on the path."""
    outer = dict(os.environ if given is None else given)
    path = os.pathsep.join([sysconfig.get_path("scripts"), outer.get("PATH", os.defpath)])
    return {**outer, **_QUIET, "FLWR_HOME": str(home), "PATH": path}


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    import tomli_w

    return tomli_w.dumps(values).encode()


def _home(work: Path) -> Path:
    require_flower()
    home = work.absolute() / "flower-home"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError("cannot_write", f"cannot write to {work}: {error.strerror}") from None
    return home


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
