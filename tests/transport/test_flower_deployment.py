"""A real deployment on loopback: SuperLink, three SuperNodes, TLS, node keys, no network. All by the commands that a
person types. Three Flower runs: one cut off after the uploads, its repetition, and one with a dead site."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedbicross
from fedbicross.bundle import keys
from fedbicross.context import Silent
from fedbicross.messages import Reply
from fedbicross.transport import files, site_data
from fedbicross.transport.flower import certificates, deploy
from small import TINY_METHODS

SITES = ("north", "south", "east")
CLASSES = ("dark", "middle", "bright")
CLI = [sys.executable, "-c", "from fedbicross.cli import main; main()"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


# Every Python process of the deployment loads this first: no connection to another machine, and a record of each try.
GUARD = """
import pathlib, socket

def allowed(host):
    return host in ("localhost", "127.0.0.1", "::1", b"localhost", b"127.0.0.1", "", None)

def note(host):
    with (pathlib.Path(__file__).parent / "tries").open("a") as out:
        out.write(f"{host!r}\\n")
    raise OSError("there is no network")

def guarded(function, host_of):
    def call(*args, **more):
        host = host_of(args)
        return function(*args, **more) if allowed(host) else note(host)
    return call

for name in ("connect", "connect_ex"):
    plain = getattr(socket.socket, name)
    setattr(socket.socket, name, guarded(plain, lambda args: args[1][0] if isinstance(args[1], tuple) else None))
