from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from fedbicross.errors import RunError
from fedbicross.privacy import ledger
from fedbicross.privacy.gaussian import epsilon_of, noise_for
from fedbicross.privacy.statement import Release, Statement

NOISE = noise_for(1.0, 1e-5)
PRIVATE = Statement(
    epsilon=1.0,
    delta=1e-5,
    releases=[Release(what="sums", mechanism="gaussian", noise_multiplier=NOISE)],
)


def enter(file: Path, number: int, privacy: Statement | None = PRIVATE) -> list[ledger.Entry]:
    about = {"run": "run-1", "client": "north", "method": "analytic", "data": "d" * 64}
    return ledger.add(file, upload=f"{number:064x}", privacy=privacy, **about)


def test_entries_add_up_and_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "deep" / ledger.NAME
    assert ledger.read(file) == [] and ledger.total([]).words == "nothing was sent"
    assert ledger.total(enter(file, 1)).epsilon == pytest.approx(1.0, rel=1e-6)
    enter(file, 2)
    assert enter(file, 2) == ledger.read(file)  # the same file again is no second release
    found = ledger.total(ledger.read(file))
    assert found.epsilon == pytest.approx(epsilon_of(NOISE / 2**0.5, 1e-5)) and (found.private, found.open) == (2, 0)
    assert "together ε = 1.4" in found.words
    open_ = ledger.total(enter(file, 3, None))
    assert open_.epsilon == found.epsilon and open_.open == 1 and "nothing bounds" in open_.words


def test_a_patient_is_promised_something_only_where_all_uploads_do(tmp_path: Path) -> None:
    patient = PRIVATE.model_copy(update={"unit": "patient"})
    assert ledger.total(enter(tmp_path / "l.json", 1, patient)).unit == "patient"
    total = ledger.total(enter(tmp_path / "l.json", 2))
    assert total.unit == "image" and total.words.endswith("for each image")


def test_the_smallest_delta_is_told(tmp_path: Path) -> None:
    enter(tmp_path / "l.json", 1)
    stricter = PRIVATE.model_copy(update={"delta": 1e-7})
    found = ledger.total(enter(tmp_path / "l.json", 2, stricter))
    assert found.delta == 1e-7


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content["entries"].pop(0),
        lambda content: content["entries"].pop(1),
        lambda content: content["entries"].reverse(),
        lambda content: content["entries"][0]["privacy"].update(epsilon=0.1),
        lambda content: content["entries"][1].update(privacy=None),
        lambda content: content["entries"][0]["privacy"]["releases"][0].update(noise_multiplier=1e300),
        lambda content: content["entries"][0].update(extra=1),
        lambda content: content["entries"][0].pop("upload"),
        lambda content: content.update(schema=2),
        lambda content: content.update(schema="1"),
        lambda content: content.clear(),
    ],
)
def test_what_was_changed_is_refused_and_nothing_is_added(tmp_path: Path, spoil) -> None:
    file = tmp_path / "l.json"
    for number in range(3):
        enter(file, number)
    content = json.loads(file.read_text())
    spoil(content)
    file.write_text(json.dumps(content))
    before = file.read_bytes()
    for call in (lambda: ledger.read(file), lambda: enter(file, 9)):
        with pytest.raises(RunError) as error:
            call()
        assert error.value.code == "ledger"
    assert file.read_bytes() == before


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff\xfe", b"{" * 100_000, b'{"schema": 1, "entries": NaN}'])
def test_bytes_that_are_no_ledger(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "l.json"
    file.write_bytes(data)
    with pytest.raises(RunError, match="no ledger"):
        ledger.read(file)


def test_a_folder_or_a_pipe_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        ledger.read(tmp_path)


def test_a_kill_while_writing_leaves_the_old_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "l.json"
    enter(file, 1)

    def killed(path: Path, data: bytes) -> None:
        (path.parent / "half").write_bytes(data[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        enter(file, 2)
    monkeypatch.undo()
    assert len(ledger.read(file)) == 1 and len(enter(file, 2)) == 2


def _enter_many(file: str, start: int) -> None:
    for number in range(start, start + 5):
        enter(Path(file), number)


@pytest.mark.slow
def test_several_processes_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "l.json"
    spawn = multiprocessing.get_context("spawn")
    work = [spawn.Process(target=_enter_many, args=(str(file), 10 * start)) for start in range(3)]
    for process in work:
        process.start()
    for process in work:
        process.join(120)
    assert [process.exitcode for process in work] == [0, 0, 0]
    assert len(ledger.read(file)) == 15
