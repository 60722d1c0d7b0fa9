"""Three sites that share nothing but files end where a simulation ends; every mix-up has a name."""

from __future__ import annotations

import datetime
import json
import os
import signal
import stat
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbicross import models
from fedbicross.bundle import audit, keys, sign
from fedbicross.context import Context
from fedbicross.errors import ConfigError, MethodError, RunError, UploadError
from fedbicross.federation import simulate
from fedbicross.messages import Client, Reply, Upload
from fedbicross.methods.fedavg import FedAvg
from fedbicross.parts.calibration import calibrate
from fedbicross.runs.store import DiskStore
from fedbicross.transport import files
from fedbicross.transport.federation_file import CountPolicy
from fedbicross.transport.site import apply_counts
from fedbicross.transport.verify import counts_agree
from fedbicross.transport.work import say_warnings
from small import TINY_METHODS, code_of, later, packed_unchecked, refuses
from transport.sites import NAMES, Said, Sites, make_sites


def upload_all(sites: Sites, folder: Path) -> dict[str, bytes]:
    return {
        c.name: files.make_upload(sites.federation, c, sites.client_keys[c.name], folder / c.name)
        for c in sites.clients
    }


@pytest.fixture(scope="module")
def sites() -> Sites:
    """Three sites that agreed on FedAvg."""
    return make_sites()