socket.getaddrinfo = guarded(socket.getaddrinfo, lambda args: args[0])
"""


class Deployment:
    """The folders and processes of a server and three sites; nothing but Flower connects them."""

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, deploy.free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stranger: subprocess.Popen[bytes] | None = None
        (root / "guard").mkdir()
        (root / "guard" / "sitecustomize.py").write_text(GUARD)
        self.server_key = keys.generate_key()
        self.keys = {name: keys.generate_key() for name in SITES}
        for name in ("server", *SITES):
            (root / name).mkdir()
            key = self.server_key if name == "server" else self.keys[name]
            keys.save_private_key(root / name / "signing.key", key)
        for number, name in enumerate(SITES):
            draw_images(root / name / "images", number)
        homes = [root / folder / "flower-home" for folder in self.work_folders()]
        deploy.lock_app(homes[0])  # four seconds of Flower's commands: once is enough, the others find it done
        for home in homes[1:]:
            shutil.copytree(homes[0], home)
        self.cli("server", "flower", "certificates", "--host", "localhost")
        for name in SITES:
            certificates.make_node_key(root / name / "node.key")
            shutil.copy(root / "server/certificates/ca.crt", root / name / "ca.crt")

    @staticmethod
    def work_folders() -> list[str]:
        return [*(f"{name}/fedbicross-work" for name in SITES), "north/stranger-work"]

    def agree(self, run_id: str) -> files.FederationFile:
        """Everybody gets the same new federation file."""
        federation = files.new_federation(
            classes=CLASSES,
            server=keys.public_text(self.server_key),
            clients={name: keys.public_text(key) for name, key in self.keys.items()},
            image_size=12,
            model="resnet8",
            method="fedbicross",
            settings={**TINY_METHODS["fedbicross"], "clusters": 3},
            training={"recipe": "modern", "epochs": 2, "batch_size": 8},
            run_id=run_id,
            quorum=2,
            class_counts={"smallest": 1},
        )
        for name in ("server", *SITES):
            (self.root / name / "federation.toml").write_text(files.federation_text(federation))
        return federation

    def cli(self, who: str, *words: str) -> str:
        """One command, typed in somebody's folder."""
        done = subprocess.run(
            [*CLI, *words], cwd=self.root / who, env=self.environment(), capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, f"{words}: {done.stderr[-2000:]}{self.said('server')}"
        return done.stdout

    def begin(self, who: str, *words: str, folder: str | None = None) -> None:
        """A process that stays, with a group of its own so that its children end with it."""
        with (self.root / f"{who}.log").open("ab") as log:
            self.processes[who] = subprocess.Popen(
                [*CLI, *words],
                cwd=self.root / (folder or who),
                env=self.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def up(self) -> None:
        self.begin("server", "flower", "up", "--key", "signing.key", "--port", str(self.port), "--device", "cpu")
        self.wait(lambda: self.ask("/health") == 200, "the SuperLink", 300)

    def join(self, name: str, *more: str, who: str | None = None) -> None:
        words = ("--server", f"localhost:{self.port}", "--key", "signing.key", "--data", "images", "--device", "cpu")
        self.begin(who or name, "flower", "join", *words, *more, folder=name)

    def stranger_knocks(self) -> None:
        """A node with a site's whole folder, but with a node key that nobody admitted."""
        self.cli("north", "flower", "node-key", "--out", "stranger.key")
        self.join("north", "--node-key", "stranger.key", "--work", "stranger-work", who="stranger")
        self.stranger = self.processes.pop("stranger")

    def kill(self, who: str) -> None:
        """Pull the plug: the process and all its children, at once."""
        process = self.processes.pop(who)
        group = os.getpgid(process.pid)
        children = descendants(process.pid)  # Flower starts some of them in sessions of their own
        os.killpg(group, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.wait()

    def wait(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"{what} did not come:\n{self.said('server')}"
            for who, process in self.processes.items():
                assert process.poll() is None, f"{who} ended:\n{self.said(who)}"
            time.sleep(0.05)

    def said(self, who: str) -> str:
        log = self.root / f"{who}.log"
        return log.read_text(errors="replace")[-6000:] if log.exists() else ""

    def environment(self) -> dict[str, str]:
        paths = [str(self.root / "guard"), str(Path(fedbicross.__file__).parents[1])]
        one = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **one, "PYTHONPATH": os.pathsep.join(paths)}

    def ask(self, path: str, body: bytes | None = None) -> int:
        """The status of one call through the gate, as a stranger with the CA certificate can make it."""
        context = ssl.create_default_context(cafile=str(self.root / "server/certificates/ca.crt"))
        headers = {"Content-Type": "application/protobuf"}
        question = urllib.request.Request(f"https://localhost:{self.port}{path}", body, headers)
        try:
            with urllib.request.urlopen(question, context=context, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def work(self, who: str, run_id: str) -> Path:
        return self.root / who / "fedbicross-work" / run_id


def descendants(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parent = {int(a): int(b) for a, b in (line.split() for line in found.splitlines())}
    out = [child for child in parent if parent[child] == pid]
    return out + [deeper for child in out for deeper in descendants(child)]


def draw_images(folder: Path, number: int) -> None:
    """Three classes that differ in brightness; each site draws its own."""
    rng = np.random.default_rng(number)
    for index, label in enumerate(CLASSES):
        (folder / label).mkdir(parents=True)
        for image in range(8):
            pixels = rng.normal(50 + 70 * index, 25, (12, 12, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{image}.png")


def by_hand(deployment: Deployment, federation: files.FederationFile, sites: tuple[str, ...], work: Path) -> dict:
    """The file run: the same federation in this process, bytes carried from function to function."""
    clients, uploads = {}, {}
    for name in sites:
        data = deployment.root / name / "images"
        clients[name], _ = site_data.load_site(data, federation.task, name, federation.hold_out, federation.seed)
        key = deployment.keys[name]
        uploads[name] = files.make_upload(federation, clients[name], key, work / name, Silent(), device="cpu")
    replies = files.fuse_uploads(federation, uploads, work / "server", deployment.server_key, device="cpu")
    models = {
        name: files.personalize(federation, clients[name], replies[name], work / name, device="cpu").pack()
        for name in sites
    }
    return {"uploads": uploads, "replies": replies, "models": models}


def over_flower(deployment: Deployment, run_id: str, sites: tuple[str, ...]) -> dict:
    """What lies at the server and at the sites afterwards."""
    found: dict[str, dict[str, bytes]] = {"uploads": {}, "replies": {}, "models": {}}
    for name in sites:
        found["uploads"][name] = (deployment.work("server", run_id) / f"uploads/{name}.safetensors").read_bytes()
        found["replies"][name] = (deployment.work(name, run_id) / f"replies/{name}.safetensors").read_bytes()
        (model,) = (deployment.work(name, run_id) / f"clients/{name}/models").iterdir()
        found["models"][name] = model.read_bytes()
    return found


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("flower"))
    try:
        made.agree("first")
        made.up()
        for name in SITES:
            made.cli("server", "flower", "admit", f"../{name}/node.key.pub", "--name", name)
            made.join(name)
        made.stranger_knocks()
        yield made
        assert not (made.root / "guard/tries").exists(), (made.root / "guard/tries").read_text()
    finally:
        if made.stranger is not None and made.stranger.poll() is None:
            made.processes["stranger"] = made.stranger
        for who in list(made.processes):
            made.kill(who)


def run(deployment: Deployment, grace: float) -> dict:
    words = ("flower", "run", "--json", "--deadline-hours", "0.2", "--grace-hours", str(grace / 3600))
    return json.loads(deployment.cli("server", *words))


def test_cut_off_after_the_uploads_and_repeated(deployment: Deployment, tmp_path: Path) -> None:
    """The first run loses its SuperLink; the second trains nothing again and ends with the bytes of a file run."""
    federation = deployment.agree("first")
    first = subprocess.Popen(
        [*CLI, "flower", "run"],
        cwd=deployment.root / "server",
        env=deployment.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    inbox = deployment.work("server", "first") / "uploads"
    try:
        deployment.wait(lambda: len(list(inbox.glob("*.safetensors"))) == len(SITES), "uploads", 300)
    finally:
        first.kill()
        first.wait()
    deployment.kill("server")
    for name in SITES:
        assert not (deployment.work(name, "first") / "replies").exists()
    kept = {name: deployment.work(name, "first") / f"clients/{name}/upload.safetensors" for name in SITES}
    before = {name: (path.stat().st_ino, path.stat().st_mtime_ns) for name, path in kept.items()}

    deployment.up()  # the same database: the nodes come back by themselves
    summary = run(deployment, grace=300)
    assert summary["complete"] is True
    assert summary["delivered"] == dict.fromkeys(SITES, "model_made")
    assert summary["missing"] == summary["late"] == summary["undelivered"] == []
    assert {name: (path.stat().st_ino, path.stat().st_mtime_ns) for name, path in kept.items()} == before
    for name in SITES:
        log = (deployment.root / name / "fedbicross-work/flower.log").read_text()
        assert log.count("sending the upload") == 2
        assert log.count(f"training {name}: 2/2") == 1, "trained once, in the run that was cut off"

    found = over_flower(deployment, "first", SITES)
    assert found == by_hand(deployment, federation, SITES, tmp_path)
    tensors = [Reply.unpack(data).tensors for data in found["replies"].values()]
    for one, other in combinations(tensors, 2):
        assert any(not torch.equal(one[key], other[key]) for key in one), "each site has a reply of its own"


def test_strangers_stay_outside(deployment: Deployment) -> None:
    """What a CA certificate alone is good for: nothing."""
    assert deployment.stranger is not None
    assert deployment.stranger.wait(300) != 0
    assert not (deployment.root / "north/stranger-work/first").exists()
    for path in (
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/control/list-runs",
        "/v1/runtime/get-nodes",
    ):
        assert deployment.ask(path, b"") == 404
    assert deployment.ask("/v1/fleet/pull-messages", b"") in (401, 403)


def test_a_dead_site_is_named_and_the_quorum_goes_on(deployment: Deployment, tmp_path: Path) -> None:
    federation = deployment.agree("second")
    deployment.kill("east")  # Flower still counts it as online, and asks it
    summary = run(deployment, grace=4)
    assert summary["complete"] is True
    assert summary["missing"] == ["east"]
    assert summary["delivered"] == {"north": "model_made", "south": "model_made"}
    assert over_flower(deployment, "second", SITES[:2]) == by_hand(deployment, federation, SITES[:2], tmp_path)
    assert "missing: east" in (deployment.root / "server/fedbicross-work/flower.log").read_text()
