from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from fedbicross.errors import RunError
from fedbicross.runs.store import DiskStore, RunFolder, json_text
from small import code_of


def objects(root: Path) -> int:
    return len(list((root / "objects").iterdir()))


def test_save_load_size_drop(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    assert store.load("a/b.bin") is None
    assert store.size("a/b.bin") == 0
    store.save("a/b.bin", b"one")
    store.save("a/c.bin", b"one")
    assert (store.load("a/b.bin"), store.load("a/c.bin"), store.size("a/c.bin")) == (b"one", b"one", 3)
    assert objects(tmp_path) == 1, "equal bytes are kept once"
    store.save("a/b.bin", b"two")
    assert store.load("a/c.bin") == b"one"
    store.drop("a/b.bin")
    assert store.load("a/b.bin") is None
    assert objects(tmp_path) == 1
    store.drop("a")
    assert store.load("a/c.bin") is None
    assert objects(tmp_path) == 0
    store.drop("nothing/there")


def test_overwriting_forgets_the_old_content(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for number in range(20):
        store.save("stages/x", str(number).encode())
    assert objects(tmp_path) == 1
    store.save("stages/x", b"19")
    assert store.load("stages/x") == b"19"


def test_without_hard_links_a_copy_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    store = DiskStore(tmp_path)
    store.save("a", b"one")
    assert store.load("a") == b"one"


def _try_lock(path: str, queue: multiprocessing.Queue[str]) -> None:
    try:
        with RunFolder(Path(path)):
            queue.put("got it")
    except RunError as error:
        queue.put(error.code)


def test_a_second_runner_is_refused_and_a_dead_ones_lock_is_free(tmp_path: Path) -> None:
    queue: multiprocessing.Queue[str] = multiprocessing.Queue()
    with RunFolder(tmp_path):
        process = multiprocessing.Process(target=_try_lock, args=(str(tmp_path), queue))
        process.start()
        assert queue.get(timeout=200) == "locked"
        process.join()
    process = multiprocessing.Process(target=_try_lock, args=(str(tmp_path), queue))
    process.start()
    assert queue.get(timeout=200) == "got it"
    process.join()


def test_events_survive_a_cut_line(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.event(event="a", n=1)
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('{"event": "b", "n"')
        assert [event["event"] for event in folder.events()] == ["a"]


def test_a_line_of_the_log_that_was_changed_is_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.event(event="fuse", seconds=1.5)
        folder.event(event="fuse", seconds=2.5)
        log = tmp_path / "events.jsonl"
        text = log.read_text()
        for changed in (text.replace("1.5", "9.5"), text.replace("fuse", "", 1), "\n" + text, "x" + text):
            log.write_text(changed)
            assert code_of(RunError, folder.events) == "damaged"
        log.write_text(text[:-5])
        folder.clean()
        folder.event(event="fuse", seconds=3.5)
        assert [event["seconds"] for event in folder.events()] == [1.5, 3.5], "a cut line is not one that was changed"


@pytest.mark.parametrize("make", ["mkfifo", "mkdir"])
def test_a_log_that_is_no_file_is_refused_and_not_waited_for(make: str, tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        getattr(os, make)(tmp_path / "events.jsonl")
        assert code_of(RunError, folder.clean) == "damaged"


def test_what_was_not_written_is_not_loaded(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.save("rows/a.json", b"{}")
    store.save("rows/b.json", b"[]")
    (tmp_path / "rows/a.json").write_bytes(b"{1}")  # through the hard link
    assert code_of(RunError, store.load, "rows/a.json") == "damaged"
    store.save("rows/a.json", b"{}")
    assert store.load("rows/a.json") == b"{}", "saved again it is whole again"
    (tmp_path / "rows/a.json").unlink()
    (tmp_path / "rows/b.json").rename(tmp_path / "rows/a.json")
    assert code_of(RunError, DiskStore(tmp_path).load, "rows/a.json") == "damaged"
    (tmp_path / "rows/new.json").write_bytes(b"{}")
    assert code_of(RunError, store.load, "rows/new.json") == "damaged"
    (tmp_path / "rows/new.json").unlink()
    os.mkfifo(tmp_path / "rows/new.json")
    assert code_of(RunError, store.load, "rows/new.json") == "damaged"
    (tmp_path / "folder").mkdir()
    assert code_of(RunError, store.load, "folder") == "damaged"


def test_json_has_a_line_an_entry_and_a_list_of_numbers_on_one() -> None:
    value = {"b": [[1, 2.5], [None, -3e-05]], "a": ["x [\n1,\n2]", "y"], "c": [], "d": [{"e": [True]}], "f": "[1, 2]"}
    text = json_text(value)
    assert json.loads(text) == value
    assert text.startswith('{\n "a": [\n  "x [\\n1,\\n2]",\n')
    assert "\n  [1, 2.5],\n  [null, -3e-05]\n ]" in text and '"e": [true]' in text
    with pytest.raises(ValueError):
        json_text([float("nan")])
