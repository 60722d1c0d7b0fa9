"""A real deployment on loopback: SuperLink, three SuperNodes, TLS, node keys, no network. All by the commands that a
person types. Flower runs: one cut off after the uploads, its repetition, one with every fault at once that a member or
a stranger can cause, one in which a site's policy refuses, and one with a dead site."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from PIL import Image

import fedbicross
from fedbicross.bundle import keys
from fedbicross.context import Silent
from fedbicross.engine.train import Trained
from fedbicross.errors import UploadError
from fedbicross.messages import Reply, Upload
from fedbicross.privacy import ledger
from fedbicross.transport import files, site_data
from fedbicross.transport.flower import certificates, deploy
from small import TINY_METHODS
from transport.sites import everything

SITES = ("north", "south", "east")
CLASSES = ("dark", "middle", "bright")
QUOTA = 4  # megabytes: enough for every upload here
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


ALLOWING = 'methods = ["fedbicross"]'
REFUSING = """
[audit]
max_auc = 0.5
effort = {shadows = 4, images = 20, canaries = 20, inverted = 2, steps = 1}
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

    def agree(self, run_id: str, **more: Any) -> files.FederationFile:
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
            **more,
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
        words = ("--key", "signing.key", "--port", str(self.port), "--device", "cpu", "--node-megabytes", str(QUOTA))
        self.begin("server", "flower", "up", *words)
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
            (made.root / name / "policy.toml").write_text(ALLOWING)
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


# --- everything at once ------------------------------------------------------------------------------------------


class Garbage(ConfigRecord):
    """A record whose bytes no parser can read."""

    def deflate(self) -> bytes:
        return add_header_to_object_body(b"\xff" * 50, self)


Garbage.__qualname__ = "ConfigRecord"  # what Flower writes before the bytes


class HostileNode(threading.Thread):
    """A node that was let in, and answers every question with ``record``."""

    naming = threading.Lock()  # Flower knows one node in a process

    def __init__(self, deployment: Deployment, name: str, record: ArrayRecord | ConfigRecord) -> None:
        super().__init__(daemon=True)
        deployment.cli("server", "flower", "node-key", "--out", f"{name}.key")
        deployment.cli("server", "flower", "admit", f"{name}.key.pub", "--name", name)
        self.record = record
        self.private = load_ssh_private_key((deployment.root / f"server/{name}.key").read_bytes(), None)
        assert isinstance(self.private, ec.EllipticCurvePrivateKey)
        self.authority = (deployment.root / "server/certificates/ca.crt").read_bytes()
        self.address, self.refused, self.ended = f"localhost:{deployment.port}", 0, threading.Event()

    def run(self) -> None:
        signed = NodeAuthHttpInterceptor(self.private, self.private.public_key())
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        with FleetHttpClient.from_server_address(self.address, False, self.authority, [version, signed]) as self.client:
            node = self.ask("ActivateNode", public_key=public_key_to_bytes(self.private.public_key()))
            self.node = FlowerNode(node_id=node.node_id)
            while not self.ended.wait(1.0):
                self.ask("SendNodeHeartbeat", node=self.node)
                found = self.ask("PullMessages", node=self.node)
                for message in found.messages_list if found is not None else ():
                    self.answer(message_from_proto(message))

    def ask(self, call: str, **fields: Any) -> Any:
        """One call, again until the server is there."""
        kind = {"ActivateNode": ActivateNodeRequest, "SendNodeHeartbeat": SendNodeHeartbeatRequest}
        kind |= {
            "PullMessages": PullMessagesRequest,
            "PushMessages": PushMessagesRequest,
            "PushObject": PushObjectRequest,
        }
        if call in ("ActivateNode", "SendNodeHeartbeat"):
            fields["heartbeat_interval"] = 30.0
        while not self.ended.is_set():
            try:
                return getattr(self.client, call)(kind[call](**fields))
            except httpx.HTTPStatusError as error:
                if error.response.status_code == 413:
                    self.refused += 1
                    return None
                time.sleep(1.0)
            except httpx.TransportError:
                time.sleep(1.0)
        return None

    def answer(self, question: Message) -> None:
        with self.naming:
            TaskIdentity._run_id, TaskIdentity._node_id = question.metadata.run_id, self.node.node_id
            answer = Message(RecordDict({"note": self.record}), reply_to=question)
            answer.metadata.__dict__["_message_id"] = answer.object_id
            objects = get_all_nested_objects(answer)
        pushed = self.ask(
            "PushMessages",
            node=self.node,
            messages_list=[message_to_proto(remove_content_from_message(answer))],
            message_object_trees=[get_object_tree(answer)],
        )
        for number in pushed.objects_to_push if pushed is not None else ():
            content = objects[number].deflate()
            more = {"run_id": question.metadata.run_id, "session_id": pushed.session_id}
            self.ask("PushObject", node=self.node, object_id=number, object_content=content, **more)


def crowd(deployment: Deployment, many: int, said: bytes) -> list[ssl.SSLSocket]:
    """Strangers who connect, say half of something, and stay."""
    trust = ssl.create_default_context(cafile=str(deployment.root / "server/certificates/ca.crt"))
    lines = []
    for _ in range(many):
        plain = socket.create_connection(("localhost", deployment.port), timeout=60)
        line = trust.wrap_socket(plain, server_hostname="localhost")
        with contextlib.suppress(OSError):
            line.sendall(said)
        lines.append(line)
    return lines


