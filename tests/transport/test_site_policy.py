"""What a site's policy does not let leave is not written, by files and on Flower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbicross.bundle import keys
from fedbicross.disclosure import statement
from fedbicross.disclosure.effort import effort
from fedbicross.disclosure.policy import AuditRule, Policy
from fedbicross.errors import ConfigError, PolicyError, UploadError
from fedbicross.messages import Client, Upload
from fedbicross.methods.fedavg import FedAvg
from fedbicross.privacy import ledger
from fedbicross.runs.store import DiskStore
from fedbicross.transport import files, site_audit
from small import refuses, tiny_clients
from transport.sites import Said, Sites, everything, make_sites

EFFORT: dict[str, Any] = {"shadows": 4, "images": 20, "canaries": 20, "inverted": 4, "steps": 2}
FINE = Policy(audit=AuditRule(effort=EFFORT, max_auc=1.0))
NEVER = Policy(audit=AuditRule(effort=EFFORT, max_auc=0.5))  # the upper end of an interval is always above


@pytest.fixture
def sites() -> Sites:
    return make_sites(class_counts={"smallest": 0})


def held_out() -> files.HeldOut:
    strangers = tiny_clients(1, seed=9)[0]
    controls = Client("client-0", strangers.images, strangers.labels)
    return files.HeldOut(controls, [f"patient-{number}.png" for number in range(24)])


def make(sites: Sites, work: Path, policy: Policy | None, said: Said | None = None) -> bytes:
    client = sites.clients[0]
    key = sites.client_keys[client.name]
    options: dict[str, Any] = {"device": "cpu", "policy": policy, "held_out": held_out()}
    return files.make_upload(sites.federation, client, key, work, said, **options)


def refused(sites: Sites, work: Path, policy: Policy) -> str:
    entered = ledger.read(work / ledger.NAME)
    with pytest.raises(PolicyError) as caught:
        make(sites, work, policy)
    assert not (work / files.SENT).exists()
    assert not any(_is_upload(data) for data in everything(work).values())
    assert ledger.read(work / ledger.NAME) == entered, "what stays here was given to nobody"
    return caught.value.code


def _is_upload(data: bytes) -> bool:
    try:
        return bool(Upload.unpack(data))
    except UploadError:
        return False


def test_a_forbidden_method_is_refused_before_anything_is_made(sites: Sites, tmp_path: Path) -> None:
    assert refused(sites, tmp_path / "work", Policy(methods=["primum"])) == "policy_method"
    assert refused(sites, tmp_path / "work", Policy(others_receive=["nothing"])) == "policy_others"
    assert not (tmp_path / "work").exists()


def test_small_counts_are_refused_or_suppressed(tmp_path: Path) -> None:
    sites = make_sites("ensemble:class_weighted", class_counts={"smallest": 0})
    labels = np.array([0] * 3 + [1] * 9 + [2] * 12)
    sites.clients[0] = Client("client-0", sites.clients[0].images, labels)
    counts, limit = [3, 9, 12], 4
    assert refused(sites, tmp_path / "work", Policy(smallest_count=limit)) == "policy_count"
    data = make(sites, tmp_path / "work", Policy(smallest_count=limit, below="suppress"))
    assert Upload.unpack(data).class_counts == [0 if number < limit else number for number in counts]
    files.verify_upload(sites.federation, data)


def test_what_cannot_do_without_the_suppressed_counts_names_the_policy(tmp_path: Path) -> None:
    """Sums of features are of these very images: without the counts nobody could read them."""
    sites = make_sites("fedcgs", settings={"encoder": "tiny"}, class_counts={"smallest": 0})
    labels = np.array([0] * 3 + [1] * 9 + [2] * 12)
    sites.clients[0] = Client("client-0", sites.clients[0].images, labels)
    assert refused(sites, tmp_path / "work", Policy(smallest_count=4, below="suppress")) == "policy_count"


def test_an_upload_that_fails_its_audit_is_not_written(sites: Sites, tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert refused(sites, work, NEVER) == "policy_audit"
    (kept,) = [file for file in (work / "audit").glob("*.json") if "private" not in file.name]
    body = json.loads(kept.read_bytes())["statement"]
    assert "over max_auc = 0.5" in body["policy"]["reasons"][0]
    assert refused(sites, work, NEVER) == "policy_audit"  # trying again does not help


def test_an_upload_that_passes_leaves_with_a_signed_statement(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, said = tmp_path / "work", Said()
    data = make(sites, work, FINE, said)
    assert "audit: within the site's policy" in said.lines
    assert any(label.startswith("training shadow 4 of 4") for label in said.begun)
    store = DiskStore(work)
    text, page = (store.load(f"{site_audit.place(data)}{ending}") or b"" for ending in (".json", ".html"))
    body = statement.verify(text, sites.federation.clients, page, data)
    assert body["images"] == {"trained_on": 24, "held_out": 24, "made_here": True}
    assert body["policy"]["reasons"] == []
    assert b"patient-" not in text + page
    monkeypatch.setattr(FedAvg, "upload", lambda *args: pytest.fail("made again"))
    assert make(sites, work, FINE) == data


def test_what_names_single_images_stays_in_the_work_folder(sites: Sites, tmp_path: Path) -> None:
    data = make(sites, tmp_path / "work", FINE)
    private = json.loads(DiskStore(tmp_path / "work").load(f"{site_audit.place(data)}-private.json") or b"")
    labels = sites.clients[0].labels
    for one in private["known_by_heart"]:
        assert one["file"] == f"patient-{one['row']}.png"
        assert one["label"] == f"class-{labels[one['row']]}"


def test_a_stricter_policy_takes_back_what_was_made_before(sites: Sites, tmp_path: Path) -> None:
    work = tmp_path / "work"
    before = make(sites, work, None)
    assert (work / files.SENT).read_bytes() == before
    assert refused(sites, work, NEVER) == "policy_audit"
    assert make(sites, work, FINE) == before  # the network is still there: only the judgement is new


def test_a_required_audit_needs_images(sites: Sites, tmp_path: Path) -> None:
    client = sites.clients[0]
    with refuses(PolicyError, "policy_audit"):
        files.make_upload(
            sites.federation, client, sites.client_keys[client.name], tmp_path / "work", device="cpu", policy=FINE
        )
    assert not (tmp_path / "work" / files.SENT).exists()


def audit(sites: Sites, data: bytes, work: Path, policy: Policy | None = None, who: int = 0) -> files.Audited:
    client = sites.clients[who]
    options: dict[str, Any] = {"device": "cpu", "trying": effort(**EFFORT), "policy": policy}
    return files.audit_file(sites.federation, client, held_out(), sites.client_keys[client.name], data, work, **options)


def test_a_file_is_audited_wherever_it_was_made(sites: Sites, tmp_path: Path) -> None:
    data = make(sites, tmp_path / "work", None)
    here = audit(sites, data, tmp_path / "work")
    assert here.body["images"]["made_here"]
    assert here.reasons == []
    elsewhere = audit(sites, data, tmp_path / "elsewhere", NEVER)
    assert not elsewhere.body["images"]["made_here"]
    assert elsewhere.reasons
    assert elsewhere.body["found"] == here.body["found"]


def test_rules_on_methods_are_in_the_statement_too(sites: Sites, tmp_path: Path) -> None:
    data = make(sites, tmp_path / "work", None)
    (reason,) = audit(sites, data, tmp_path / "work", Policy(methods=["primum"])).reasons
    assert "fedavg" in reason


def test_another_sites_file_is_refused(sites: Sites, tmp_path: Path) -> None:
    data = make(sites, tmp_path / "work", None)
    with refuses(ConfigError, "wrong_site"):
        audit(sites, data, tmp_path / "other", who=1)
    with pytest.raises(UploadError):
        audit(sites, data[:-1] + bytes([data[-1] ^ 1]), tmp_path / "work")


def test_statement_of_another_key_does_not_count(sites: Sites, tmp_path: Path) -> None:
    work = tmp_path / "work"
    data = make(sites, work, FINE)
    assert site_audit.kept_audit(DiskStore(work), data, sites.federation.clients["client-0"], FINE)
    assert not site_audit.kept_audit(DiskStore(work), data, sites.federation.clients["client-0"], NEVER)
    with pytest.raises(UploadError):
        site_audit.kept_audit(DiskStore(work), data, keys.public_text(keys.generate_key()), FINE)
