"""The server's side against nodes played in this process: who is asked when, what is believed, when it goes on."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from google.protobuf.message import DecodeError

from fedbicross.bundle import keys, sign
from fedbicross.disclosure.policy import Policy, check_method
from fedbicross.errors import ConfigError, FedBiCrossError, MethodError, RunError, UploadError
from fedbicross.messages import Upload
from fedbicross.transport import files
from fedbicross.transport.flower import client, envelope, server
from fedbicross.transport.flower.server import OneShot
from fedbicross.transport.flower.settings import SERVER_FILE, RunOptions
from small import refuses, tiny_clients
from transport.sites import Sites, make_sites

KEYS = {name: keys.generate_key() for name in ("client-0", "client-1", "client-2")}
SERVER_KEY = keys.generate_key()
Answer = Callable[[Message], Message | None]


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower lets only the process of a run make messages."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


@pytest.fixture(scope="module")
def federation() -> files.FederationFile:
    return files.new_federation(
        classes=["a", "b", "c"],
        server=keys.public_text(SERVER_KEY),
        clients={name: keys.public_text(key) for name, key in KEYS.items()},
        image_size=12,
        model="resnet8",
        method="majority",
        quorum=2,
        class_counts={"smallest": 1},
        run_id="played",
    )


@pytest.fixture(scope="module")
def on_features(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sites, dict[str, bytes], bytes]:
    """Sites whose uploads have to agree on an encoder, their honest uploads, and one of client-0 with another one."""
    sites = make_sites("fedcgs", settings={"encoder": "tiny"}, quorum=2, class_counts={"smallest": 0})
    work = tmp_path_factory.mktemp("features")
    honest = {
        client.name: files.make_upload(sites.federation, client, key, work / client.name, device="cpu")
        for client, key in zip(sites.clients, sites.client_keys.values(), strict=True)
    }
    upload = files.verify_upload(sites.federation, honest["client-0"])
    encoder = {**upload.extra["encoder"], "digest": "0" * 64}
    odd = sign(replace(upload, extra={**upload.extra, "encoder": encoder}).pack(), sites.client_keys["client-0"])
    return sites, honest, odd


def real_fuse(sites: Sites, folder: Path, **options: Any) -> Callable[[Any], dict[str, bytes]]:
    return lambda paths: sites.fuse(paths, folder / "server", **options)


@pytest.fixture(scope="module")
def uploads(federation: files.FederationFile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    work = tmp_path_factory.mktemp("sites")
    return {
        client.name: files.make_upload(federation, client, KEYS[client.name], work / client.name, device="cpu")
        for client in tiny_clients()
    }


class Clock:
    """Time that passes only while the server sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Node:
    """A node: the name that the operator gave it, and what it answers to each kind of question, in turn."""

    train: list[Answer]
    evaluate: list[Answer] = field(default_factory=list)
    name: str = ""
    online_from: float = 0.0
    takes: float = 0.0  # seconds to each answer
    asked: list[tuple[str, float]] = field(default_factory=list)


class PlayedGrid(Grid):
    """Flower's grid without Flower."""

    def __init__(self, nodes: dict[int, Node], clock: Clock) -> None:
        self.nodes, self.clock = nodes, clock
        self.answers: dict[str, tuple[float, Message]] = {}
        self.largest_pull = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            node = self.nodes[message.metadata.dst_node_id]
            number = f"message-{sum(len(n.asked) for n in self.nodes.values())}"
            message.metadata.__dict__["_message_id"] = number
            kind = message.metadata.message_type
            script = node.train if kind == "train" else node.evaluate
            node.asked.append((kind, self.clock()))
            answer = (script.pop(0) if len(script) > 1 else script[0])(message)
            if answer is not None:
                self.answers[number] = (self.clock() + node.takes, answer)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = [n for n in message_ids if n in self.answers and self.answers[n][0] <= self.clock()]
        found = [self.answers.pop(number)[1] for number in ready]
        self.largest_pull = max(self.largest_pull, len(found))
        return found

    def get_nodes(self) -> Any:
        here = {number: node for number, node in self.nodes.items() if node.online_from <= self.clock()}
        return [SimpleNamespace(node_id=number, name=node.name) for number, node in here.items()]

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    run = property(lambda self: None)

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **more: Any) -> Iterable[Message]:
        raise NotImplementedError


def sends(data: bytes) -> Answer:
    return lambda message: Message(envelope.content({}, data), reply_to=message)


def confirms(message: Message) -> Message:
    digest = hashlib.sha256(envelope.bundle_of(message)).hexdigest()
    return Message(envelope.content({"sha256": digest, "state": "model_made"}), reply_to=message)


def says(**note: str) -> Answer:
    return lambda message: Message(envelope.content(note), reply_to=message)


def fails(code: int, reason: str = "") -> Answer:
    return lambda message: Message(Error(code, reason), reply_to=message)


def silent(message: Message) -> None:
    del message


@dataclass
class Played:
    summary: dict[str, Any]
    said: list[str]
    fused: list[list[str]]
    grid: PlayedGrid
    clock: Clock
    began: float = 1000.0


