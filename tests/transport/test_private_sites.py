"""Differential privacy between real sites: what is agreed on, secret noise, and the ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedbicross.bundle import sign
from fedbicross.errors import ConfigError, FedBiCrossError, MethodError, RunError, UploadError
from fedbicross.messages import Upload
from fedbicross.privacy import ledger
from fedbicross.transport import files
from small import refuses
from transport.sites import TRAINING, Sites, make_sites

NOISY = {"encoder": "tiny", "epsilon": 100.0}
DP = {**TRAINING, "dp": {"epsilon": 4.0}}


def upload(sites: Sites, folder: Path, who: int = 0, **more: Any) -> bytes:
    client = sites.clients[who]
    return files.make_upload(sites.federation, client, sites.client_keys[client.name], folder / client.name, **more)


def private(**more: Any) -> Sites:
    return make_sites("analytic", settings=NOISY, class_counts={"smallest": 5}, **more)


def test_sums_with_noise_from_site_to_model(tmp_path: Path) -> None:
    sites = private()
    uploads = {client.name: upload(sites, tmp_path, i) for i, client in enumerate(sites.clients)}
    replies = files.fuse_uploads(sites.federation, uploads, tmp_path / "server", sites.server_key)
    for client in sites.clients:
        model = files.personalize(sites.federation, client, replies[client.name], tmp_path / client.name)
        assert model.architectures == ("clipped",)
        entries = ledger.read(tmp_path / client.name / ledger.NAME)
        assert [entry.client for entry in entries] == [client.name]
        assert entries[0].privacy is not None and entries[0].privacy.epsilon == 100.0


def test_noise_between_sites_is_secret_and_drawn_once(tmp_path: Path) -> None:
    sites = private()
    first = upload(sites, tmp_path / "a")
    assert upload(sites, tmp_path / "a") == first, "what was made is not made again"
    other = upload(sites, tmp_path / "b")
    assert Upload.unpack(first).tensors["gram"].tolist() != Upload.unpack(other).tensors["gram"].tolist()


def test_everything_is_entered_in_one_book(tmp_path: Path) -> None:
    book = tmp_path / "site" / ledger.NAME
    upload(private(), tmp_path / "a", book=book)
    upload(private(run_id="second"), tmp_path / "b", book=book)
    upload(make_sites("local_only", run_id="third"), tmp_path / "c", book=book)
    entries = ledger.read(book)
    assert [entry.run.partition("+")[0] for entry in entries] == ["test-run", "second", "third"]
    total = ledger.total(entries)
    assert (total.private, total.open) == (2, 1) and total.epsilon > 100


def test_with_a_damaged_ledger_nothing_is_trained_or_sent(tmp_path: Path) -> None:
    sites, book = private(), tmp_path / ledger.NAME
    upload(sites, tmp_path / "a", book=book)
    content = json.loads(book.read_text())
    content["entries"][0]["privacy"]["epsilon"] = 0.1
    content["entries"].append({**content["entries"][0]})
    book.write_text(json.dumps(content))
    with pytest.raises(RunError) as error:
        upload(sites, tmp_path / "b", book=book)
    assert error.value.code == "ledger" and not (tmp_path / "b").exists()


def test_the_server_refuses_less_privacy_than_was_agreed_on(tmp_path: Path) -> None:
    sites = private()
    name = sites.clients[0].name
    honest = Upload.unpack(upload(sites, tmp_path))
    assert honest.privacy is not None
    for stated in (None, honest.privacy.model_copy(update={"epsilon": 200.0})):
        with refuses(UploadError, "not_private"):
            files.verify_upload(sites.federation, sign(replace(honest, privacy=stated).pack(), sites.client_keys[name]))


def test_small_counts_behind_noise_may_leave(tmp_path: Path) -> None:
    sites = make_sites("analytic", settings={"encoder": "tiny", "epsilon": 0.5}, class_counts={"smallest": 1000})
    assert upload(sites, tmp_path)
    with pytest.raises(MethodError) as error:  # the same without noise
        upload(make_sites("analytic", settings={"encoder": "tiny"}, class_counts={"smallest": 1000}), tmp_path / "b")
    assert error.value.code == "small_count"


@pytest.mark.parametrize(
    ("kind", "code", "method", "more"),
    [
        (ConfigError, "dp_batchnorm", "fedavg", {}),
        (ConfigError, "dp_unused", "analytic", {"settings": {"encoder": "tiny"}}),
        (ConfigError, "dp_unused", "local_only", {}),
        (MethodError, "not_private", "fedisca", {}),
        (MethodError, "not_private", "primum", {}),
        (MethodError, "not_private", "ensemble:consensus", {"model": "resnet8_gn"}),
        (ConfigError, "needs_batchnorm", "fedisca", {"model": "resnet8_gn", "training": TRAINING}),
        (ConfigError, "bad_value", "fedavg", {"training": {**DP, "select": "best"}}),
    ],
)
def test_agreements_that_cannot_be_kept(
    kind: type[FedBiCrossError], code: str, method: str, more: dict[str, Any]
) -> None:
    with pytest.raises(kind) as error:
        make_sites(method, **{"training": DP, **more})
    assert error.value.code == code


@pytest.mark.slow
def test_private_networks_from_site_to_model(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    sites = make_sites("fedavg", model="resnet8_gn", training=DP)
    uploads = {client.name: upload(sites, tmp_path, i) for i, client in enumerate(sites.clients)}
    replies = files.fuse_uploads(sites.federation, uploads, tmp_path / "server", sites.server_key)
    client = sites.clients[0]
    model = files.personalize(sites.federation, client, replies[client.name], tmp_path / client.name)
    assert model.architectures == ("resnet8_gn",)
    total = ledger.total(ledger.read(tmp_path / client.name / ledger.NAME))
    assert 0 < total.epsilon <= 4.0
    stated = Upload.unpack(uploads[client.name])
    with refuses(UploadError, "not_private"):
        bare = sign(replace(stated, privacy=None).pack(), sites.client_keys[client.name])
        files.verify_upload(sites.federation, bare)
