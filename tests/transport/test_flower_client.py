"""A site's side: what it answers, what it never says, and what it keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image

from fedbicross.bundle import keys
from fedbicross.cli.common import server_work, site_work
from fedbicross.methods.majority import Majority
from fedbicross.transport import files, site_data
from fedbicross.transport.flower import client, envelope
from fedbicross.transport.flower.settings import LOG, ServerSettings, SiteSettings

SERVER_KEY = keys.generate_key()


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


class Site:
    """A folder with all that a site has."""

    def __init__(self, folder: Path, method: str = "majority", images: int = 5) -> None:
        self.folder = folder
        key, other = keys.generate_key(), keys.generate_key()
        self.federation = files.new_federation(
            classes=["dark", "bright"],
            server=keys.public_text(SERVER_KEY),
            clients={"north": keys.public_text(key), "south": keys.public_text(other)},
            image_size=12,
            model="resnet8",
            method=method,
            training={"recipe": "modern", "epochs": 1, "batch_size": 8},
            quorum=1,
            class_counts={"smallest": 1},
        )
        keys.save_private_key(folder / "north.key", key)
        (folder / "federation.toml").write_text(files.federation_text(self.federation))
        rng = np.random.default_rng(0)
        for label in self.federation.classes:
            (folder / "images" / label).mkdir(parents=True)
            for number in range(images):
                pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "images" / label / f"{number}.png")
        self.config: dict[str, Any] = {
            "federation": str(folder / "federation.toml"),
            "key": str(folder / "north.key"),
            "work": str(folder / "work"),
            "data": str(folder / "images"),
            "device": "cpu",
        }

    def ask(self, kind: str, run: str | None = None, bundle: bytes | None = None) -> Message:
        note = {"run": self.federation.run if run is None else run}
        message = Message(envelope.content(note, bundle), 1, kind)
        message.metadata.__dict__["_message_id"] = "question"
        context = SimpleNamespace(node_config=self.config)
        return (client.train if kind == "train" else client.evaluate)(message, context)  # type: ignore[arg-type]

    def log(self) -> str:
        return (self.folder / "work" / LOG).read_text()

    def replies(self, name: str) -> bytes:
        upload = envelope.bundle_of(self.ask("train"))
        replies = files.fuse_uploads(
            self.federation, {"north": upload}, self.folder / "server", SERVER_KEY, device="cpu"
        )
        return replies[name]

    @property
    def kept(self) -> Path:
        return self.folder / "work" / self.federation.run_id / "replies" / "north.safetensors"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def words(message: Message) -> str:
    """Everything that leaves, as text."""
    return repr([dict(record) for record in message.content.config_records.values()])


def test_the_upload_is_made_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first = envelope.bundle_of(site.ask("train"))
    assert files.verify_upload(site.federation, first).client == "north"
    monkeypatch.setattr(Majority, "upload", lambda *args: pytest.fail("made again"))
    assert envelope.bundle_of(site.ask("train")) == first


def test_what_client_train_made_before_is_sent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train first, look at the file, and only then start the node."""
    agreed = site.federation
    images, _ = site_data.load_site(site.config["data"], agreed.task, "north", agreed.hold_out, agreed.seed)
    key = keys.load_private_key(site.config["key"])
    made = files.make_upload(agreed, images, key, site_work(Path(site.config["work"]), agreed, "north"), device="cpu")
    monkeypatch.setattr(Majority, "upload", lambda *args: pytest.fail("made again"))
    assert envelope.bundle_of(site.ask("train")) == made


def test_server_and_command_line_share_a_folder(site: Site) -> None:
    values = {key: value for key, value in site.config.items() if key != "data"}
    settings = ServerSettings(**values)
    assert settings.folder(site.federation) / "server" == server_work(Path(site.config["work"]), site.federation)


def test_the_reply_is_kept_and_confirmed(site: Site) -> None:
    reply = site.replies("north")
    receipt = site.ask("evaluate", bundle=reply)
    assert envelope.note_of(receipt)["state"] == "model_made"
    assert site.kept.read_bytes() == reply
    assert not receipt.content.array_records  # nothing but the receipt leaves


def test_a_reply_is_kept_even_if_no_model_comes_of_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = site.replies("north")

    def broken(*args: object) -> None:
        raise ZeroDivisionError("patient Smith")

    monkeypatch.setattr(Majority, "personalize", broken)
    receipt = site.ask("evaluate", bundle=reply)
    assert envelope.note_of(receipt)["state"] == "reply_kept_no_model"
    assert site.kept.read_bytes() == reply
    assert "Smith" not in words(receipt)
    assert "patient Smith" in site.log()


