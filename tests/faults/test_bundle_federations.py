"""Family D: odd federations, through the very bytes that would travel. No crash, finite answers, nobody mixed up.

The quorum and late uploads of a run between sites are tested with the exchange of files (tests/transport).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from faults.toy_bundle import refusal, trained_like
from fedbicross.bundle import check_signer, inspect, sign
from fedbicross.bundle.keys import generate_key, public_text
from fedbicross.errors import ConfigError, MethodError
from fedbicross.federation import simulate
from fedbicross.messages import Client, Reply, Upload, file_name
from fedbicross.methods import METHODS, create
from small import TINY_METHODS, first_in_check, tiny_clients, tiny_context

FEDERATED = [name for name in METHODS if not METHODS[name].pools_data]
NETWORKS = [name for name in FEDERATED if "weights" in create(name).needs and create(name).uses_local_models]
SHORTEST = {"steps": 1, "batch": 3, "epochs": 1, "trajectories": 1, "memory": 1, "steps_distil": 1, "noise_images": 3}
SHORT: dict[str, dict[str, Any]] = {
    name: {key: SHORTEST.get(key, value) for key, value in values.items()} for name, values in TINY_METHODS.items()
}


def carried(upload: Upload) -> Upload:
    """Signed, carried and opened again."""
    key = generate_key()
    data = sign(upload.pack(), key)
    assert check_signer(inspect(data), {upload.client: public_text(key)}) == upload.client
    return Upload.unpack(data)


def networks(count: int, alike: bool = False) -> list[Upload]:
    """Uploads of networks that nobody trained, but that pass every check."""
    uploads = []
    for index in range(count):
        rng = torch.Generator().manual_seed(0 if alike else index)
        state = {
            name: value + 0.05 * torch.rand(value.shape, generator=rng) if value.is_floating_point() else value
            for name, value in trained_like("resnet8").items()
        }
        uploads.append(Upload(f"site-{index:03d}", tiny_context().task, state, [3, 2, 1], 6))
    return uploads


def answers(method: Any, uploads: list[Upload]) -> list[Reply]:
    for upload in uploads:
        method.check_upload(upload)
    replies: list[Reply] = method.fuse(uploads, tiny_context())
    assert len(replies) == len(uploads)
    for reply in {id(reply): reply for reply in replies}.values():
        opened = Reply.unpack(replace(reply, client="x", run_id="r").pack())
        assert all(bool(torch.isfinite(t).all()) for t in opened.tensors.values() if t.is_floating_point())
    return replies


# --- 22: how many -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("count", [1, 2])  # three: where classes are missing
def test_few_clients(name: str, count: int) -> None:
    answers(create(name, SHORT), [carried(upload) for upload in networks(count)])


@pytest.mark.parametrize("clusters", [1, 3, 9])
def test_as_many_clusters_as_clients_and_more(clusters: int) -> None:
    table = {"fedbicross": {**SHORT["fedbicross"], "clusters": clusters}}
    replies = answers(create("fedbicross", table), networks(3))
    assert {reply.info["clusters"] for reply in replies} <= {min(clusters, 3), *range(1, min(clusters, 3))}


def test_no_cluster_at_all_is_refused() -> None:
    for clusters in (0, -1):
        table = {"fedbicross": {"clusters": clusters}}
        assert refusal(lambda table=table: create("fedbicross", table), ConfigError) == "bad_value"
    assert refusal(lambda: simulate(create("fedavg"), [], tiny_context()), MethodError) == "no_clients"


# --- 23: alike ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_all_networks_the_same(name: str) -> None:
    answers(create(name, SHORT), networks(4, alike=True))


@pytest.mark.parametrize("name", first_in_check(NETWORKS))
def test_two_the_same_among_five(name: str) -> None:
    uploads = networks(5)
    uploads[3] = replace(uploads[1], client=uploads[3].client)
    answers(create(name, SHORT), uploads)


# --- 24: classes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_classes_that_nobody_has_or_only_one(name: str) -> None:
    counts = [[6, 0, 0], [5, 1, 0], [1, 0, 0]]  # nobody has the third; only one has the second; one has one image
    uploads = [
        carried(replace(upload, class_counts=c, num_samples=sum(c)))
        for upload, c in zip(networks(3), counts, strict=True)
    ]
    variant = next((v for v in METHODS[name].variants if v == "class_weighted"), None)
    for spec in [name] + ([f"{name}:{variant}"] if variant else []):
        answers(create(spec, SHORT), uploads)


# --- 25: order and names ------------------------------------------------------------------------------------------


STRANGE = [
    "St. Mary's", "北京", "🏥", "x" * 10_000, "<script>alert(1)</script>", "../../etc/passwd", "a\nb", "a\0b",
    "\u202eevil", "=cmd()", "CON", "", " ", "-rf", "%s%n", "${HOME}", "'; DROP TABLE", "é", "e\u0301",
]  # fmt: skip


def test_strange_names_travel_unchanged_and_make_no_strange_files() -> None:
    task = tiny_context().task
    for name in STRANGE:
        assert carried(Upload(name, task)).client == name
        assert Reply.unpack(Reply({}, {}, name, "r").pack()).client == name
    files = {file_name(name) for name in STRANGE}
    assert len(files) == len(STRANGE), "names that differ never share a file"
    assert all(f.isascii() and "/" not in f and not f.startswith((".", "-")) and len(f) < 80 for f in files)


# --- 26: some are missing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", first_in_check(NETWORKS))
def test_four_of_six(name: str) -> None:
    """A fusion of four knows nothing of the other two: the same replies as in a federation of four."""
    four = [upload for index, upload in enumerate(networks(6)) if index not in (1, 4)]
    method = create(name, SHORT)
    replies = [reply.pack() for reply in answers(method, four)]
    assert replies == [reply.pack() for reply in method.fuse([carried(upload) for upload in four], tiny_context())]


def test_an_empty_client_is_named() -> None:
    client = tiny_clients(1)[0]
    empty = Client("empty", client.images[:0], np.zeros(0, np.int64))
    upload = Upload("empty", tiny_context().task, trained_like("resnet8"), [0, 0, 0], 0)
    assert refusal(lambda: create("fedavg").check_upload(upload)) == "num_samples"
    assert empty.class_counts(3) == [0, 0, 0]