def test_all_faults_at_once_and_every_honest_site_gets_its_reply(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A locked database, nodes that send garbage or too much, strangers who never finish, a gate that is killed."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    federation = deployment.agree("faulty")
    much = {f"{number}": Array("uint8", (5 << 20,), "x", os.urandom(5 << 20)) for number in range(4)}
    garbling = HostileNode(deployment, "west", Garbage({}))
    greedy = HostileNode(deployment, "far", ArrayRecord(much))
    for hostile in (garbling, greedy):
        hostile.start()
    log, home = deployment.root / "server/fedbicross-work/flower.log", deployment.root / "server/fedbicross-work"
    half = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: localhost\r\n"
    lines = crowd(deployment, 260, half)
    words = ("flower", "run", "--json", "--deadline-hours", "0.1", "--grace-hours", "0.05")
    with subprocess.Popen(
        [*CLI, *words], cwd=deployment.root / "server", env=deployment.environment(), stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            deployment.wait(lambda: log.exists() and f"run {federation.run}" in log.read_text(), "the run", 200)
            base = sqlite3.connect(home / "flower-home/state.db", timeout=60, isolation_level=None)
            base.execute("BEGIN IMMEDIATE")
            lines += crowd(deployment, 40, half + b"Content-Length: 9000000\r\n\r\n" + bytes(8_000_000))
            (gate,) = [pid for pid in descendants(deployment.processes["server"].pid) if "flower.gate" in command(pid)]
            os.kill(gate, signal.SIGKILL)
            deployment.wait(lambda: deployment.ask("/health") == 200, "the gate", 100)
            time.sleep(12)  # Flower's calls wait for five seconds, and then fail
            base.execute("ROLLBACK")
            base.close()
            out, _ = running.communicate(timeout=400)
        finally:
            running.kill()
            for hostile in (garbling, greedy):
                hostile.ended.set()
            for line in lines:
                line.close()
    said = deployment.said("server") + log.read_text()[-6000:]
    assert running.returncode == 0, said
    summary = json.loads(out)
    assert summary["delivered"] == dict.fromkeys(SITES, "model_made"), said
    assert over_flower(deployment, "faulty", SITES) == by_hand(deployment, federation, SITES, tmp_path)
    everything = (deployment.root / "server.log").read_text(errors="replace")
    assert "the gate ended by signal 9; it is started again" in everything
    assert "unreadable" in summary["refused"], said
    assert greedy.refused > 0 and "--node-megabytes" in log.read_text()
    size = sum(file.stat().st_size for file in (home / "flower-home").glob("state.db*"))
    assert size < 30 << 20, f"{size:,} bytes in Flower's database"
    for hostile in (garbling, greedy):
        hostile.join(60)


def command(pid: int) -> str:
    return subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True).stdout


def test_what_a_sites_policy_refuses_never_leaves_and_the_others_go_on(deployment: Deployment, tmp_path: Path) -> None:
    """The strictest case: the upload is made, signed and audited before the site's own rules keep it there."""
    federation = deployment.agree("refused", hold_out=0.5)
    (deployment.root / "east/policy.toml").write_text(REFUSING)  # no need to start the node again
    summary = run(deployment, grace=60)
    site, server = deployment.work("east", "refused"), deployment.root / "server"
    own_log = (deployment.root / "east/fedbicross-work/flower.log").read_text()
    assert "over max_auc = 0.5" in own_log, "it came as far as the audit"
    assert summary["complete"] is True and summary["missing"] == ["east"]
    assert set(summary["refused"]) == {"policy_audit"}
    assert summary["delivered"] == {"north": "model_made", "south": "model_made"}
    assert over_flower(deployment, "refused", SITES[:2]) == by_hand(deployment, federation, SITES[:2], tmp_path)

    kept = everything(site)
    assert [name for name in kept if name.endswith(".html")], "the statement of the refusal stays"
    assert not any(is_upload(data) for data in kept.values())
    assert not (site / "replies").exists()
    books = {name: deployment.root / name / "fedbicross-work" / ledger.NAME for name in ("north", "east")}
    runs = {name: [entry.run for entry in ledger.read(book)] for name, book in books.items()}
    assert federation.run in runs["north"] and federation.run not in runs["east"]

    at_server = everything(server)
    for name in ("north", "east"):  # of the first shows that this would find something
        (own,) = (deployment.work(name, "refused") / f"clients/{name}/client_models").iterdir()
        weights = Trained.unpack(own.read_bytes()).state["head.weight"].numpy().tobytes()
        assert any(weights in data for data in at_server.values()) is (name == "north")
    said = (server / "fedbicross-work/flower.log").read_text()
    assert "policy_audit" in said and "max_auc" not in said, "the server learns the code, not the reason"
    (deployment.root / "east/policy.toml").write_text(ALLOWING)


def is_upload(data: bytes) -> bool:
    try:
        return bool(Upload.unpack(data))
    except UploadError:
        return False


def test_a_dead_site_is_named_and_the_quorum_goes_on(deployment: Deployment, tmp_path: Path) -> None:
    federation = deployment.agree("second")
    deployment.kill("east")  # Flower still counts it as online, and asks it
    summary = run(deployment, grace=4)
    assert summary["complete"] is True
    assert summary["missing"] == ["east"]
    assert summary["delivered"] == {"north": "model_made", "south": "model_made"}
    assert over_flower(deployment, "second", SITES[:2]) == by_hand(deployment, federation, SITES[:2], tmp_path)
    assert "missing: east" in (deployment.root / "server/fedbicross-work/flower.log").read_text()
