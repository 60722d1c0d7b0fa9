from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedbicross.bundle import Limits, list_bundles, read_file
from fedbicross.errors import UploadError


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3_000_000])
def test_all_bytes_and_only_once(size: int, tmp_path: Path) -> None:
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    assert read_file(tmp_path / "a") == data
    assert read_file(str(tmp_path / "a"), Limits(max_bytes=size)) == data


def test_no_handle_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    handles = Path("/dev/fd")
    before = len(list(handles.iterdir()))
    for _ in range(20):
        read_file(tmp_path / "a")
        for bad in ("folder", "absent"):
            with pytest.raises(UploadError):
                read_file(tmp_path / bad)
        with pytest.raises(UploadError):
            read_file(tmp_path / "a", Limits(max_bytes=0))
    assert len(list(handles.iterdir())) == before


def test_a_read_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x")

    def broken(handle: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(UploadError, match="Input/output") as caught:
        patch.setattr(os, "fstat", broken)
        read_file(tmp_path / "a")
    assert caught.value.code == "cannot_read"


def test_listing_is_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c10", "c2"):
        (tmp_path / f"{name}.safetensors").touch()
    found = list_bundles(tmp_path)
    assert [path.stem for path in found.bundles] == ["a", "b", "c10", "c2"]
    assert found.ignored == [] and all(path.parent == tmp_path for path in found.bundles)
