"""`client join` at three hospitals and `federation status`: one command again and again, nothing copied by hand."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from cli.console import Outcome, call, snapshot
from cli.test_cli_exchange import CLASSES, TINY, draw_site, ok
from fedbicross.cli import join, page
from fedbicross.transport import local_page
from fedbicross.transport.federation_file import load_federation

SITES = ("north", "south")


def join_as(name: str, *more: str) -> Outcome:
    return call("client", "join", "--post", "../post", "--data", "images", "--name", name, *more)


def fingerprint(root: Path) -> str:
    return load_federation(root / "post" / "federation.toml").fingerprint


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sites have made their keys and the server has written the agreement."""
    root = tmp_path_factory.mktemp("join")
    (root / "server").mkdir()
    (root / "post").mkdir()
    for number, name in enumerate(SITES):
        (root / name).mkdir()
        with chdir(root / name):
            draw_site(Path("images"), number)
            first = join_as(name)
            assert first.code == 0 and "next: the server writes the agreement" in first.out, first.err
            assert (root / "post" / f"{name}.pub").read_bytes() == Path(f"{name}.pub").read_bytes()
            again = join_as(name)
            assert again.code == 0 and "private key" not in again.out, "the key is made once"
    found = ok("federation", "status", "--post", root / "post", "--json").json()
    assert [site["site"] for site in found["sites"]] == ["north", "south"] and "federation init" in found["next"]
    options = [word for setting in TINY for word in ("--set", setting)]
    with chdir(root / "server"):
        given = ("--image-size", "8", "--model", "resnet8", "--method", "fedavg", "--run-id", "cells-1", *options)
        made = ok("federation", "init", "--post", "../post", "--classes", ",".join(CLASSES), *given, "--json").json()
        assert made["fingerprint"] == fingerprint(root)
        assert Path("federation.toml").read_bytes() == (root / "post" / "federation.toml").read_bytes()
    return root