def play(
    federation: files.FederationFile,
    folder: Path,
    *nodes: Node,
    fuse: Callable[[dict[str, Path]], dict[str, bytes]] | None = None,
    kind: type[PlayedGrid] = PlayedGrid,
    patience: float = 60.0,
    **limits: float,
) -> Played:
    clock, said, fused = Clock(), [], []
    grid = kind({100 + number: node for number, node in enumerate(nodes)}, clock)

    def joined(paths: Any) -> dict[str, bytes]:
        fused.append(sorted(paths))
        return {name: f"reply to {name}".encode() for name in paths}

    options = RunOptions(**{"deadline_seconds": 1000.0, "grace_seconds": 100.0, **limits})
    shot = OneShot(federation, folder, fuse or joined, options, said.append, clock, clock.sleep, patience)
    try:
        shot.run(grid)
    finally:
        summary = json.loads((folder / "flower.json").read_text()) if (folder / "flower.json").exists() else {}
        outcome = Played(summary, said, fused, grid, clock)
        play.last = outcome  # type: ignore[attr-defined]
    return outcome


def all_well(uploads: dict[str, bytes]) -> list[Node]:
    return [Node([sends(data)], [confirms]) for data in uploads.values()]


def test_everybody_sends_and_gets_a_reply_of_its_own(federation, uploads, tmp_path) -> None:
    done = play(federation, tmp_path, *all_well(uploads))
    assert done.summary["complete"] is True
    assert done.summary["delivered"] == dict.fromkeys(KEYS, "model_made")
    assert done.fused == [sorted(KEYS)]
    assert {path.stem: path.read_bytes() for path in (tmp_path / "uploads").iterdir()} == uploads
    assert done.grid.largest_pull == 1  # one upload in memory, not one from every site
    for node in done.grid.nodes.values():
        assert [kind for kind, _ in node.asked] == ["train", "evaluate"]


