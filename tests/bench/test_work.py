"""Cells are the rows of ordinary runs, whoever makes them and however often they are killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.small import make, rows
from fedbicross.bench import cells as stored
from fedbicross.bench import work
from fedbicross.bench.suite import Cell
from fedbicross.context import Silent
from fedbicross.errors import DataError, MethodError, RunError
from fedbicross.methods.fedisca import FedISCA
from fedbicross.runs import runner
from fedbicross.runs.store import RunFolder
from small import first_in_check, refuses

MORE: dict[str, Any] = {"alone": ["local_only", "local_only:balanced", "local_only:both"]}


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return make(MORE)


@pytest.fixture(scope="module")
def plain(cells: list[Cell], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cells, made without any trouble."""
    out = tmp_path_factory.mktemp("plain")
    outcome = work.run(cells, out)
    assert outcome.made == [cell.key for cell in cells] and not outcome.failed and not outcome.left
    return out


def test_cells_are_the_rows_of_an_ordinary_run(cells: list[Cell], plain: Path) -> None:
    config = cells[-1].config.model_copy(update={"methods": [*MORE["alone"], "fedavg", "fedisca"]})
    expected = {row["method"]: row for row in runner.run(config)["rows"]}
    found = rows(plain)
    assert len(found) == len(cells) == 5
    for status in stored.statuses_of(cells, plain):
        assert status.state == "done" and status.stored is not None
        row = {key: value for key, value in status.stored["row"].items() if not key.startswith("seconds")}
        wanted = {key: value for key, value in expected[status.cell.spec].items() if not key.startswith("seconds")}
        diagnosis = row.pop("diagnosis")
        whole = wanted.pop("diagnosis")
        del wanted["clinical"]  # a cell is small
        assert row == wanted
        assert set(diagnosis) <= {"scalars"} and diagnosis == {k: v for k, v in whole.items() if k == "scalars"}


def test_what_is_stored(cells: list[Cell], plain: Path) -> None:
    text = stored.file_of(plain, cells[-1]).read_text()
    found = json.loads(text)
    assert found["cell"]["method"] == "fedisca" and found["cell"]["budget"] == "smoke"
    assert found["digest"] == stored.digest(cells[-1]) and found["engine_version"] == stored.ENGINE_VERSION
    assert found["config"]["methods"] == [*MORE["alone"], "fedisca"] and found["config"]["data"]["dir"] is None
    assert found["versions"]["torch"] and found["device"] == "cpu"
    assert found["seconds"] == found["row"]["seconds"] > 0
    assert "training" not in found and len(text) < 40_000
    assert str(plain) not in text


def test_client_models_are_trained_once(cells: list[Cell], tmp_path: Path) -> None:
    """Also what a sibling trained is charged in full."""
    work.run(cells, tmp_path, keep_work=True)
    (shared,) = (tmp_path / "work").glob("*/shared")
    assert len(list((shared / "client_models").iterdir())) == 2 * 2  # clients times losses
    assert not list((tmp_path / "work").glob("*/fedavg*/client_models"))
    fedavg, alone = (json.loads(stored.file_of(tmp_path, cells[i]).read_text())["row"] for i in (3, 0))
    training = fedavg["seconds_by_stage"]["local_training"]
    assert training == alone["seconds_by_stage"]["local_training"] > 0


def test_finished_work_is_removed(plain: Path) -> None:
    assert not list((plain / "work").iterdir())


def test_work_that_others_could_use_stays(tmp_path: Path) -> None:
    cells = make()
    work.run(cells[:2], tmp_path, suite=cells)
    (base,) = (tmp_path / "work").iterdir()
    assert {path.name for path in base.iterdir()} == {"shared", "alone"}
    work.run(cells, tmp_path, suite=cells)
    assert not list((tmp_path / "work").iterdir())