@pytest.fixture
def sites(agreed: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of its own, seen from north's folder."""
    root = Path(shutil.copytree(agreed, tmp_path / "join"))
    with chdir(root / "north"):
        yield root


def status(root: Path) -> dict[str, Any]:
    return dict(ok("federation", "status", "--post", root / "post", "--json").json())


def test_the_whole_way(sites: Path) -> None:
    said = ("--fingerprint", fingerprint(sites), "--yes")
    for name in SITES:
        with chdir(sites / name):
            sent = join_as(name, *said)
            assert sent.code == 0 and "next: the server fuses" in sent.out, sent.err
            assert "weights of a resnet8" in sent.out, "what leaves is shown"
            assert (sites / "post" / "uploads" / f"{name}.safetensors").is_file()
            again = join_as(name)
            assert again.code == 0 and "training north" not in again.err, "neither asked nor trained again"
    assert status(sites)["next"] == "the server: fedbicross server fuse"
    with chdir(sites / "server"):
        ok("server", "fuse", "../post/uploads", "--key", "server.key", "--out", "../post/replies")
    assert [site["reply"] for site in status(sites)["sites"]] == ["ok", "ok"]
    for name in SITES:
        with chdir(sites / name):
            done = join_as(name)
            assert done.code == 0 and "Keep " in done.out and "finished: model" in done.out, done.err
            comparison = json.loads(Path("model/config.json").read_text())["comparison"]
            assert comparison["keep"] in ("federated", "alone")
            before = snapshot(Path("model"))
            assert "finished: model" in join_as(name).out and snapshot(Path("model")) == before
    with chdir(sites / "north"):
        file = Path("model/model.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        spoilt = join_as("north")
        assert (spoilt.code, "error[digest]" in spoilt.err, "finished" in spoilt.out) == (5, True, False)
    words = ok("federation", "status", "--post", sites / "post").out
    assert "run cells-1, quorum 2" in words and "next: each site with a reply" in words


def test_nothing_leaves_before_a_person_says_so(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    post = snapshot(sites / "post")
    outcome = join_as("north")
    assert "error[not_compared]" in outcome.err and not Path("federation.toml").exists()
    assert fingerprint(sites) not in outcome.out + outcome.err, "it comes by telephone, not from the stick"
    outcome = join_as("north", "--fingerprint", "dead beef " * 4)
    assert "error[fingerprint]" in outcome.err and not Path("federation.toml").exists()
    outcome = join_as("north", "--fingerprint", fingerprint(sites).upper().replace(" ", "-"))
    assert (outcome.code, "error[not_allowed]" in outcome.err) == (2, True), outcome.err
    assert Path("north.safetensors").is_file() and snapshot(sites / "post") == post
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(join.typer, "confirm", lambda text: False)
    outcome = join_as("north")
    assert (outcome.code, "error[not_allowed]" in outcome.err) == (4, True)
    assert snapshot(sites / "post") == post
    monkeypatch.setattr(join.typer, "confirm", lambda text: True)
    assert join_as("north").code == 0
    assert (sites / "post" / "uploads" / "north.safetensors").read_bytes() == Path("north.safetensors").read_bytes()
    found = status(sites)
    assert [site["upload"] for site in found["sites"]] == ["ok", "missing"]
    assert found["next"] == "south: fedbicross client join"


def test_a_fingerprint_is_asked_for_in_a_terminal(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(join.typer, "prompt", lambda text: fingerprint(sites))
    assert join_as("north", "--yes").code == 0


def test_names_keys_and_agreements_that_do_not_fit(sites: Path) -> None:
    said = ("--fingerprint", fingerprint(sites), "--yes")
    base = ("client", "join", "--post", "../post", "--data", "images")
    assert "error[client_name]" in call(*base, "--name", "../north").err
    assert "error[other_key]" in call(*base, "--name", "south").err, "somebody else's name"
    Path("south.key").unlink()
    Path("south.pub").unlink()
    assert "error[not_listed]" in join_as("west", *said).err
    Path("west.key").unlink()
    assert call(*base, *said).code == 0, "the only key here says who we are"
    for name in ("a.key", "b.key"):
        Path(name).write_text("")
    assert "error[which_site]" in call(*base).err
    shutil.copy(sites / "post" / "federation.toml", "kept.toml")
    text = Path("kept.toml").read_text()
    (sites / "post" / "federation.toml").write_text(text.replace("seed = 0", "seed = 1", 1))
    assert "error[other_agreement]" in join_as("north").err
    Path("model").mkdir()
    (sites / "post" / "federation.toml").write_text(text)
    assert "error[no_model]" in join_as("north").err, "something else lies where the model goes"


def test_status_names_what_is_wrong(sites: Path, tmp_path: Path) -> None:
    uploads = sites / "post" / "uploads"
    assert join_as("north", "--fingerprint", fingerprint(sites), "--yes").code == 0
    shutil.copy(uploads / "north.safetensors", uploads / "south.safetensors")
    found = status(sites)
    assert "wrong_client" in found["sites"][1]["upload"]
    (uploads / "south.safetensors").write_bytes(b"no bundle")
    before = snapshot(sites)
    assert status(sites)["sites"][1]["upload"].startswith("refused, ") and snapshot(sites) == before
    assert "error[no_post]" in call("federation", "status", "--post", tmp_path / "nowhere").err
    for words in (("client", "join", "--data", "images", "--name", "new"), ("federation", "init", "--classes", "a,b")):
        (empty := tmp_path / f"empty-{words[1]}").mkdir()
        with chdir(empty):
            assert "error[no_post]" in call(*words, "--post", "nowhere").err, "a stick that is not plugged in"
        assert not any(empty.iterdir()), "no folder is made in its place, and no key"
    (sites / "post" / "federation.toml").write_text("classes = [")
    assert "error[bad_toml]" in call("federation", "status", "--post", sites / "post").err
    (sites / "post" / "federation.toml").unlink()
    (sites / "post" / "odd.pub").write_text("no key")
    assert "error[bad_key]" in call("federation", "status", "--post", sites / "post").err


def test_an_agreement_needs_sites_and_a_key(tmp_path: Path) -> None:
    with chdir(tmp_path):
        Path("post").mkdir()
        base = ("federation", "init", "--classes", "a,b")
        assert "error[clients]" in call(*base, "--post", "post").err
        assert "error[clients]" in call(*base).err
        ok("client", "keygen", "--out", "north.key")
        assert "error[no_key]" in call(*base, "--client", "north=north.pub").err
        assert not Path("federation.toml").exists()


def answering(monkeypatch: pytest.MonkeyPatch, answer: str, seen: list[str]) -> None:
    """Whoever looks at the page: reads it, then answers."""

    def person(shown: Any, port: int, seconds: float, tell: Any) -> bool:
        def look(address: str) -> None:
            def go() -> None:
                with urllib.request.urlopen(address, timeout=20) as page:
                    seen.append(page.read().decode())
                with urllib.request.urlopen(address, data=f"answer={answer}".encode(), timeout=20):
                    pass

            threading.Thread(target=go, daemon=True).start()

        return real(shown, port, 60, look)

    real = local_page.ask
    monkeypatch.setattr(local_page, "ask", person)


@pytest.mark.slow
def test_a_page_is_asked_before_a_file_leaves_and_before_a_reply_is_used(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    said = ("--fingerprint", fingerprint(sites), "--page")
    answering(monkeypatch, "no", seen)
    outcome = join_as("north", *said)
    assert (outcome.code, "error[not_allowed]" in outcome.err) == (4, True) and "May this file leave?" in seen[0]
    assert not (sites / "post" / "uploads").exists()
    monkeypatch.undo()
    answering(monkeypatch, "yes", seen)
    assert join_as("north", *said).code == 0
    assert call("client", "inspect", "north.safetensors").out == "north.safetensors: allowed\n"
    with chdir(sites / "south"):
        assert join_as("south", "--fingerprint", fingerprint(sites), "--yes").code == 0
    with chdir(sites / "server"):
        ok("server", "fuse", "../post/uploads", "--key", "server.key", "--out", "../post/replies")
    monkeypatch.undo()
    answering(monkeypatch, "no", seen)
    outcome = join_as("north", "--page")
    assert "error[not_allowed]" in outcome.err and "May this file be used?" in seen[-1] and not Path("model").exists()
    outcome = call("client", "inspect", "../post/replies/north.safetensors", "--json")
    assert outcome.code == 1 and outcome.json()["allowed"] is False


def test_no_answer_is_a_no(sites: Path) -> None:
    assert "error[not_allowed]" in join_as("north", "--fingerprint", fingerprint(sites)).err
    outcome = call("client", "inspect", "north.safetensors", "--wait", "0.01")
    assert (outcome.code, outcome.out) == (1, "north.safetensors: not allowed\n")
    assert "http://127.0.0.1:" in outcome.err
    view = page.view(Path("north.safetensors").read_bytes(), "north.safetensors", None)
    assert view["state"] == "unknown" and "not checked" in view["checked"]


def test_what_the_hospitals_policy_refuses_is_put_nowhere(sites: Path) -> None:
    post = snapshot(sites / "post")
    Path("policy.toml").write_text('others_receive = ["nothing"]')
    outcome = join_as("north", "--fingerprint", fingerprint(sites), "--yes")
    assert (outcome.code, "error[policy_others]" in outcome.err) == (7, True)
    assert snapshot(sites / "post") == post
    assert not list(Path().rglob("*.safetensors"))
    Path("policy.toml").write_text('methods = ["fedavg"]')
    sent = join_as("north", "--yes")
    assert sent.code == 0, sent.err
    assert (sites / "post" / "uploads" / "north.safetensors").is_file()