def test_each_upload_is_on_disk_before_the_next_one_is_looked_at(federation, uploads, tmp_path) -> None:
    on_disk = []

    class Watched(PlayedGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            on_disk.append(len(list((tmp_path / "uploads").glob("*"))))
            return super().pull_messages(message_ids)

    play(federation, tmp_path, *all_well(uploads), kind=Watched)
    assert on_disk[:3] == [0, 1, 2]


def test_a_second_run_goes_on_from_the_uploads_on_disk(federation, uploads, tmp_path) -> None:
    play(federation, tmp_path, *all_well(uploads))
    away = [Node([sends(data)], [confirms]) for name, data in uploads.items() if name != "client-2"]
    done = play(federation, tmp_path, *away)
    assert done.fused == [sorted(KEYS)]  # its upload counts, though the site is away now
    assert done.summary["undelivered"] == ["client-2"]
    assert done.summary["missing"] == []


def test_quorum_then_grace(federation, uploads, tmp_path) -> None:
    one, two, _ = all_well(uploads)
    dead = Node([silent])
    done = play(federation, tmp_path, one, two, dead, grace_seconds=50.0)
    assert done.fused == [["client-0", "client-1"]]
    assert done.summary["missing"] == ["client-2"]
    assert "fusing; missing: client-2" in done.said
    assert 50 <= done.clock.now - done.began <= 60


def test_a_site_that_comes_within_the_grace_takes_part(federation, uploads, tmp_path) -> None:
    one, two, three = all_well(uploads)
    three.online_from = 1090.0
    done = play(federation, tmp_path, one, two, three, grace_seconds=100.0)
    assert done.fused == [sorted(KEYS)]
    assert done.summary["missing"] == []


def test_no_quorum_until_the_deadline_is_an_error_that_names_the_missing(federation, uploads, tmp_path) -> None:
    one, *_ = all_well(uploads)
    with refuses(MethodError, "quorum", r"1 uploads can be used, 2 are needed; missing: client-1, client-2"):
        play(federation, tmp_path, one, Node([silent]), deadline_seconds=300.0)
    last = play.last  # type: ignore[attr-defined]
    assert last.fused == []
    assert last.summary["complete"] is False
    assert (tmp_path / "uploads/client-0.safetensors").exists()  # nothing is lost: the next run begins with it


@pytest.mark.parametrize(("code", "word"), [(5, "node_lost"), (8, "app_killed"), (2, "app_failed"), (77, "unknown")])
def test_a_node_that_failed_is_asked_again_ever_more_rarely(federation, uploads, tmp_path, code, word) -> None:
    one, two, three = all_well(uploads)
    three.train = [fails(code, "/home/secret/path"), fails(code), fails(code), *three.train]
    done = play(federation, tmp_path, one, two, three, retry_seconds=60.0, grace_seconds=900.0)
    assert done.summary["refused"] == [word] * 3
    assert done.summary["missing"] == []
    moments = [moment for kind, moment in three.asked if kind == "train"]
    pauses = [later - earlier for earlier, later in pairwise(moments)]
    assert [round(pause / 60) for pause in pauses] == [1, 2, 4]
    assert not any("secret" in line for line in done.said)


def test_a_site_that_could_not_is_named_by_its_registration(federation, uploads, tmp_path) -> None:
    one, two, _ = all_well(uploads)
    unable = Node([says(code="no_images")], name="client-2")
    done = play(federation, tmp_path, one, two, unable)
    assert "no_images" in done.summary["refused"]
    assert any(line.startswith("client-2: error[no_images]") for line in done.said)


def test_a_site_whose_policy_refuses_is_named_and_not_asked_again(federation, uploads, tmp_path) -> None:
    """It has decided: the others need not wait for it, where they are enough."""
    one, two, _ = all_well(uploads)
    declines = Node([says(code="policy_method")], name="client-2")
    done = play(federation, tmp_path, one, two, declines, retry_seconds=1.0, grace_seconds=900.0)
    assert [kind for kind, _ in declines.asked] == ["train"]
    assert done.summary["declined"] == {"client-2": "policy_method"}
    assert done.summary["missing"] == ["client-2"] and done.summary["refused"] == ["policy_method"]
    assert done.fused == [["client-0", "client-1"]] and sorted(done.summary["delivered"]) == ["client-0", "client-1"]
    assert done.clock.now - done.began < 60, "nobody waits out the grace"
    assert any(line.startswith("client-2: error[policy_method]") and "not asked again" in line for line in done.said)


def test_the_server_knows_a_policy_by_what_the_client_says_of_one(federation, uploads, tmp_path) -> None:
    """No code stands here: a policy's own refusal, as the client sends it."""
    config = {name: str(tmp_path / f"{name}.toml") for name in ("federation", "work", "key", "data")}
    Path(config["federation"]).write_text(files.federation_text(federation))

    def refusing(message: Message) -> Message:
        context, none = SimpleNamespace(node_config=config), Policy(methods=[])
        return client.answer(message, context, lambda *_: check_method(none, "majority", federation.build()))

    one, two, _ = all_well(uploads)
    done = play(federation, tmp_path, one, two, Node([refusing], name="client-2"))
    assert list(done.summary["declined"]) == ["client-2"]


def test_refusing_sites_that_leave_no_quorum_end_the_run_by_name(federation, uploads, tmp_path) -> None:
    one, *_ = all_well(uploads)
    declining = [Node([says(code="policy_audit")], name=name) for name in ("client-1", "client-2")]
    with pytest.raises(MethodError, match=r"declined: client-1 \(policy_audit\), client-2 \(policy_audit\)") as caught:
        play(federation, tmp_path, one, *declining, deadline_seconds=900.0)
    last = play.last  # type: ignore[attr-defined]
    assert caught.value.code == "quorum" and last.clock.now - last.began < 60
    assert (tmp_path / "uploads/client-0.safetensors").exists(), "the next run begins with it"


def test_the_operator_goes_on_with_fewer_than_agreed(federation, uploads, tmp_path) -> None:
    one, *_ = all_well(uploads)
    declining = [Node([says(code="policy_audit")], name=name) for name in ("client-1", "client-2")]
    done = play(federation, tmp_path, one, *declining, quorum=1)
    assert done.fused == [["client-0"]] and done.summary["complete"]
    assert done.summary["missing"] == ["client-1", "client-2"] and "quorum 1" in done.said[0]


def test_a_later_run_need_not_be_told_again_with_how_few_a_fusion_was_begun(on_features, tmp_path) -> None:
    sites, honest, _ = on_features
    data = honest["client-0"]
    here = Node([sends(data)], [silent])
    fuse = real_fuse(sites, tmp_path, quorum=1)
    done = play(sites.federation, tmp_path, here, fuse=fuse, quorum=1, deadline_seconds=50.0, grace_seconds=5.0)
    assert done.summary["undelivered"] == ["client-0"]
    back = Node([sends(data)], [confirms])
    done = play(sites.federation, tmp_path, back, fuse=real_fuse(sites, tmp_path))
    assert list(done.summary["delivered"]) == ["client-0"] and done.clock.now - done.began < 60, "nobody is waited for"


def test_an_upload_unlike_the_others_is_named_and_the_others_are_fused(on_features, tmp_path) -> None:
    sites, honest, odd = on_features
    nodes = [Node([sends(data)], [confirms]) for data in (odd, *list(honest.values())[1:])]
    done = play(sites.federation, tmp_path, *nodes, fuse=real_fuse(sites, tmp_path), grace_seconds=900.0)
    assert done.summary["unusable"] == {"client-0": "encoder_mismatch"}
    assert sorted(done.summary["delivered"]) == ["client-1", "client-2"]
    assert done.summary["late"] == done.summary["missing"] == []
    assert any("cannot be used: client-0 (encoder_mismatch)" in line for line in done.said)


def test_uploads_that_differ_wait_for_a_third_and_a_mended_one_is_taken(on_features, tmp_path) -> None:
    """Of two, nobody can tell who is right; in the next run the site at fault has another upload."""
    sites, honest, odd = on_features
    nodes = [Node([sends(data)], [confirms]) for data in (odd, honest["client-1"])]
    with refuses(MethodError, "quorum", "missing: client-2; cannot be used: client-0 .*, client-1 "):
        play(sites.federation, tmp_path, *nodes, fuse=real_fuse(sites, tmp_path), deadline_seconds=50.0)
    assert play.last.fused == [] and not (tmp_path / "server").exists()  # type: ignore[attr-defined]
    nodes = [Node([sends(honest[name])], [confirms], takes=8.0) for name in ("client-0", "client-1")]
    done = play(sites.federation, tmp_path, *nodes, fuse=real_fuse(sites, tmp_path), grace_seconds=20.0)
    assert sorted(done.summary["delivered"]) == ["client-0", "client-1"] and done.summary["missing"] == ["client-2"]


def test_with_all_uploads_there_a_mended_one_is_waited_for(on_features, tmp_path) -> None:
    sites, honest, odd = on_features
    (tmp_path / "uploads").mkdir()
    for name, data in {**honest, "client-0": odd}.items():
        (tmp_path / f"uploads/{name}.safetensors").write_bytes(data)
    slow = [Node([sends(data)], [confirms], takes=30.0) for data in honest.values()]
    done = play(sites.federation, tmp_path, *slow, fuse=real_fuse(sites, tmp_path), quorum=3)
    assert sorted(done.summary["delivered"]) == sorted(KEYS) and not done.summary["unusable"]


def test_the_same_bad_upload_again_is_not_waited_for_any_longer(on_features, tmp_path) -> None:
    sites, honest, odd = on_features
    nodes = [Node([sends(data)], [confirms]) for data in (odd, *list(honest.values())[1:])]
    with refuses(MethodError, "quorum", "cannot be used: client-0"):
        play(sites.federation, tmp_path, *nodes, fuse=real_fuse(sites, tmp_path), quorum=3)
    with refuses(MethodError, "quorum", "cannot be used: client-0"):
        play(sites.federation, tmp_path, *nodes, fuse=real_fuse(sites, tmp_path), quorum=3, deadline_seconds=900.0)
    assert play.last.clock.now - play.last.began < 60  # type: ignore[attr-defined]


def with_a_loud_one(*names: str, quorum: int) -> tuple[Sites, list[Node]]:
    """Sites of FedAvg and their nodes; the network of the first one sticks out."""
    sites = make_sites("fedavg", names=names, quorum=quorum)
    method, ctx = sites.federation.build(), sites.simulation()
    agreed = {"run_id": sites.federation.run, "agreement": sites.federation.agreement}
    nodes = []
    for site in sites.clients:
        upload = method.upload(site, ctx)
        if site.name == names[0]:
            loud = {name: 100 * upload.tensors[name] for name in ("head.weight", "head.bias")}
            upload = replace(upload, tensors={**upload.tensors, **loud})
        data = sign(replace(upload, **agreed).pack(), sites.client_keys[site.name])
        nodes.append(Node([sends(data)], [confirms]))
    return sites, nodes


def test_a_network_that_sticks_out_holds_the_run_until_it_is_trusted(tmp_path) -> None:
    sites, nodes = with_a_loud_one(*KEYS, quorum=2)
    with refuses(MethodError, "held"):
        play(sites.federation, tmp_path, *nodes, fuse=real_fuse(sites, tmp_path, hold_on_notes=True))
    assert "error[held]" in play.last.summary["error"]  # type: ignore[attr-defined]
    trusting = real_fuse(sites, tmp_path, hold_on_notes=True, trust=["client-0"])
    done = play(sites.federation, tmp_path, *nodes, fuse=trusting)
    assert sorted(done.summary["delivered"]) == sorted(KEYS)


def test_the_operator_leaves_a_site_out_whose_upload_is_held(tmp_path) -> None:
    sites, nodes = with_a_loud_one(*KEYS, quorum=2)
    held = real_fuse(sites, tmp_path, hold_on_notes=True)
    with refuses(MethodError, "held"):
        play(sites.federation, tmp_path, *nodes, fuse=held)
    done = play(sites.federation, tmp_path, *nodes, fuse=held, without="client-0")
    assert sorted(done.summary["delivered"]) == ["client-1", "client-2"] and done.clock.now - done.began < 60
    assert done.summary["declined"] == {"client-0": "left_out"} and done.summary["missing"] == ["client-0"]
    fresh = play(
        sites.federation, tmp_path / "fresh", *nodes, fuse=real_fuse(sites, tmp_path / "fresh"), without="client-0"
    )
    assert sorted(fresh.summary["delivered"]) == ["client-1", "client-2"]
    assert not (tmp_path / "fresh/uploads/client-0.safetensors").exists()


def test_who_sticks_out_does_not_count_for_the_quorum_and_others_are_waited_for(tmp_path) -> None:
    sites, nodes = with_a_loud_one("client-0", "client-1", "client-2", "client-3", quorum=3)
    nodes[3].online_from = 1500.0
    times = {"deadline_seconds": 1000.0, "grace_seconds": 100.0}
    done = play(sites.federation, tmp_path, *nodes, fuse=real_fuse(sites, tmp_path), **times)
    assert {"client-1", "client-2", "client-3"} <= set(done.summary["delivered"])
    assert 500 <= done.clock.now - done.began < 700
    nodes[3].online_from = 1e9
    with refuses(MethodError, "quorum"):
        play(sites.federation, tmp_path / "never", *nodes, fuse=real_fuse(sites, tmp_path / "never"), **times)


def test_a_file_that_is_still_being_copied_is_looked_at_again(on_features, tmp_path) -> None:
    sites, honest, _ = on_features
    path, data = tmp_path / "uploads/client-2.safetensors", honest["client-2"]
    path.parent.mkdir()

    class Copying(PlayedGrid):
        def get_nodes(self):
            if self.clock() >= 1020:
                path.write_bytes(data if self.clock() >= 1030 else data[: len(data) // 2])
            return super().get_nodes()

    one = Node([sends(honest["client-1"])], [confirms])
    times = {"deadline_seconds": 900.0, "grace_seconds": 100.0}
    done = play(sites.federation, tmp_path, one, kind=Copying, fuse=real_fuse(sites, tmp_path), **times)
    assert sorted(done.fused or done.summary["delivered"]) and done.summary["complete"]
    assert done.summary["delivered"] == {"client-1": "model_made"} and done.summary["undelivered"] == ["client-2"]


def test_an_expired_agreement_ends_the_run_at_once_and_by_its_name(federation, uploads, tmp_path) -> None:
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads/client-0.safetensors").write_bytes(uploads["client-0"])
    expired = federation.model_copy(update={"expires": "2020-01-01"})
    with pytest.raises(FedBiCrossError):
        play(expired, tmp_path, Node([silent]))
    assert "expired" in play.last.summary["error"]  # type: ignore[attr-defined]
    assert play.last.clock.now - play.last.began < 60  # type: ignore[attr-defined]


def test_no_upload_is_given_up_because_the_memory_was_full(federation, uploads, tmp_path, monkeypatch) -> None:
    (tmp_path / "uploads").mkdir()
    for name, data in uploads.items():
        (tmp_path / "uploads" / f"{name}.safetensors").write_bytes(data)
    verify, full = server.verify_upload, [RunError("out_of_memory", "full"), MemoryError()]

    def full_at_first(*given: Any) -> Upload:
        if full:
            raise full.pop()
        return verify(*given)

    monkeypatch.setattr(server, "verify_upload", full_at_first)
    done = play(federation, tmp_path, *all_well(uploads))
    assert done.summary["delivered"] == dict.fromkeys(KEYS, "model_made") and not full


def test_a_site_that_is_left_out_stays_so_and_is_not_asked(federation, uploads, tmp_path) -> None:
    """Its node refuses by its own policy, and an upload of an earlier run is still here."""
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads/client-0.safetensors").write_bytes(uploads["client-0"])
    _, one, two = all_well(uploads)
    registered, other = (Node([says(code="policy_count")], name=name) for name in ("client-0", "elsewhere"))
    done = play(federation, tmp_path, registered, other, one, two, without="client-0")
    assert done.fused == [["client-1", "client-2"]] and registered.asked == []
    assert done.summary["declined"]["client-0"] == "left_out"


def test_who_takes_part_in_a_begun_fusion_cannot_be_left_out(on_features, tmp_path) -> None:
    sites, honest, _ = on_features
    fuse = real_fuse(sites, tmp_path)
    play(sites.federation, tmp_path, *all_well(honest), fuse=fuse, without="client-0")
    again = play(sites.federation, tmp_path, *all_well(honest), fuse=fuse, without="client-0")
    assert sorted(again.summary["delivered"]) == ["client-1", "client-2"], "the same command goes on"
    with refuses(RunError, "begun", "client-1"):
        play(sites.federation, tmp_path, *all_well(honest), fuse=fuse, without="client-1")


def test_a_mended_upload_is_tried_though_nobody_else_came(tmp_path) -> None:
    """One is left out for what sticks out, one is damaged, one never comes: the mended one makes the quorum."""
    names = tuple(f"client-{place}" for place in range(5))
    sites, nodes = with_a_loud_one(*names, quorum=3)
    nodes[3].online_from, nodes[4].online_from = 1500.0, 1e9
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads/client-3.safetensors").write_bytes(b"damaged")
    times = {"deadline_seconds": 50_000.0, "grace_seconds": 100.0}
    done = play(sites.federation, tmp_path, *nodes, fuse=real_fuse(sites, tmp_path), **times)
    assert {"client-1", "client-2", "client-3"} <= set(done.summary["delivered"])
    assert done.clock.now - done.began < 1000


def test_options_of_a_run_name_sites_that_there_are(federation) -> None:
    options = RunOptions.from_run_config({"trust": " client-0 ,client-1", "without": "client-2"})
    options.check(federation)
    assert options.sites("trust", federation) == ["client-0", "client-1"]
    for given, code in (({"trust": "client-0,client-9"}, "not_listed"), ({"without": "x"}, "not_listed")):
        with refuses(ConfigError, code):
            RunOptions.from_run_config(given).check(federation)
    for given in ({"quorum": 4}, {"quorum": 3, "without": "client-0"}):
        with refuses(ConfigError, "quorum"):
            RunOptions.from_run_config(given).check(federation)


@pytest.fixture
def superlink(federation, tmp_path, monkeypatch) -> Path:
    """What `flower up` leaves in the environment of the app; its work folder."""
    keys.save_private_key(tmp_path / "server.key", SERVER_KEY)
    (tmp_path / "federation.toml").write_text(files.federation_text(federation))
    places = {"federation": "federation.toml", "key": "server.key", "work": "work"}
    lines = [f'{name} = "{tmp_path / file}"\n' for name, file in places.items()]
    (tmp_path / "server.toml").write_text("".join(lines) + 'device = "cpu"\n')
    monkeypatch.setenv(SERVER_FILE, str(tmp_path / "server.toml"))
    return tmp_path / "work"


def start(run_config: dict[str, Any], *nodes: Node) -> None:
    """The app itself, as Flower calls it."""
    grid = PlayedGrid({100 + number: node for number, node in enumerate(nodes)}, Clock())
    context = Context(7, 1, {}, RecordDict(), {"poll-seconds": 0.01, "grace-seconds": 0.0, **run_config})
    server.app(grid, context)


def test_what_the_operator_decided_reaches_the_fusion(federation, uploads, superlink, monkeypatch) -> None:
    given: list[tuple[Any, ...]] = []

    def fuse(agreed: files.FederationFile, paths: Any, folder: Path, key: Any, log: Any, **choices: Any) -> Any:
        given.append((agreed, sorted(paths), folder, keys.public_text(key), choices))
        return dict.fromkeys(paths, b"reply")

    monkeypatch.setattr(server, "fuse_uploads", fuse)
    trust, without = (files.file_name(name) for name in ("client-1", "client-0"))
    start({"hold-on-notes": True, "trust": trust, "without": without, "quorum": 1}, *all_well(uploads))
    start({}, *all_well(uploads))
    (decided, names, folder, key, chosen), (*_, default) = given
    assert decided == federation and key == federation.server
    assert folder == superlink / federation.run_id / "server"
    assert names == ["client-1", "client-2"], "client-0 was left out"
    assert chosen == {"hold_on_notes": True, "trust": ["client-1"], "quorum": 1, "device": "cpu"}
    assert default == {"hold_on_notes": False, "trust": [], "quorum": None, "device": "cpu"}
    summary = json.loads((superlink / federation.run_id / "flower.json").read_text())
    assert summary["flower_run"] == 7 and summary["complete"]


def test_a_run_with_sites_that_there_are_not_asks_nobody(federation, uploads, superlink) -> None:
    nodes = all_well(uploads)
    with refuses(ConfigError, "not_listed"):
        start({"without": "nobody"}, *nodes)
    assert not any(node.asked for node in nodes)
    assert "not_listed" in (superlink / "flower.log").read_text()


def test_a_refusing_node_that_nobody_registered_speaks_for_no_site(federation, uploads, tmp_path) -> None:
    one, two, three = all_well(uploads)
    three.online_from = 1050.0
    stranger = Node([says(code="policy_method")])
    done = play(federation, tmp_path, one, two, three, stranger)
    assert done.fused == [sorted(KEYS)] and len(stranger.asked) == 1
    assert done.summary["declined"] == {} and "policy_method" in done.summary["refused"]
    assert any(line.startswith("node 103: error[policy_method]") for line in done.said)


@pytest.mark.parametrize("last", [0, 1])
def test_a_refusing_node_does_not_speak_for_a_second_node_of_its_site(federation, uploads, tmp_path, last) -> None:
    """After a new key a site may have two nodes: what counts is the one that brings the upload."""
    one, two, three = all_well(uploads)
    three.name = "client-2"
    nodes = [three, Node([says(code="policy_method")], name="client-2")]
    done = play(federation, tmp_path, one, two, nodes[1 - last], nodes[last], grace_seconds=900.0)
    assert done.fused == [sorted(KEYS)]
    assert done.summary["declined"] == {} and sorted(done.summary["delivered"]) == sorted(KEYS)


def test_an_upload_sent_before_a_policy_refused_is_used_and_its_reply_not_waited_for(
    federation, uploads, tmp_path
) -> None:
    one, two, _ = all_well(uploads)
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads" / "client-2.safetensors").write_bytes(uploads["client-2"])
    declines = Node([says(code="policy_others")], name="client-2")
    done = play(federation, tmp_path, one, two, declines, grace_seconds=900.0)
    assert done.fused == [sorted(KEYS)] and done.summary["undelivered"] == ["client-2"]
    assert done.clock.now - done.began < 60


def test_words_from_outside_are_made_plain(federation, uploads, tmp_path) -> None:
    one, two, _ = all_well(uploads)
    rude = Node([says(code="\x1b[31m<script>\n" + "x" * 100)])
    done = play(federation, tmp_path, one, two, rude)
    assert done.summary["refused"][0] == "31mscript" + "x" * 31


def refusals(federation: files.FederationFile, uploads: dict[str, bytes], tmp_path: Path) -> dict[str, Answer]:
    flipped = bytearray(uploads["client-2"])
    flipped[-1] ^= 1
    stranger = sign(Upload.unpack(uploads["client-2"]).pack(), keys.generate_key())
    other = federation.model_copy(update={"run_id": "other"})
    client = tiny_clients()[2]
    replayed = files.make_upload(other, client, KEYS["client-2"], tmp_path / "other", device="cpu")
    wrong = ArrayRecord({"bundle": Array("float32", (1,), "numpy.ndarray", b"\x93NUMPY")})
    return {
        "flipped": sends(bytes(flipped)),
        "stranger": sends(stranger),
        "replayed": sends(replayed),
        "empty": sends(b""),
        "nothing": lambda m: Message(RecordDict(), reply_to=m),
        "no_bundle": says(),
        "numpy": lambda m: Message(RecordDict({"note": ConfigRecord({}), "bundle": wrong}), reply_to=m),
        "note_of_numbers": lambda m: Message(RecordDict({"note": ConfigRecord({"code": 7})}), reply_to=m),
    }


def test_what_is_no_valid_upload_concerns_its_node_only(federation, uploads, tmp_path) -> None:
    for name, answer in refusals(federation, uploads, tmp_path).items():
        one, two, _ = all_well(uploads)
        done = play(federation, tmp_path / name, one, two, Node([answer]))
        assert done.summary["delivered"] == dict.fromkeys(["client-0", "client-1"], "model_made"), name
        assert done.summary["missing"] == ["client-2"], name
        assert done.summary["refused"], name
        assert not (tmp_path / name / "uploads/client-2.safetensors").exists(), name


def test_two_nodes_with_one_upload(federation, uploads, tmp_path) -> None:
    thief = Node([sends(uploads["client-0"])], [confirms])
    done = play(federation, tmp_path, *all_well(uploads), thief)
    assert "two_nodes" in done.summary["refused"]
    assert [kind for kind, _ in thief.asked if kind == "evaluate"] == []


def test_a_node_registered_for_another_site(federation, uploads, tmp_path) -> None:
    wrong = Node([sends(uploads["client-0"])], [confirms], name="client-1")
    done = play(federation, tmp_path, wrong, *all_well(uploads))
    assert "wrong_node" in done.summary["refused"]
    assert done.summary["delivered"] == dict.fromkeys(KEYS, "model_made")


def test_the_first_upload_of_a_site_stays(on_features, tmp_path) -> None:
    sites, honest, _ = on_features
    fewer = replace(sites.clients[0], images=sites.clients[0].images[1:], labels=sites.clients[0].labels[1:])
    key = sites.client_keys["client-0"]
    first = files.make_upload(sites.federation, fewer, key, tmp_path / "site", device="cpu")
    assert first != honest["client-0"]
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads/client-0.safetensors").write_bytes(first)
    done = play(sites.federation, tmp_path, *all_well(honest))
    assert "two_uploads" in done.summary["refused"]
    assert done.summary["undelivered"] == ["client-0"]
    assert (tmp_path / "uploads/client-0.safetensors").read_bytes() == first


def test_an_upload_that_was_damaged_on_the_disk_is_sent_again(federation, uploads, tmp_path) -> None:
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads/client-0.safetensors").write_bytes(uploads["client-0"] + b" ")
    away = [Node([sends(data)], [confirms]) for name, data in uploads.items() if name != "client-0"]
    done = play(federation, tmp_path, *away, fuse=lambda paths: dict.fromkeys(list(uploads)[1:], b"reply"))
    assert list(done.summary["unusable"]) == ["client-0"] and done.summary["missing"] == done.summary["late"] == []
    done = play(federation, tmp_path, *all_well(uploads))
    assert sorted(done.summary["delivered"]) == sorted(KEYS) and not done.summary["unusable"]
    assert (tmp_path / "uploads/client-0.safetensors").read_bytes() == uploads["client-0"]


def test_a_receipt_for_something_else_does_not_count(federation, uploads, tmp_path) -> None:
    one, two, three = all_well(uploads)
    three.evaluate = [says(sha256="0" * 64, state="model_made")]
    done = play(federation, tmp_path, one, two, three)
    assert done.summary["undelivered"] == ["client-2"]
    assert "receipt" in done.summary["refused"]


def test_a_reply_that_did_not_arrive_is_sent_again(federation, uploads, tmp_path) -> None:
    one, two, three = all_well(uploads)
    three.evaluate = [fails(5), confirms]
    done = play(federation, tmp_path, one, two, three)
    assert done.summary["undelivered"] == []
    assert [kind for kind, _ in three.asked] == ["train", "evaluate", "evaluate"]


def test_a_site_at_work_on_its_reply_is_waited_for_beyond_the_grace(federation, uploads, tmp_path) -> None:
    one, two, three = all_well(uploads)
    one.takes = 80.0
    done = play(federation, tmp_path, one, two, three, grace_seconds=10.0)
    assert done.fused == [["client-1", "client-2"]]  # its upload came too late ...
    slow = [Node([sends(data)], [confirms], takes=80.0) for data in uploads.values()]
    done = play(federation, tmp_path / "slow", *slow, grace_seconds=10.0)
    assert sorted(done.summary["delivered"]) == sorted(KEYS)  # ... but nobody is left without a reply under way


def test_the_deadline_ends_even_that(federation, uploads, tmp_path) -> None:
    nodes = [Node([sends(data)], [silent]) for data in uploads.values()]
    done = play(federation, tmp_path, *nodes, deadline_seconds=200.0)
    assert done.summary["undelivered"] == sorted(KEYS)
    assert 200 <= done.clock.now - done.began <= 210


def test_a_late_upload_is_named_and_not_mixed_in(federation, uploads, tmp_path) -> None:
    two_only = {name: b"reply to " + name.encode() for name in ("client-0", "client-1")}
    done = play(federation, tmp_path, *all_well(uploads), fuse=lambda paths: two_only)
    assert done.summary["late"] == ["client-2"]
    assert sorted(done.summary["delivered"]) == ["client-0", "client-1"]


def test_a_server_that_is_just_leaving_is_waited_for(federation, uploads, tmp_path) -> None:
    tries = []

    def fuse(paths: dict[str, Path]) -> dict[str, bytes]:
        tries.append(1)
        if len(tries) < 3:
            raise RunError("locked", "another process is running")
        return dict.fromkeys(paths, b"reply")

    done = play(federation, tmp_path, *all_well(uploads), fuse=fuse)
    assert done.summary["complete"] is True
    assert len(tries) == 3


def locked(grid: PlayedGrid) -> httpx.HTTPStatusError:
    """What Flower raises while the database of its SuperLink is locked."""
    del grid
    request = httpx.Request("POST", "https://localhost/v1/runtime")
    return httpx.HTTPStatusError("500", request=request, response=httpx.Response(500, request=request))


class Hiccuping(PlayedGrid):
    """Every call fails for the first minute, and now and then later."""

    def fail(self) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        if self.clock() < 1060.0 or self.calls % 3 == 0:
            raise locked(self)

    def get_nodes(self) -> Any:
        self.fail()
        return super().get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.fail()
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.fail()
        return super().pull_messages(message_ids)


def test_a_superlink_with_a_locked_database_is_asked_again(federation, uploads, tmp_path) -> None:
    done = play(federation, tmp_path, *all_well(uploads), kind=Hiccuping)
    assert done.summary["delivered"] == dict.fromkeys(KEYS, "model_made")
    assert done.fused == [sorted(KEYS)]
    assert any("does not answer (HTTPStatusError)" in line for line in done.said)


def test_an_answer_that_flower_cannot_read_concerns_its_node_only(federation, uploads, tmp_path) -> None:
    """As Flower reads a ``ConfigRecord`` that holds 50 bytes of garbage: it raises while the server fetches it."""
    head = b"ConfigRecord  50\x00"  # type, children, length; then what should be its content

    class Unreadable(PlayedGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            found = list(super().pull_messages(message_ids))
            for message in found:
                if message.metadata.src_node_id == 0 and "garbage" in message.content.config_records:
                    inflate_object_from_contents("x", {"x": head + b"\xff" * 50})
            return found

    def garbage(message: Message) -> Message:
        answer = Message(RecordDict({"garbage": ConfigRecord({})}), reply_to=message)
        answer.metadata.__dict__["_src_node_id"] = 0
        return answer

    with pytest.raises(DecodeError):
        inflate_object_from_contents("x", {"x": head + b"\xff" * 50})
    one, two, _ = all_well(uploads)
    hostile = Node([garbage], name="client-2")
    done = play(federation, tmp_path, hostile, one, two, kind=Unreadable)
    assert done.summary["delivered"] == dict.fromkeys(["client-0", "client-1"], "model_made")
    assert done.summary["missing"] == ["client-2"]
    assert "unreadable" in done.summary["refused"]
    assert any(line.startswith("client-2: error[unreadable]") for line in done.said)


def test_a_node_that_does_not_finish_sending_holds_nobody_up(federation, uploads, tmp_path) -> None:
    """Flower waits up to two hours for the rest of an answer; the others' are taken meanwhile."""
    finished = threading.Event()

    class Stuck(PlayedGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            found = list(super().pull_messages(message_ids))
            if found and found[0].metadata.src_node_id == 0:
                finished.wait(500)
            return found

    def half(message: Message) -> Message:
        answer = sends(uploads["client-2"])(message)
        assert answer is not None
        answer.metadata.__dict__["_src_node_id"] = 0
        return answer

    one, two, _ = all_well(uploads)
    try:
        done = play(federation, tmp_path, Node([half], [confirms]), one, two, kind=Stuck, patience=0.2)
    finally:
        finished.set()
    assert done.summary["delivered"] == dict.fromkeys(["client-0", "client-1"], "model_made")
    assert done.summary["missing"] == ["client-2"]


def test_a_receipt_before_there_are_replies(federation, uploads, tmp_path) -> None:
    """A node chooses the kind of its answer itself."""

    def early(message: Message) -> Message:
        answer = says(sha256="0" * 64, state="model_made")(message)
        assert answer is not None
        answer.metadata.__dict__["_message_type"] = "evaluate"
        return answer

    one, two, three = all_well(uploads)
    three.train = [early, *three.train]
    done = play(federation, tmp_path, one, two, three, grace_seconds=500.0)
    assert done.summary["refused"] == ["receipt"]
    assert done.summary["delivered"] == dict.fromkeys(KEYS, "model_made")


def test_whatever_goes_wrong_with_one_answer_is_that_nodes_failure(federation, uploads, tmp_path, monkeypatch) -> None:
    verify = server.verify_upload

    def broken(agreed: files.FederationFile, data: bytes) -> Upload:
        if data == b"strange":
            raise ZeroDivisionError("a bug")
        return verify(agreed, data)

    monkeypatch.setattr(server, "verify_upload", broken)
    one, two, _ = all_well(uploads)
    done = play(federation, tmp_path, Node([sends(b"strange")]), one, two)
    assert "unexpected" in done.summary["refused"]
    assert done.summary["delivered"] == dict.fromkeys(["client-0", "client-1"], "model_made")


def test_a_question_that_got_lost_is_asked_again(federation, uploads, tmp_path) -> None:
    one, two, three = all_well(uploads)
    three.train = [silent, silent, *three.train]
    done = play(federation, tmp_path, one, two, three, deadline_seconds=20_000.0, grace_seconds=15_000.0)
    assert done.summary["delivered"] == dict.fromkeys(KEYS, "model_made")
    moments = [moment for kind, moment in three.asked if kind == "train"]
    assert [round((later - earlier) / 3600) for earlier, later in pairwise(moments)] == [1, 2]


def test_an_upload_that_comes_twice_from_one_node(federation, uploads, tmp_path) -> None:
    """Asked twice, a slow site answers twice, with the same bytes."""
    one, two, three = all_well(uploads)
    three.takes = 4000.0
    done = play(federation, tmp_path, one, two, three, deadline_seconds=30_000.0, grace_seconds=20_000.0)
    assert done.summary["delivered"] == dict.fromkeys(KEYS, "model_made")
    assert done.summary["refused"] == []


def test_the_summary_says_what_ended_the_run(federation, uploads, tmp_path) -> None:
    def fuse(paths: dict[str, Path]) -> dict[str, bytes]:
        raise MethodError("diverged", "it cannot be fused")

    with pytest.raises(MethodError):
        play(federation, tmp_path, *all_well(uploads), fuse=fuse)
    assert play.last.summary["error"] == "error[diverged]: it cannot be fused"  # type: ignore[attr-defined]
    assert play.last.summary["complete"] is False  # type: ignore[attr-defined]


def test_bytes_travel_unchanged() -> None:
    for data in (b"", b"\0", bytes(range(256)) * 1000):
        message = Message(envelope.content({"a": "b"}, data), 1, "train")
        assert envelope.bundle_of(message) == data
        assert envelope.note_of(message) == {"a": "b"}
    with pytest.raises(UploadError, match="no bundle"):
        envelope.bundle_of(Message(envelope.content({}), 1, "train"))