def test_training_alone_is_made_again_where_its_models_are_gone(tmp_path: Path) -> None:
    """Rows and the bar that they are measured against come from one training."""
    cells = make()
    work.run(cells[:1], tmp_path, suite=cells)
    shutil.rmtree(tmp_path / "work")
    file = stored.file_of(tmp_path, cells[0])
    old = json.loads(file.read_text())
    true = old["row"]["clients"]
    old["row"]["clients"] = [{**client, "accuracy": {"matched": 0.123}} for client in true]  # as another GPU had it
    file.write_text(json.dumps(old))
    work.run(cells[:2], tmp_path, suite=cells)
    assert json.loads(file.read_text())["row"]["clients"] == true
    file.write_text(json.dumps(old))
    (base,) = (tmp_path / "work").iterdir()
    log = base / "shared" / "events.jsonl"
    trained = log.read_text().count('"trained"')
    work.run(cells, tmp_path, suite=cells, keep_work=True)
    assert json.loads(file.read_text())["row"]["clients"] == true, "also where the models are those of other cells"
    assert log.read_text().count('"trained"') == trained, "which nobody trained again"


def test_no_method_begins_while_somebody_trains_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = make()
    work.run(cells[:1], tmp_path, suite=cells)
    shutil.rmtree(tmp_path / "work")
    looked = []

    def meanwhile(seconds: float) -> None:
        looked.append(seconds)
        assert {path.name for path in (tmp_path / "work").glob("*/*")} == {"alone"}
        other.__exit__()

    monkeypatch.setattr(work.time, "sleep", meanwhile)
    with work._folder(work.jobs(cells)[0], tmp_path) as other:
        outcome = work.run(cells, tmp_path)
    assert len(looked) == 1 and outcome.made == [cell.key for cell in cells[1:]]


def test_tidying_waits_for_whoever_is_there(tmp_path: Path) -> None:
    cells = make()
    job = work.jobs(cells)[0]
    work.run(cells, tmp_path, keep_work=True)
    (base,) = (tmp_path / "work").iterdir()
    for busy in ("alone", "another_budget"):
        with RunFolder(base / busy):
            work._tidy(job, cells, tmp_path)
        assert (base / "shared" / "client_models").is_dir()
    (tmp_path / "work" / ".gone-1-killed" / "objects").mkdir(parents=True)
    work._tidy(job, cells, tmp_path)
    assert not list((tmp_path / "work").iterdir())


def test_a_lock_of_a_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = work._folder(work.jobs(make())[0], tmp_path)
    enter = RunFolder.__enter__

    def slow(self: RunFolder) -> RunFolder:
        enter(self)
        work._remove(self.path, tmp_path)
        return self

    monkeypatch.setattr(RunFolder, "__enter__", slow)
    with refuses(RunError, "locked"):
        folder.__enter__()


def test_stored_errors_name_no_place_of_the_machine(tmp_path: Path) -> None:
    (cell, *_) = make()
    data = tmp_path / "my images"
    for text in (f"{data}/blood.npz is cut", f"'{tmp_path}/a/blood.npz' is cut", r"C:\Users\ann\blood.npz is cut"):
        stored.save_error(tmp_path / "out", cell, DataError("cut", text), data)
        kept = stored.error_file_of(tmp_path / "out", cell).read_text()
        assert str(tmp_path) not in kept and "ann" not in kept and "blood.npz" in kept and "is cut" in kept
    assert stored.without_places("loss is nan/inf, see docs/x.md") == "loss is nan/inf, see docs/x.md"


@pytest.mark.slow
def test_variants_share_the_work_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they differ at the client only; and each can be made by itself."""
    specs = ["primum", "fedisca", "primum:student", "fedisca:personal", "fedisca:ema"]
    cells = make({"methods": specs})
    jobs = [[cell.method for cell in job.cells] for job in work.jobs(cells)]
    assert jobs == [["local_only"], ["primum", "primum:student"], ["fedisca", "fedisca:personal"], ["fedisca:ema"]]
    calls = []
    fuse = FedISCA.fuse
    monkeypatch.setattr(FedISCA, "fuse", lambda self, *rest: calls.append(self) or fuse(self, *rest))
    assert sorted(work.run(cells, tmp_path / "all").made) == sorted(cell.key for cell in cells)
    assert len(calls) == 2
    for cell in cells[1:]:
        work.run([cells[0], cell], tmp_path / "one by one", suite=cells)
    assert len(calls) == 5
    assert rows(tmp_path / "one by one") == rows(tmp_path / "all")
    stored.file_of(tmp_path / "all", cells[3]).unlink()
    assert work.run(cells, tmp_path / "all").made == [cells[3].key], "only what is missing is made again"
    assert rows(tmp_path / "one by one") == rows(tmp_path / "all")


class Killed(BaseException):
    pass


class Mortal(Silent):
    """Is killed after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def start(self, label: str, total: int) -> Any:
        def update(done: int, note: str) -> None:
            self.steps -= 1
            if self.steps <= 0:
                raise Killed

        return update


