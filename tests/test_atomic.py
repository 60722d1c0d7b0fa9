from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fedbicross.atomic import write_atomic, write_folder


def full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_made_with_its_folders_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x"
    for data in (b"old", b"newer"):
        write_atomic(path, data)
        assert path.read_bytes() == data
    assert names(path.parent) == ["x"]


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "x", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "x", b"new")
    with pytest.raises(OSError, match="No space"):
        write_folder(tmp_path / "folder", {"x": b"new"})
    assert (tmp_path / "x").read_bytes() == b"old"
    assert names(tmp_path) == ["x"]


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "x").symlink_to(tmp_path / "elsewhere")
    write_atomic(tmp_path / "x", b"new")
    assert (tmp_path / "elsewhere").read_bytes() == b"precious" and not (tmp_path / "x").is_symlink()


def test_a_link_in_the_temporary_file_s_place_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / ".tmp-guessed").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "x", b"new")
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0, 0o666, 0o777)])
def test_the_umask_is_kept(mask: int, file: int, folder: int, tmp_path: Path) -> None:
    old = os.umask(mask)
    try:
        write_atomic(tmp_path / "x", b"")
        write_folder(tmp_path / "model", {"y": b""})
        assert os.umask(mask) == mask, "and it is never changed, not even for a moment: other threads write too"
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == file
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == folder
    assert stat.S_IMODE((tmp_path / "model" / "y").stat().st_mode) == file


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    write_folder(tmp_path / "deep" / "model", {"a": b"1", "b": b"2"})
    assert names(tmp_path / "deep") == ["model"] and names(tmp_path / "deep" / "model") == ["a", "b"]
    with pytest.raises(OSError, match="not empty"):
        write_folder(tmp_path / "deep" / "model", {"c": b"3"})
    assert names(tmp_path / "deep") == ["model"] and names(tmp_path / "deep" / "model") == ["a", "b"]
    with pytest.raises(OSError, match="No such file"):
        write_folder(tmp_path / "other", {"fine": b"", "no/folder": b""})
    assert names(tmp_path) == ["deep"]