@pytest.fixture(scope="module")
def uploads(sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Their uploads, made once."""
    return upload_all(sites, tmp_path_factory.mktemp("sites"))


# --- the same result as a simulation -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["fedavg", *later("ensemble:class_weighted", "local_only", "fedisca", "fedbicross:k2"), "primum"]
)
def test_equals_a_simulation_to_the_byte(spec: str, tmp_path: Path) -> None:
    settings = TINY_METHODS.get(spec.partition(":")[0], {})
    settings = {key: value for key, value in settings.items() if key != "clusters"}
    sites = make_sites(spec, settings=settings, class_counts={"smallest": 0})
    uploads = upload_all(sites, tmp_path)
    replies = sites.fuse(uploads, tmp_path / "server")
    expected = simulate(sites.federation.build(), sites.clients, sites.simulation())
    for client in sites.clients:
        found = files.personalize(sites.federation, client, replies[client.name], tmp_path / client.name)
        assert found.pack() == expected[client.name].pack()


def test_replies_differ_by_their_address_and_are_signed_by_the_server(
    sites: Sites, uploads: dict[str, bytes], tmp_path: Path
) -> None:
    replies = sites.fuse(uploads, tmp_path)
    assert len(set(replies.values())) == 3
    for name, data in replies.items():
        reply = files.open_reply(sites.federation, data, name)
        assert (reply.client, reply.run_id) == (name, sites.federation.run)
    again = files.fuse_uploads(sites.federation, dict(reversed(uploads.items())), tmp_path / "b", sites.server_key)
    assert again == replies, "the order in which uploads come in does not matter"


# --- at the site ---------------------------------------------------------------------------------------------


def test_an_upload_is_made_once(sites: Sites, tmp_path: Path) -> None:
    said, client = Said(), sites.clients[0]
    make = (sites.federation, client, sites.client_keys[client.name], tmp_path)
    first = files.make_upload(*make, said)
    assert said.begun == ["training client-0"]
    assert files.make_upload(*make, said) == first
    assert said.begun == ["training client-0"]
    for path in tmp_path.rglob("upload.safetensors"):
        path.unlink()
    assert files.make_upload(*make, said) == first, "the trained network is still there"
    assert said.begun == ["training client-0"]


def test_a_damaged_copy_is_not_sent(sites: Sites, tmp_path: Path) -> None:
    client = sites.clients[0]
    make = (sites.federation, client, sites.client_keys[client.name], tmp_path)
    data = bytearray(files.make_upload(*make))
    data[-1] ^= 1
    (tmp_path / "upload.safetensors").unlink()
    (tmp_path / "upload.safetensors").write_bytes(data)
    assert code_of(RunError, files.make_upload, *make) == "damaged"


def test_other_images_another_key_or_another_name_are_refused(sites: Sites, tmp_path: Path) -> None:
    client, key = sites.clients[0], sites.client_keys["client-0"]
    files.make_upload(sites.federation, client, key, tmp_path / "a")
    changed = Client(client.name, client.images[1:], client.labels[1:])
    assert code_of(RunError, files.make_upload, sites.federation, changed, key, tmp_path / "a") == "changed"
    other = sites.client_keys["client-1"]
    assert code_of(ConfigError, files.make_upload, sites.federation, client, other, tmp_path / "b") == "wrong_key"
    stranger = Client("client-9", client.images, client.labels)
    assert code_of(ConfigError, files.make_upload, sites.federation, stranger, key, tmp_path / "b") == "not_listed"
    small = Client(client.name, client.images[:, :8, :8], client.labels)
    assert code_of(ConfigError, files.make_upload, sites.federation, small, key, tmp_path / "b") == "images"
    odd = Client(client.name, client.images, client.labels + 1)
    assert code_of(ConfigError, files.make_upload, sites.federation, odd, key, tmp_path / "b") == "labels"
    assert not (tmp_path / "b").exists()


def test_small_counts_stay_at_the_site(tmp_path: Path) -> None:
    sites = make_sites("ensemble:class_weighted", class_counts={"smallest": 20})
    client, key = sites.clients[0], sites.client_keys["client-0"]
    assert all(0 < count < 20 for count in client.class_counts(3))
    assert code_of(MethodError, files.make_upload, sites.federation, client, key, tmp_path) == "small_count"
    policy = sites.federation.class_counts.model_copy(update={"below": "round_up"})
    rounding = sites.federation.model_copy(update={"class_counts": policy})
    data = files.make_upload(rounding, client, key, tmp_path)
    assert files.verify_upload(rounding, data).class_counts == [20, 20, 20]


def test_the_rule_on_counts_holds_for_what_was_made_before_it(tmp_path: Path) -> None:
    """A stricter rule, agreed on after an upload was made, is kept by the site and by the server."""
    sites = make_sites("ensemble:class_weighted", class_counts={"smallest": 0})
    client, key = sites.clients[0], sites.client_keys["client-0"]
    exact = files.make_upload(sites.federation, client, key, tmp_path)
    policy = sites.federation.class_counts.model_copy(update={"smallest": 20, "below": "round_up"})
    stricter = sites.federation.model_copy(update={"class_counts": policy})
    assert (stricter.run, stricter.agreement) == (sites.federation.run, sites.federation.agreement)
    assert code_of(UploadError, files.verify_upload, stricter, exact) == "small_count"
    said = Said()
    again = files.make_upload(stricter, client, key, tmp_path, said)
    assert files.verify_upload(stricter, again).class_counts == [20, 20, 20] and not said.begun


def test_nothing_that_counts_leaves_where_none_may() -> None:
    task = make_sites().federation.task
    silent = CountPolicy(send=False)
    counted = Upload("x", task, class_counts=[7, 8, 9], num_samples=24)
    assert not counts_agree(silent, counted)
    kept = apply_counts(silent, counted)
    assert (kept.class_counts, kept.num_samples) == (None, None) and counts_agree(silent, kept)


def test_what_a_method_warns_of_is_said_before_the_file_leaves(tmp_path: Path) -> None:
    sites = make_sites("fedbicross:k2", settings={"clustering": "pacfl"})
    said = Said()
    files.make_upload(sites.federation, sites.clients[0], sites.client_keys["client-0"], tmp_path, said)
    assert any(line.startswith("note: clustering=pacfl") and "leak" in line for line in said.lines)


def test_the_work_folder_is_for_its_owner_only(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        sites.fuse(uploads, tmp_path / "work" / "run" / "server")
    finally:
        os.umask(old)
    for folder in ("work", "work/run", "work/run/server"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700, folder


def test_counts_and_their_sum_stay_in_agreement() -> None:
    sites = make_sites()
    policy = sites.federation.class_counts.model_copy(update={"smallest": 5, "below": "round_up"})
    upload = Upload("x", sites.federation.task, class_counts=[0, 3, 9], num_samples=12)
    changed = apply_counts(policy, upload)
    assert (changed.class_counts, changed.num_samples) == ([0, 5, 9], 14)
    alone = apply_counts(policy, Upload("x", sites.federation.task, num_samples=2))
    assert alone.num_samples == 5


# --- at the server: who may come in --------------------------------------------------------------------------


def resigned(sites: Sites, data: bytes, key: Any, **changes: Any) -> bytes:
    return sign(packed_unchecked(replace(Upload.unpack(data), **changes)), key)


def addressed(sites: Sites, reply: Reply) -> Reply:
    """As the server would address it to the first client."""
    file = sites.federation
    return replace(reply, client="client-0", run_id=file.run, agreement=file.agreement)


def test_uploads_for_another_federation(sites: Sites, uploads: dict[str, bytes]) -> None:
    """Signatures, bytes and weights: tests/faults/test_bundle_*.py, through the same door."""
    data, key = uploads["client-0"], sites.client_keys["client-0"]

    def refused(given: bytes, federation: Any = sites.federation) -> str:
        return code_of(UploadError, files.verify_upload, federation, given)

    assert refused(data, make_other(sites, run_id="next-run")) == "wrong_run"
    assert refused(data, make_other(sites, seed=6)) == "other_settings"
    assert refused(data, make_other(sites, settings={"weighting": "uniform"})) == "other_settings"
    task = sites.federation.task
    assert refused(resigned(sites, data, key, task=replace(task, classes=("a", "b", "c")))) == "task_classes"
    assert refused(resigned(sites, data, key, task=replace(task, model="cnn"))) == "task_model"
    assert code_of(MethodError, files.verify_upload, sites.federation, resigned(sites, data, key, num_samples=None))


def make_other(sites: Sites, **changes: Any) -> Any:
    return sites.federation.model_copy(update=changes)


def test_one_bad_file_does_not_spoil_the_rest(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    given: dict[str, Any] = dict(uploads)
    given["junk.bin"] = b"junk"
    (tmp_path / "copy.safetensors").write_bytes(uploads["client-0"])
    given["copy.safetensors"] = tmp_path / "copy.safetensors"
    given["gone.safetensors"] = tmp_path / "gone.safetensors"
    received = files.receive(sites.federation, given)
    assert list(received.uploads) == list(NAMES) and not received.missing
    assert {name: entry.error.code for name, entry in received.refused.items()} == {
        "junk.bin": "too_short",
        "gone.safetensors": "cannot_read",
    }
    assert received.refused["junk.bin"].sha256 and received.refused["gone.safetensors"].sha256 is None


def test_what_one_site_writes_cannot_stop_the_others(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    """Fields that no method asked for, a message longer than a line of the log, a name that no text can hold."""
    key, task = sites.client_keys["client-0"], sites.federation.task
    for number, changes in enumerate(
        ({"extra": {"round": "abc"}}, {"extra": {"x": 1}}, {"task": replace(task, model="\0" * 200_000)})
    ):
        bad = resigned(sites, uploads["client-0"], key, **changes)
        given = {**uploads, "client-0": bad, "\udcff\x1b[2J": b"junk"}
        said = Said()
        work = tmp_path / str(number)
        assert len(sites.fuse(given, work, said, quorum=2)) == 2
        assert audit.verify(work / files.AUDIT).entries
        assert "\x1b" not in (work / files.AUDIT).read_text(encoding="utf-8")
        assert all(len(line) < 2000 for line in said.lines)


def test_two_different_uploads_of_one_site_are_both_refused(sites: Sites, uploads: dict[str, bytes]) -> None:
    other = resigned(sites, uploads["client-0"], sites.client_keys["client-0"], num_samples=23)
    received = files.receive(sites.federation, {**uploads, "again": other, "third": other})
    assert received.missing == ("client-0",)
    assert {name: entry.error.code for name, entry in received.refused.items()} == {
        "client-0": "two_uploads",
        "again": "two_uploads",
        "third": "two_uploads",
    }


# --- what is signed besides the task -------------------------------------------------------------------------


def test_membership_purpose_and_last_day_are_signed(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    """The same run id and settings, but other members: whoever signed did not agree to share with them."""
    reply = sites.fuse(uploads, tmp_path)["client-0"]
    stranger = {**sites.federation.clients, "client-3": keys.public_text(keys.generate_key())}
    fewer = {name: sites.federation.clients[name] for name in NAMES[:2]}
    for changes, expected in (
        ({"clients": stranger}, "other_members"),
        ({"clients": fewer}, "other_members"),
        ({"purpose": "sale to an insurer"}, "other_agreement"),
        ({"expires": "2099-12-31"}, "other_agreement"),
    ):
        other = make_other(sites, **changes)
        assert other.run == sites.federation.run
        assert code_of(UploadError, files.verify_upload, other, uploads["client-0"]) == expected
        assert code_of(UploadError, files.open_reply, other, reply, "client-0") == expected
    silent = resigned(sites, uploads["client-0"], sites.client_keys["client-0"], agreement=None)
    assert code_of(UploadError, files.verify_upload, sites.federation, silent) == "other_members"


def test_a_new_member_list_is_signed_without_training_again(tmp_path: Path) -> None:
    sites, said = make_sites(), Said()
    make = (sites.clients[0], sites.client_keys["client-0"], tmp_path, said)
    files.make_upload(sites.federation, *make)
    more = make_other(sites, clients={**sites.federation.clients, "x": keys.public_text(keys.generate_key())})
    again = files.make_upload(more, *make)
    assert files.verify_upload(more, again).agreement == more.agreement
    assert said.begun == ["training client-0"]


def test_after_the_last_day_nothing_is_made_or_taken(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    over = make_other(sites, expires="2020-02-29")
    client, key = sites.clients[0], sites.client_keys["client-0"]
    assert code_of(ConfigError, files.make_upload, over, client, key, tmp_path / "a") == "expired"
    assert code_of(ConfigError, files.fuse_uploads, over, uploads, tmp_path / "b", sites.server_key) == "expired"
    assert code_of(ConfigError, files.open_reply, over, b"", "client-0") == "expired"
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_names_that_can_be_taken_for_each_other() -> None:
    for names in (
        ("north", "n\u043erth"),  # a Cyrillic o
        ("n\u043erth", "south"),
        ("\u0441\u043e\u0440", "cop"),  # all Cyrillic, all Latin
        ("e\u0301", "south"),  # could also be one letter
        ("\uff4eorth", "south"),  # wide
        ("site-1", "site-l"),
        ("site-O", "site-0"),
    ):
        with pytest.raises(ConfigError) as caught:
            make_sites(names=names)
        assert caught.value.code == "client_name", names
    for names in (("Zürich", "São Paulo"), ("север", "юг"), ("北京", "north"), ("site-1", "site-2"), ("a", "i", "l")):
        assert tuple(make_sites(names=names).federation.clients) == names


def test_a_purpose_and_a_day_that_make_no_sense() -> None:
    for changes, expected in (
        ({"purpose": "a\nb"}, "purpose"),
        ({"purpose": "x" * 501}, "purpose"),
        ({"expires": "soon"}, "expires"),
        ({"expires": "2027-02-30"}, "expires"),
        ({"expires": "20270228"}, "expires"),
        ({"expires": 3}, "bad_value"),
    ):
        with pytest.raises(ConfigError) as caught:
            make_sites(**changes)
        assert caught.value.code == expected, changes
    dated = make_sites(expires=datetime.date(2099, 1, 2), purpose="research").federation
    assert (dated.agreement.expires, dated.agreement.purpose) == ("2099-01-02", "research")


# --- damage in work folders ----------------------------------------------------------------------------------


def test_a_damaged_fusion_file_is_one_line(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    sites.fuse(uploads, tmp_path)
    kept = tmp_path / "fusion.json"
    whole = kept.read_bytes()
    again = (sites.fuse, uploads, tmp_path)
    for damaged in (b"", whole[:20], b"[]", whole.replace(b'"run"', b'"fun"'), b"\xff" * 10, b"[" * 10_000):
        kept.unlink()
        kept.write_bytes(damaged)
        assert code_of(RunError, *again) == "damaged"
        store = DiskStore(tmp_path)
        store.save("fusion.json", damaged)  # with the list of digests changed along
        assert code_of(RunError, *again) == "damaged"
    kept.unlink()
    kept.write_bytes(whole)
    assert len(sites.fuse(uploads, tmp_path)) == 3


def test_a_damaged_site_file_is_one_line(sites: Sites, tmp_path: Path) -> None:
    make = (files.make_upload, sites.federation, sites.clients[0], sites.client_keys["client-0"], tmp_path)
    make[0](*make[1:])
    for damaged in (b"", b"{}", b'{"run": 1}', b"null"):
        DiskStore(tmp_path).save("site.json", damaged)
        assert code_of(RunError, *make) == "damaged"


def test_a_damaged_reply_is_not_handed_out(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    again = (sites.fuse, uploads, tmp_path)
    replies = again[0](*again[1:])
    kept = tmp_path / "replies" / "client-1.safetensors"
    flipped = bytearray(replies["client-1"])
    flipped[-1] ^= 1
    kept.write_bytes(flipped)
    assert code_of(RunError, *again) == "damaged"
    DiskStore(tmp_path).save("replies/client-1.safetensors", bytes(flipped))
    with pytest.raises(RunError, match="client-1"):
        again[0](*again[1:])
    DiskStore(tmp_path).save("replies/client-1.safetensors", replies["client-0"])
    assert code_of(RunError, *again) == "damaged", "somebody else's"
    DiskStore(tmp_path).drop("replies/client-1.safetensors")
    assert again[0](*again[1:]) == replies, "deleted, it is made again"


def test_a_key_revoked_after_the_fusion_began_is_named(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    sites.fuse(uploads, tmp_path)
    revoked = make_other(sites, clients={name: sites.federation.clients[name] for name in NAMES[:2]}, quorum=2)
    with refuses(RunError, "members_changed", "client-2"):
        files.fuse_uploads(revoked, {}, tmp_path, sites.server_key)


def test_uploads_are_in_memory_once(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    paths = {}
    for name, data in uploads.items():
        paths[name] = tmp_path / f"{name}.safetensors"
        paths[name].write_bytes(data)
    size = sum(map(len, uploads.values()))
    files.receive(sites.federation, paths)  # what is imported and cached on the way does not count
    tracemalloc.start()
    try:
        received = files.receive(sites.federation, paths)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(received.uploads) == 3 and 0.9 * size < held < 1.5 * size


def test_an_upload_that_changes_after_it_was_verified_is_not_used(
    sites: Sites, uploads: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "client-0.safetensors"
    path.write_bytes(uploads["client-0"])
    received = files.receive(sites.federation, {**uploads, "client-0": path})
    path.write_bytes(uploads["client-1"])
    fuse = (files.fuse_received, sites.federation, received, tmp_path / "work", sites.server_key)
    assert code_of(UploadError, *fuse) == "changing"
    assert not (tmp_path / "work" / "fusion.json").exists()


# --- quorum, late, changed -----------------------------------------------------------------------------------


def test_too_few_uploads(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    one = {"client-0": uploads["client-0"]}
    with refuses(MethodError, "quorum", "missing: client-1, client-2"):
        sites.fuse(one, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors")), "nothing is begun"
    assert code_of(MethodError, sites.fuse, {}, tmp_path, quorum=0) == "quorum"
    said = Said()
    replies = sites.fuse(one, tmp_path, said, quorum=1)
    assert list(replies) == ["client-0"] and "missing: client-1" in said.lines


def test_a_late_upload_is_named_and_not_mixed_in(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    two = {name: uploads[name] for name in NAMES[:2]}
    first = sites.fuse(two, tmp_path, quorum=2)
    said = Said()
    again = sites.fuse(uploads, tmp_path, said)
    assert again == first
    assert any(line.startswith("late: client-2") for line in said.lines)
    everybody = sites.fuse(uploads, tmp_path / "anew")
    assert list(everybody) == list(NAMES) and everybody["client-0"] != first["client-0"]


def test_an_upload_that_changed_after_the_start_is_refused(
    sites: Sites, uploads: dict[str, bytes], tmp_path: Path
) -> None:
    first = sites.fuse(uploads, tmp_path)
    other = resigned(sites, uploads["client-0"], sites.client_keys["client-0"], num_samples=23)
    changed = {**uploads, "client-0": other}
    fuse = (sites.fuse, changed, tmp_path)
    assert code_of(RunError, *fuse) == "uploads_changed"
    assert sites.fuse({}, tmp_path) == first, "the copies are kept"
    kept = tmp_path / "uploads" / "client-1.safetensors"
    kept.unlink()
    kept.write_bytes(b"damaged")
    assert code_of(RunError, sites.fuse, {}, tmp_path) == "damaged"
    again = make_other(sites, seed=9)
    assert code_of(RunError, files.fuse_uploads, again, {}, tmp_path, sites.server_key) == "changed"


def test_the_server_needs_its_own_key(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    key = sites.client_keys["client-0"]
    assert code_of(ConfigError, files.fuse_uploads, sites.federation, uploads, tmp_path / "x", key) == "wrong_key"
    assert not (tmp_path / "x").exists()


def test_what_happened_is_in_the_audit_log(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    sites.fuse({**uploads, "junk": b"junk"}, tmp_path)
    log = tmp_path / files.AUDIT
    lines = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert audit.verify(log).entries == len(lines)
    assert [line["what"] for line in lines] == ["refused"] + ["accepted"] * 3 + ["fusion"] + ["reply"] * 3
    assert lines[0]["code"] == "too_short" and len(lines[0]["sha256"]) == 64


def test_a_network_that_nobody_trained_is_pointed_out(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    stolen = dict(Upload.unpack(uploads["client-1"]).tensors)
    copy = resigned(sites, uploads["client-0"], sites.client_keys["client-0"], tensors=stolen)
    said = Said()
    sites.fuse({**uploads, "client-0": copy}, tmp_path, said)
    assert any("same tensors" in line for line in said.lines)


# --- replies -------------------------------------------------------------------------------------------------


def test_replies_that_are_not_for_this_site(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    replies = sites.fuse(uploads, tmp_path)
    mine = replies["client-0"]

    def refused(data: bytes, federation: Any = sites.federation) -> str:
        return code_of(UploadError, files.open_reply, federation, data, "client-0")

    assert refused(replies["client-1"]) == "wrong_client"
    assert refused(Reply.unpack(mine).pack()) == "unsigned"
    assert refused(sign(Reply.unpack(mine).pack(), sites.client_keys["client-1"])) == "unknown_key"
    assert refused(mine, make_other(sites, run_id="next-run")) == "wrong_run"
    assert refused(mine, make_other(sites, seed=6)) == "other_settings"
    assert refused(sign(replace(Reply.unpack(mine), run_id=None).pack(), sites.server_key)) == "wrong_run"
    assert refused(uploads["client-0"]) == "wrong_kind"
    flipped = bytearray(mine)
    flipped[-1] ^= 1
    assert refused(bytes(flipped)) == "digest"
    assert code_of(ConfigError, files.open_reply, sites.federation, mine, "nobody") == "not_listed"


def test_a_signed_reply_with_nonsense_in_it_is_one_line(sites: Sites, tmp_path: Path) -> None:
    client = sites.clients[0]
    for tensors in ({}, {"head.weight": torch.zeros(3, 3)}):
        data = sign(addressed(sites, Reply(tensors, {"rounds_done": 1})).pack(), sites.server_key)
        found = code_of(UploadError, files.personalize, sites.federation, client, data, tmp_path / str(len(tensors)))
        assert found == "missing_tensor"
    infinite = sign(packed_unchecked(addressed(sites, Reply({"x": torch.tensor([torch.inf])}))), sites.server_key)
    assert code_of(UploadError, files.open_reply, sites.federation, infinite, client.name) == "non_finite"
    bicross = make_sites("fedbicross:k2")
    nonsense = sign(addressed(bicross, Reply()).pack(), bicross.server_key)
    with refuses(UploadError, "bad_reply"):
        files.personalize(bicross.federation, bicross.clients[0], nonsense, tmp_path / "bicross")


def forged(sites: Sites, method: str, **changes: torch.Tensor) -> bytes:
    """A reply that the server signed, of the right form, with numbers of its own choice."""
    state = models.build("resnet8", 3, 3, 12).state_dict()
    if method == "ensemble":
        tensors = {**{f"model.0.{name}": value for name, value in state.items()}, **changes}
        info: dict[str, Any] = {"architectures": ["resnet8"]}
    else:
        tensors, info = {**state, **changes}, {"rounds_done": 1}
    return sign(addressed(sites, Reply(tensors, info)).pack(), sites.server_key)


def test_replies_with_impossible_numbers_make_no_model(tmp_path: Path) -> None:
    average = make_sites("fedavg")
    weighted = make_sites("ensemble:class_weighted", class_counts={"smallest": 0})
    good = torch.full((1, 3), 1.0)
    for number, (sites, changes, expected) in enumerate(
        (
            (average, {"head.weight": torch.full((3, 64), 1e30)}, "magnitude"),
            (average, {"trunk.stem.bn.running_var": torch.full((16,), -1.0)}, "variance"),
            (average, {"head.bias": torch.zeros(3, dtype=torch.float64)}, "tensor_dtype"),
            (weighted, {}, "missing_tensor"),
            (weighted, {"class_weights": good[:, :2]}, "tensor_shape"),
            (weighted, {"class_weights": good.long()}, "tensor_shape"),
            (weighted, {"class_weights": -good}, "magnitude"),
        )
    ):
        reply = forged(sites, sites.federation.method.partition(":")[0], **changes)
        make = (files.personalize, sites.federation, sites.clients[0], reply, tmp_path / str(number))
        assert code_of(UploadError, *make) == expected
    fine = forged(weighted, "ensemble", class_weights=good)
    files.personalize(weighted.federation, weighted.clients[0], fine, tmp_path / "fine")
    fine = forged(average, "fedavg")
    files.personalize(average.federation, average.clients[0], fine, tmp_path / "average")


def test_what_a_method_warns_of_at_the_end_is_said(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = FedAvg.personalize

    def warning(self: Any, client: Any, reply: Any, ctx: Any) -> Any:
        ctx.record.warn("worse than training alone")
        return plain(self, client, reply, ctx)

    monkeypatch.setattr(FedAvg, "personalize", warning)
    said = Said()
    files.personalize(sites.federation, sites.clients[0], forged(sites, "fedavg"), tmp_path, said)
    assert said.lines == ["note: worse than training alone"]


def test_a_full_gpu_is_not_blamed_on_the_reply(sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(self: Any, client: Any, reply: Any, ctx: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FedAvg, "personalize", full)
    make = (files.personalize, sites.federation, sites.clients[0], forged(sites, "fedavg"), tmp_path)
    assert code_of(RunError, *make) == "out_of_memory"


# --- kills and locks -----------------------------------------------------------------------------------------


def test_only_one_process_at_a_time(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    from fedbicross.runs.store import RunFolder

    with RunFolder(tmp_path):
        assert code_of(RunError, sites.fuse, uploads, tmp_path) == "locked"


def test_a_fusion_that_breaks_off_goes_on(
    sites: Sites, uploads: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sites.fuse(uploads, tmp_path / "whole")
    calls = 0

    def counted(self: Any, given: Any, ctx: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        return original(self, given, ctx)

    original = FedAvg.fuse
    monkeypatch.setattr(FedAvg, "fuse", counted)
    with pytest.raises(KeyboardInterrupt):
        sites.fuse(uploads, tmp_path / "broken")
    again = sites.fuse({}, tmp_path / "broken")
    assert again == expected
    assert sites.fuse(uploads, tmp_path / "broken") == expected
    assert calls == 2, "what is finished is not done again"


KILLED = """
import sys, torch
torch.set_num_threads(int(sys.argv[2]))
from pathlib import Path
from fedbicross.bundle import keys
from fedbicross.transport import files
import fedbicross.context as context
folder = Path(sys.argv[1])
federation = files.load_federation(folder / "federation.toml")
key = keys.load_private_key(folder / "server.key")
saved = context.Context.save_stage_when_due
def told(self, name, state):
    self.save_stage(name, *state())
    print("stage", flush=True)
    import time
    time.sleep(600)
context.Context.save_stage_when_due = told
files.fuse_uploads(federation, {p.stem: p for p in sorted((folder / "uploads").iterdir())}, folder / "work", key)
"""


@pytest.mark.slow
def test_a_killed_fusion_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL in the middle of the synthesis, after a checkpoint; the second process goes on from it."""
    settings = {key: value for key, value in TINY_METHODS["fedbicross"].items() if key != "clusters"}
    sites = make_sites("fedbicross:k2", settings=settings)
    uploads = upload_all(sites, tmp_path / "sites")
    expected = sites.fuse(uploads, tmp_path / "whole")
    (tmp_path / "federation.toml").write_text(files.federation_text(sites.federation))
    keys.save_private_key(tmp_path / "server.key", sites.server_key)
    (tmp_path / "uploads").mkdir()
    for name, data in uploads.items():
        (tmp_path / "uploads" / f"{name}.safetensors").write_bytes(data)
    words = [sys.executable, "-c", KILLED, str(tmp_path), str(torch.get_num_threads())]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "stage\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list((tmp_path / "work" / "stages").rglob("*.safetensors")), "a checkpoint is there"
    found = sites.fuse(uploads, tmp_path / "work")
    assert found == expected


def test_a_full_disk_is_one_line(
    sites: Sites, uploads: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedbicross.runs.store import DiskStore

    def full(self: Any, name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "save", full)
        assert code_of(RunError, sites.fuse, uploads, tmp_path) == "cannot_write"
    assert len(sites.fuse(uploads, tmp_path)) == 3


def test_the_server_side_cannot_reach_images() -> None:
    from imports import SOURCE, reachable

    found = reachable([SOURCE / "transport" / "files.py"])
    assert SOURCE / "bundle" / "sign.py" in found and SOURCE / "methods" / "fedbicross.py" in found
    assert not [path for path in found if path.is_relative_to(SOURCE / "data")]


def test_torch_is_not_imported_before_it_is_needed() -> None:
    probe = "import sys, fedbicross.transport.files; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_new_key_signs_again_without_training(tmp_path: Path) -> None:
    sites = make_sites()
    client, new, said = sites.clients[0], keys.generate_key(), Said()
    old = files.make_upload(sites.federation, client, sites.client_keys[client.name], tmp_path)
    listed = {**sites.federation.clients, client.name: keys.public_text(new)}
    changed = sites.federation.model_copy(update={"clients": listed})
    data = files.make_upload(changed, client, new, tmp_path, said)
    assert data != old and not said.begun
    assert files.verify_upload(changed, data).client == client.name
    assert code_of(UploadError, files.verify_upload, changed, old) == "unknown_key"


def test_a_site_is_told_only_what_it_can_change(tmp_path: Path) -> None:
    """What a method advises about its settings is for whoever agreed on them, not for one site."""
    said, ctx = Said(), Context(make_sites().federation.task)
    ctx.progress = said
    found = ["the personal model is worse; raise delta or epochs_personal", "no images of b; add some", "short; delta"]
    ctx.store.save("records/personalize/x.json", json.dumps({"warnings": found}).encode())
    say_warnings(ctx, "personalize", "x", {"delta", "epochs_personal"})
    assert said.lines == ["note: the personal model is worse", "note: no images of b; add some", "note: short"]
    say_warnings(ctx, "personalize", "x")
    assert said.lines[3:] == [f"note: {text}" for text in found]


def test_both_models_of_a_site(sites: Sites, uploads: dict[str, bytes], tmp_path: Path) -> None:
    """The federated one as ``personalize`` gives it, the other as the site would have it alone."""
    replies = sites.fuse(uploads, tmp_path / "server")
    client = sites.clients[0]
    made = files.both_models(sites.federation, client, replies[client.name], tmp_path / "site")
    plain = files.personalize(sites.federation, client, replies[client.name], tmp_path / "site")
    own = sites.federation.build().alone(client, sites.simulation())
    assert (made.federated.pack(), made.alone.pack()) == (plain.pack(), own.pack())
    assert made.calibration_images == 0, "two validation images are too few"


def test_both_models_are_calibrated_on_the_same_images(tmp_path: Path) -> None:
    sites = make_sites()
    large = [replace(c, images=np.repeat(c.images, 6, 0), labels=np.repeat(c.labels, 6)) for c in sites.clients]
    sites = replace(sites, clients=large)
    uploads = upload_all(sites, tmp_path)
    replies = sites.fuse(uploads, tmp_path / "server")
    client, ctx = large[0], sites.simulation()
    rows = ctx.validation_rows(client)
    made = files.both_models(sites.federation, client, replies[client.name], tmp_path / client.name)
    assert made.calibration_images == len(rows) >= 10
    for model in (made.federated, made.alone):
        expected = calibrate(replace(model, temperature=1.0), client.images[rows], client.labels[rows])
        assert model.temperature == expected.temperature != 1.0
