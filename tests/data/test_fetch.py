from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fedbicross.data.fetch import fetch

from .downloads import serving
from .helpers import raises


@pytest.fixture(scope="module")
def body(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("body") / "x.npz"
    np.savez(path, noise=np.random.default_rng(0).integers(256, size=300_000, dtype=np.uint8))
    return path.read_bytes()


@pytest.fixture
def server(body):
    with serving(body) as running:
        yield running


@pytest.fixture
def get(server, tmp_path):
    def call(**options):
        return fetch("bloodmnist", 28, tmp_path, **({"url": server.url, "timeout": 5} | options))

    return call


def test_download_checksum_progress_and_record(get, server, body, tmp_path):
    seen = []
    path = get(md5=hashlib.md5(body).hexdigest(), progress=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "bloodmnist.npz" and path.read_bytes() == body
    assert seen[-1] == (len(body), len(body))
    assert (tmp_path / "bloodmnist.npz.sha256").read_text().split()[0] == hashlib.sha256(body).hexdigest()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bloodmnist.npz", "bloodmnist.npz.sha256"]
    get()  # already there and unchanged: no second request
    assert server.ranges == [None]


def test_other_size_has_its_own_name(server, tmp_path):
    assert fetch("bloodmnist", 64, tmp_path / "new", url=server.url).name == "bloodmnist_64.npz"


def test_interrupted_then_resumed(get, server, body, tmp_path):
    server.mode = "cut"
    with raises("interrupted", "again"):
        get()
    assert [p.name for p in tmp_path.iterdir()] == ["bloodmnist.npz.part"]
    assert (tmp_path / "bloodmnist.npz.part").read_bytes() == body[: len(body) // 2]
    server.mode = "good"
    assert get(sha256=hashlib.sha256(body).hexdigest()).read_bytes() == body
    assert server.ranges[-1] == f"bytes={len(body) // 2}-"


def test_server_that_ignores_range_restarts(get, server, body, tmp_path):
    (tmp_path / "bloodmnist.npz.part").write_bytes(b"stale" * 10)
    server.mode = "no_range"
    assert get().read_bytes() == body


def test_server_that_resumes_at_the_wrong_place(get, server, body, tmp_path):
    (tmp_path / "bloodmnist.npz.part").write_bytes(body[:100])
    server.mode = "wrong_range"
    with raises("bad_range"):
        get()
    assert (tmp_path / "bloodmnist.npz.part").read_bytes() == body[:100]


def test_complete_part_needs_no_more_bytes(get, body, tmp_path):
    (tmp_path / "bloodmnist.npz.part").write_bytes(body)
    assert get(md5=hashlib.md5(body).hexdigest()).read_bytes() == body


def test_part_longer_than_the_file_starts_again(get, body, tmp_path):
    (tmp_path / "bloodmnist.npz.part").write_bytes(body + b"more")
    assert get().read_bytes() == body


def test_no_content_length(get, server, body):
    server.mode = "no_length"
    assert get().read_bytes() == body


@pytest.mark.parametrize("kind", ["md5", "sha256"])
def test_bad_checksum_deletes_the_part(get, tmp_path, kind):
    with raises("bad_checksum", kind):
        get(**{kind: "0" * 32})
    assert list(tmp_path.iterdir()) == []


def test_stale_part_is_caught_by_the_checksum(get, body, tmp_path):
    (tmp_path / "bloodmnist.npz.part").write_bytes(b"?" * 1000)
    with raises("bad_checksum"):
        get(md5=hashlib.md5(body).hexdigest())
    assert get(md5=hashlib.md5(body).hexdigest()).read_bytes() == body


def test_not_an_npz(get, server, tmp_path):
    server.body = b"<html>please log in</html>"
    with raises("corrupt_file"):
        get()
    assert list(tmp_path.iterdir()) == []


def test_404(get, server, tmp_path):
    server.mode = "404"
    with raises("http_error", "by hand"):
        get()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["good", "no_length"])
def test_size_limit(get, server, tmp_path, mode):
    server.mode = mode
    with raises("too_large"):
        get(max_bytes=1000)
    assert list(tmp_path.iterdir()) == []


def test_offline_says_what_to_do(server, tmp_path, get):
    server.shutdown()
    server.server_close()
    with raises("offline", f"save it as {tmp_path / 'bloodmnist.npz'}"):
        get(timeout=1)


def test_an_existing_file_is_never_replaced(get, server, tmp_path):
    (tmp_path / "bloodmnist.npz").write_bytes(b"mine")
    with raises("file_differs", "move it away"):
        get(md5="0" * 32)
    get()  # no checksum is known for this address: recorded on first use
    (tmp_path / "bloodmnist.npz").write_bytes(b"changed")
    with raises("file_differs"):
        get()
    assert (tmp_path / "bloodmnist.npz").read_bytes() == b"changed" and server.ranges == []


def test_official_address_demands_the_published_checksum(tmp_path):
    (tmp_path / "bloodmnist.npz").write_bytes(b"mine")
    with raises("file_differs", "7053d0359d879ad8a5505303e11de1dc"):
        fetch("bloodmnist", 28, tmp_path)


def test_bad_arguments(tmp_path):
    with raises("bad_url"):
        fetch("bloodmnist", 28, tmp_path, url="file:///etc/passwd")
    with raises("unknown_dataset"):
        fetch("cells", 28, tmp_path)
    with raises("bad_image_size"):
        fetch("bloodmnist", 29, tmp_path)
    with raises("multi_label"):
        fetch("chestmnist", 28, tmp_path)