@pytest.mark.parametrize("steps", first_in_check([5, 1, 9, 12]))
def test_a_killed_bench_goes_on_to_the_same_rows(
    cells: list[Cell], plain: Path, tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        work.run(cells, tmp_path, progress=Mortal(steps))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*.json")}
    outcome = work.run(cells, tmp_path)
    assert rows(tmp_path) == rows(plain)
    assert len(outcome.made) + len(before) == len(cells), "what was there is not made again"
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())


@pytest.mark.slow
def test_a_bench_killed_by_the_system(cells: list[Cell], plain: Path, tmp_path: Path) -> None:
    with _process(tmp_path) as process:
        while not list(tmp_path.rglob("fedavg.json")) and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert rows(tmp_path) != rows(plain) or process.returncode == 0
    work.run(cells, tmp_path)
    assert rows(tmp_path) == rows(plain)


def _process(out: Path, what: str = "work.run(make(MORE), Path(sys.argv[1]))") -> subprocess.Popen[str]:
    """Another process that makes the same cells."""
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from bench.small import make; from bench.test_work import MORE; from fedbicross.bench import work\n"
        f"print(len({what}.made))"
    )
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, str(out)], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_share_a_folder(cells: list[Cell], plain: Path, tmp_path: Path) -> None:
    processes = [_process(tmp_path), _process(tmp_path)]
    made = [int(process.communicate(timeout=120)[0]) for process in processes]
    assert sum(made) == len(cells), "no cell twice"
    assert rows(tmp_path) == rows(plain)
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.slow
def test_workers_of_one_machine(
    cells: list[Cell], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the cells, and one that dies is not missed."""
    outcome = work.run_in_processes(cells, tmp_path / "both", workers=2)
    assert sorted(outcome.made) == sorted(cell.key for cell in cells) and not outcome.failed and not outcome.left
    assert rows(tmp_path / "both") == rows(plain)
    assert work.run_in_processes(cells, tmp_path / "later", workers=2, minutes=0).left == [c.key for c in cells]
    said: list[str] = []
    monkeypatch.setattr(work, "_worker", _dies_if_first)
    outcome = work.run_in_processes(cells, tmp_path / "one", workers=2, progress=Told(said))
    assert "worker 1 died; the others go on" in said and rows(tmp_path / "one") == rows(plain)
    with refuses(RunError, "workers_died"):
        work.run_in_processes(cells, tmp_path / "none", workers=1)


def test_what_one_worker_could_not_another_may_have_made(tmp_path: Path) -> None:
    first, second, third = (cell.key for cell in make())
    error = MethodError("broken", "it cannot")
    one, other = work.Outcome([first], {second: error, third: error}, [], []), work.Outcome([second], {}, [], [third])
    both = work._together([one, other], make(), tmp_path)
    assert both.made == [first, second] and both.failed == {third: error} and both.left == []


class Told(Silent):
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def say(self, message: str) -> None:
        self.said.append(message)


def _dies_if_first(number: int, make: Callable[[], work.Outcome]) -> work.Outcome:
    if number == 1:
        os._exit(9)
    return make()


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(cells: list[Cell], plain: Path, tmp_path: Path) -> None:
    with _process(
        tmp_path, "work.run_in_processes(make(MORE), Path(sys.argv[1]), workers=2, keep_work=True)"
    ) as process:
        while not list(tmp_path.rglob("events.jsonl")) and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.communicate(timeout=120)  # the pipe ends when the workers, who inherited it, are gone
    folders = [path.parent for path in tmp_path.rglob(".lock")]
    assert folders and not any(RunFolder(folder).held() for folder in folders)
    work.run(cells, tmp_path)
    assert rows(tmp_path) == rows(plain)


def test_a_cell_that_somebody_else_is_at_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = make()
    job = work.jobs(cells)[0]
    looked = []

    def meanwhile(seconds: float) -> None:
        looked.append(seconds)
        assert not list(tmp_path.rglob("*.json")), "training alone comes first, so that nothing can be made"
        other.__exit__()

    monkeypatch.setattr(work.time, "sleep", meanwhile)
    with work._folder(job, tmp_path) as other:
        outcome = work.run(cells, tmp_path)
    assert len(looked) == 1 and len(outcome.made) == len(cells)


def test_the_time_is_over(cells: list[Cell], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = work.run(cells, tmp_path, minutes=0)
    assert not nothing.made and nothing.left == [cell.key for cell in cells]
    clock = iter(range(10_000))
    with monkeypatch.context() as patch:  # one tick at each look: the time is over in the middle of the work
        patch.setattr(work.time, "monotonic", lambda: float(next(clock)))
        some = work.run(cells, tmp_path, minutes=18 / 60)
    assert some.left and set(some.made) | set(some.left) == {cell.key for cell in cells}
    rest = work.run(cells, tmp_path)
    assert rest.made == some.left
    assert rows(tmp_path) == rows(plain)


def test_a_changed_default_makes_only_its_cells_stale(
    cells: list[Cell], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(FedISCA.Config.model_fields["temperature"], "default", 7.0)
    FedISCA.Config.model_rebuild(force=True)
    try:
        statuses = stored.statuses_of(cells, tmp_path)
        assert {s.cell.method: s.state for s in statuses if s.state != "done"} == {"fedisca": "stale"}
        assert statuses[-1].reason == "settings changed"
        outcome = work.run(cells, tmp_path)
        assert outcome.made == [cells[-1].key]
        assert json.loads(stored.file_of(tmp_path, cells[-1]).read_text())["row"]["settings"]["temperature"] == 7.0
    finally:
        monkeypatch.undo()
        FedISCA.Config.model_rebuild(force=True)
    assert stored.status_of(cells[-1], tmp_path).state == "stale", "and back again"


def test_versions_make_stale(cells: list[Cell], plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def stale() -> list[str]:
        return [status.cell.method for status in stored.statuses_of(cells, plain) if status.state == "stale"]

    assert stale() == []
    monkeypatch.setitem(stored.METHOD_VERSIONS, "fedavg", 2)
    assert stale() == ["fedavg"]
    monkeypatch.setitem(stored.METHOD_VERSIONS, "local_only", 2)
    assert len(stale()) == len(cells), "every row is measured against training alone"
    monkeypatch.setattr(stored, "METHOD_VERSIONS", {})
    monkeypatch.setattr(stored, "ENGINE_VERSION", 99)
    assert len(stale()) == len(cells)
    assert stored.status_of(cells[0], plain).reason == "engine 1, now 99"


@pytest.mark.parametrize("change", [{"seeds": [1]}, {"clients": [3]}, {"partitions": ["dirichlet:0.4"]}])
def test_other_federations_are_other_cells(plain: Path, change: dict[str, Any]) -> None:
    assert {s.state for s in stored.statuses_of(make({**MORE, **change}), plain)} == {"missing"}


def test_other_training_or_data_make_stale(plain: Path) -> None:
    for change in (
        {"training": {"recipe": "modern", "epochs": 2, "batch_size": 16}},
        {"data": {"cells": {"image_size": 8, "train_size": 40, "test_size": 24}}},
    ):
        assert {s.state for s in stored.statuses_of(make(MORE, **change), plain)} == {"stale"}


def test_one_method_that_fails_does_not_cost_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = make({"methods": ["fedisca", "fedavg"]})

    def fuse(self: FedISCA, *arguments: object) -> Any:
        raise MethodError("broken", "it cannot")

    with monkeypatch.context() as patch:
        patch.setattr(FedISCA, "fuse", fuse)
        outcome = work.run(cells, tmp_path)
    assert list(outcome.failed) == [cells[1].key] and len(outcome.made) == 2
    status = stored.status_of(cells[1], tmp_path)
    assert status.state == "failed" and "it cannot" in status.reason
    assert work.run(cells, tmp_path).made == [cells[1].key], "the next call tries again"
    assert stored.status_of(cells[1], tmp_path).state == "done"
    assert not stored.error_file_of(tmp_path, cells[1]).exists()


def test_training_alone_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> Any:
        raise DataError("broken", "no images")

    monkeypatch.setattr(runner, "prepare", broken)
    work._load.cache_clear()
    cells = make()
    outcome = work.run(cells, tmp_path)
    assert list(outcome.failed) == [cell.key for cell in cells] and not outcome.made


def test_data_that_are_not_at_hand(tmp_path: Path) -> None:
    data = {"cells": {"image_size": 8, "train_size": 48, "test_size": 24}, "octmnist": {}, "my_folder": {}}
    cells = make({"data": ["octmnist", "cells", "my_folder"], "methods": ["fedavg"]}, data=data)
    outcome = work.run(cells, tmp_path / "out", tmp_path)
    assert len(outcome.unavailable) == 4 and len(outcome.made) == 2 and not outcome.failed
    states = [(s.cell.data, s.state) for s in stored.statuses_of(cells, tmp_path / "out", tmp_path)]
    away = "not available here"
    assert states == [("octmnist", away)] * 2 + [("cells", "done")] * 2 + [("my_folder", away)] * 2
    (tmp_path / "my_folder").mkdir()
    assert stored.place(cells[-1], tmp_path) == (str(tmp_path / "my_folder"), None)
    (tmp_path / "octmnist.npz").touch()
    assert stored.place(cells[0], tmp_path) == ("octmnist", str(tmp_path))


def test_other_images_are_not_mixed_in(tmp_path: Path) -> None:
    cells = make()
    work.run(cells[:1], tmp_path, suite=cells, keep_work=True)
    (file,) = (tmp_path / "work").glob("*/shared/partition.json")
    file.write_text("{}")
    outcome = work.run(cells, tmp_path, suite=cells)
    assert {error.code for error in outcome.failed.values()} == {"changed"}


@pytest.mark.parametrize(
    ("content", "code"), [(b"{", "cell_garbled"), (b"[]", "cell_schema"), (b'{"schema": 9}', "cell_schema")]
)
def test_damaged_cells(tmp_path: Path, content: bytes, code: str) -> None:
    (cell, *_) = make()
    file = stored.file_of(tmp_path, cell)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with refuses(RunError, code):
        stored.status_of(cell, tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError) as error:
        work.run(make(), tmp_path / "file")
    assert error.value.code in ("cannot_write", "cell_unreadable")


def test_the_lock_is_that_of_a_run(tmp_path: Path) -> None:
    job = work.jobs(make())[0]
    with work._folder(job, tmp_path) as folder:
        assert RunFolder(folder.path).held()
        with pytest.raises(RunError, match="another process"):
            work._folder(job, tmp_path).__enter__()


@pytest.mark.slow
def test_two_machines_of_ray_share_the_cells(cells: list[Cell], plain: Path, tmp_path: Path) -> None:
    """Two nodes of one processor each, as two machines would be: one worker on each."""
    ray, utils = pytest.importorskip("ray"), pytest.importorskip("ray.cluster_utils")
    small = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = utils.Cluster(initialize_head=True, head_node_args=small)
    cluster.add_node(**small)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    try:
        assert [node["Resources"]["CPU"] for node in ray.nodes()] == [1.0, 1.0]
        outcome = work.run_on_ray(cells, tmp_path)
        assert sorted(outcome.made) == sorted(cell.key for cell in cells) and not outcome.failed
        assert work.run_on_ray(cells, tmp_path / "later", minutes=0).left == [cell.key for cell in cells]
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert rows(tmp_path) == rows(plain)