def test_a_reply_that_is_not_the_servers_is_refused(site: Site) -> None:
    reply = bytearray(site.replies("north"))
    reply[-1] ^= 1
    for data in (bytes(reply), envelope.bundle_of(site.ask("train")), b"", b"\0" * 100):
        answer = envelope.note_of(site.ask("evaluate", bundle=data))
        assert answer["code"]
        assert "sha256" not in answer
        assert not site.kept.exists()


def test_another_run_is_refused_before_anything_is_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_data, "load_named", lambda *args: pytest.fail("images were read"))
    assert envelope.note_of(site.ask("train", run="another+0123"))["code"] == "other_run"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"data": "/nowhere/secret-images"}, None),
        ({"key": "/nowhere/secret.key"}, "key_file"),
        ({"federation": "/nowhere/secret.toml"}, "no_federation"),
        ({"federation": "relative.toml"}, "bad_value"),
        ({"secret": "x"}, "unknown_key"),
    ],
)
def test_of_an_error_only_its_code_leaves(site: Site, change: dict[str, str], code: str | None) -> None:
    site.config |= change
    answer = site.ask("train")
    assert not answer.content.array_records
    assert list(envelope.note_of(answer)) == ["code"]
    assert code is None or envelope.note_of(answer)["code"] == code
    assert "secret" not in words(answer)
    assert "/" not in words(answer)


def test_images_that_mean_nothing_are_not_trained_on(site: Site) -> None:
    for label in site.federation.classes:  # whichever are held out, most of them are trained on too
        folder = site.folder / "images" / label
        for file in list(folder.iterdir()):
            for number in range(4):
                (folder / f"copy-{number}-{file.name}").write_bytes(file.read_bytes())
    assert envelope.note_of(site.ask("train")) == {"code": "same_image_in_both"}
    site.config["accept"] = "same_image_in_both"
    assert files.verify_upload(site.federation, envelope.bundle_of(site.ask("train"))).client == "north"
    assert "warning: " in site.log()


def test_of_a_bug_only_the_word_unexpected_leaves(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ValueError("patient Smith, 3 May")

    monkeypatch.setattr(site_data, "load_named", broken)
    answer = site.ask("train")
    assert envelope.note_of(answer) == {"code": "unexpected"}
    assert "patient Smith, 3 May" in site.log()


def test_a_key_that_nobody_listed(site: Site) -> None:
    keys.save_private_key(site.folder / "other.key", keys.generate_key())
    site.config["key"] = str(site.folder / "other.key")
    assert envelope.note_of(site.ask("train"))["code"] == "not_listed"


def test_the_site_is_found_by_its_key(site: Site) -> None:
    assert SiteSettings(**site.config).name(site.federation) == "north"


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ('methods = ["primum"]', "policy_method"),
        ('others_receive = ["nothing"]', "policy_others"),
        (
            "[audit]\nmax_auc = 0.5\neffort = {shadows = 4, images = 20, canaries = 20, inverted = 2, steps = 1}",
            "policy_audit",
        ),
    ],
)
def test_what_the_sites_policy_refuses_is_not_sent_and_not_kept(tmp_path: Path, rules: str, code: str) -> None:
    site = Site(tmp_path, "fedavg", 30)
    (tmp_path / "policy.toml").write_text(rules)
    site.config["policy"] = str(tmp_path / "policy.toml")
    answer = site.ask("train")
    assert envelope.note_of(answer) == {"code": code}
    assert not answer.content.array_records
    assert code in site.log()
    assert not list((tmp_path / "work").rglob(files.SENT))


def test_a_policy_that_is_kept_to_lets_the_upload_leave(tmp_path: Path) -> None:
    site = Site(tmp_path, "fedavg", 30)
    (tmp_path / "policy.toml").write_text('methods = ["fedavg"]\nsmallest_count = 5')
    site.config["policy"] = str(tmp_path / "policy.toml")
    upload = envelope.bundle_of(site.ask("train"))
    assert files.verify_upload(site.federation, upload).client == "north"


def test_a_policy_that_is_gone_stops_everything(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.config["policy"] = str(tmp_path / "gone.toml")
    assert envelope.note_of(site.ask("train")) == {"code": "no_config"}
