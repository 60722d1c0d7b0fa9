"""Trajectories made by Ray's workers: the same replies, whatever is killed on the way, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.console import call, environment
from fedbicross.bundle import keys
from fedbicross.context import Context
from fedbicross.engine.workers import (
    CHUNK,
    CHUNK_BYTES,
    QUIET,
    STORE,
    WAITING,
    OnWorker,
    Workers,
    from_bytes,
    map_leaves,
    size,
    to,
    to_bytes,
)
from fedbicross.errors import ConfigError, MethodError
from fedbicross.federation import simulate
from fedbicross.transport import files
from small import TINY_METHODS, refuses, tiny_clients, tiny_context
from transport.sites import Said, Sites, make_sites
from transport.test_files import upload_all

# More than one chunk a trajectory, and more trajectories than are begun at first.
MORE = {"fedbicross:k2": {"steps": 11, "trajectories": 3}, "fedisca": {"steps": 11, "epochs": 4}}
CLUSTERS = pytest.mark.parametrize("fused", ["fedbicross:k2"], indirect=True)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster with room for two workers, to which everything in this process connects."""
    found = pytest.importorskip("ray")
    cores = 2 * torch.get_num_threads()
    found.init(address="local", num_cpus=cores, object_store_memory=STORE, **QUIET)
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def fused(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Sites, dict[str, bytes], dict[str, bytes]]:
    """A federation, its uploads, and the replies of the local engine."""
    folder = tmp_path_factory.mktemp("fused")
    settings = {**TINY_METHODS[request.param.partition(":")[0]], **MORE[request.param]}
    settings.pop("clusters", None)
    sites = make_sites(request.param, settings=settings)
    uploads = upload_all(sites, folder / "sites")
    return sites, uploads, sites.fuse(uploads, folder / "work")


def with_ray(sites: Sites, uploads: dict[str, bytes], work: Path, said: Said, workers: int = 2) -> dict[str, bytes]:
    return sites.fuse(uploads, work, said, engine="ray", workers=workers)


def at_step(number: int, act: Callable[..., None], patch: pytest.MonkeyPatch) -> None:
    """Have ``act`` called in this step of the server, in place of a checkpoint."""
    steps = count(1)

    def due(self: Context, name: str, state: Any) -> None:
        if next(steps) == number:
            act(self, name, state)

    patch.setattr(Context, "save_stage_when_due", due)


# --- the same result ------------------------------------------------------------------------------------------


@pytest.mark.slow
@CLUSTERS
@pytest.mark.parametrize("workers", [2, 1])  # with one, the second cluster's trajectories are made by the server itself
def test_the_replies_are_those_of_the_local_engine(ray: Any, fused: Any, workers: int, tmp_path: Path) -> None:
    sites, uploads, expected = fused
    said = Said()
    assert with_ray(sites, uploads, tmp_path, said, workers) == expected
    assert f"trajectories are made by Ray workers: {workers}" in said.lines
    assert with_ray(sites, uploads, tmp_path, said) == expected
    assert sum("Ray workers" in line for line in said.lines) == 1, "what is finished needs no workers"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fused", "first", "then"),
    [("fedbicross:k2", "ray", "local"), ("fedisca", "local", "ray")],
    indirect=["fused"],
)  # from Ray to Ray: a server that is killed, below
def test_broken_off_in_the_middle_either_engine_goes_on(
    ray: Any, fused: Any, first: str, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, uploads, expected = fused

    def stop(ctx: Context, name: str, state: Any) -> None:
        ctx.save_stage(name, *state())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        at_step(15, stop, patch)  # in the second trajectory, inside a chunk
        with pytest.raises(KeyboardInterrupt):
            sites.fuse(uploads, tmp_path, engine=first)
    assert list((tmp_path / "stages").rglob("*.safetensors")), "a checkpoint is there"
    said = Said()
    assert sites.fuse(uploads, tmp_path, said, engine=then) == expected
    assert any("Ray workers" in line for line in said.lines) == (then == "ray")


@pytest.mark.slow
@CLUSTERS
def test_the_server_goes_on_without_a_lost_worker(
    ray: Any, fused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, uploads, expected = fused
    at_step(5, lambda ctx, *rest: ray.kill(ctx.workers.actors[0]), monkeypatch)  # before its last trajectory
    said = Said()
    assert with_ray(sites, uploads, tmp_path, said) == expected
    assert "a Ray worker is gone; the server makes the rest of its trajectory" in said.lines


@pytest.mark.slow
def test_a_simulation_can_be_given_workers(ray: Any) -> None:
    from fedbicross.methods.fedisca import FedISCA, FedISCAConfig

    method, clients = FedISCA(FedISCAConfig(**TINY_METHODS["fedisca"], adaptation="ema")), tiny_clients(2)
    expected = simulate(method, clients, tiny_context())
    with Workers(2, say=lambda line: None) as workers:
        found = simulate(method, clients, replace(tiny_context(), workers=workers))
    assert {name: model.pack() for name, model in found.items()} == {n: m.pack() for n, m in expected.items()}


# --- a cluster of its own, from the command line ---------------------------------------------------------------

KILLED = """
from fedbicross import context
from fedbicross.cli import main
calls = 0
def due(self, name, state):
    global calls
    calls += 1
    if calls == 15:
        self.save_stage(name, *state())
        print("stage", flush=True)
        import time
        time.sleep(600)
context.Context.save_stage_when_due = due
main()
"""


def processes() -> dict[int, tuple[int, str, str]]:
    """Every process: its parent, its state and what it is called (Linux and macOS)."""
    words = ["ps", "-A", "-o", "pid=,ppid=,stat=,args="]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [[*line.split(None, 3), ""][:4] for line in lines]
    return {int(pid): (int(parent), state, name) for pid, parent, state, name in rows}


def descendants(pid: int) -> dict[int, str]:
    """What this process started, what that started, and so on."""
    now, found = processes(), [pid]
    for known in found:
        found += [child for child, (parent, _, _) in now.items() if parent == known]
    return {child: now[child][2] for child in found[1:]}


def gone(pids: Iterable[int], seconds: float = 200) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not [pid for pid, (_, state, _) in processes().items() if pid in pids and "Z" not in state]:
            return True
        time.sleep(0.2)
    return False


@pytest.mark.slow
@CLUSTERS
def test_a_killed_server_leaves_nothing_and_goes_on(fused: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    sites, uploads, expected = fused
    (tmp_path / "federation.toml").write_text(files.federation_text(sites.federation))
    keys.save_private_key(tmp_path / "server.key", sites.server_key)
    (tmp_path / "uploads").mkdir()
    for name, data in uploads.items():
        (tmp_path / "uploads" / f"{name}.safetensors").write_bytes(data)
    words = ["server", "fuse", "uploads", "--key", "server.key", "--engine", "ray", "--workers", "2"]
    words += ["--threads", str(torch.get_num_threads())]
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment(), "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen([sys.executable, "-c", KILLED, *words], **options)
    assert first.stdout is not None and first.stdout.readline() == "stage\n"
    started = descendants(first.pid)
    assert sum("ray::_Worker" in name for name in started.values()) == 2
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    # Ray's two agents hold nothing and take a minute to notice that their parent is gone.
    assert gone([pid for pid, name in started.items() if "Agent" not in name])
    second = subprocess.Popen([sys.executable, "-c", "from fedbicross.cli import main; main()", *words], **options)
    seen: dict[int, str] = {}
    while second.poll() is None:
        seen |= descendants(second.pid)
        time.sleep(0.5)
    assert second.returncode == 0 and sum("ray::" in name for name in seen.values()) >= 2
    assert gone(seen)
    found = {path.stem: path.read_bytes() for path in (tmp_path / "replies").iterdir()}
    assert found == expected


# --- workers ---------------------------------------------------------------------------------------------------


class Alone:
    """What is shared: a number of items."""

    def __init__(self, count: int) -> None:
        self.count = count

    def on(self, device: str) -> Alone:
        return self


@pytest.mark.slow
def test_a_worker_waits_when_nobody_takes_what_it_made(ray: Any, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

    def counted(shared: Alone, tensors: dict[str, torch.Tensor], log: str, size: int = 1) -> Iterator[torch.Tensor]:
        for number in range(int(tensors["done"]), shared.count):
            with Path(log).open("a") as file:
                file.write(".")
            yield torch.full((size,), float(number))

    def unwilling(shared: Alone, tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        raise MethodError("mine", "not today")

    log, large, place = tmp_path / "log", tmp_path / "large", {"done": torch.tensor(3)}
    said: list[str] = []
    with Workers(2, say=said.append) as workers:
        assert workers.begin(most=5) == 2
        said.clear()
        for _ in workers.actors:
            with refuses(MethodError, "mine", "not today"):
                list(OnWorker(workers, Alone(1), unwilling, place))
        source = OnWorker(workers, Alone(203), partial(counted, log=str(log)), place)
        items = iter(source)
        assert [float(next(items)) for _ in range(4)] == [3, 4, 5, 6]
        assert int(source.tensors()["done"]) == 7
        while log.stat().st_size <= CHUNK:  # it goes ahead
            time.sleep(0.05)
        time.sleep(1)
        assert log.stat().st_size <= (2 + WAITING) * CHUNK, "but not far"
        half = CHUNK_BYTES // 8  # two floats32 arrays of this many numbers fill a chunk
        big = OnWorker(workers, Alone(9), partial(counted, log=str(large), size=half), {"done": place["done"]})
        next(iter(big))
        time.sleep(1)
        assert large.stat().st_size <= 6, "large items travel in smaller chunks"
        assert [float(next(items)) for _ in range(93)] == list(range(7, 100))
        ray.kill(workers.actors[0])
        assert [float(item) for item in items] == list(range(100, 203)), "the rest is made here"
        assert said == ["a Ray worker is gone; the server makes the rest of its trajectory"]
        actors = workers.actors
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actors[1].ready.remote(), timeout=200)
    assert ray.is_initialized(), "a cluster of others is left alone"


@pytest.mark.slow
def test_workers_that_cannot_be_had(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Workers() as workers:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
        with refuses(ConfigError, "no_workers", r"no machine of the Ray cluster has 99 free cores"):
            workers.begin(2)
        monkeypatch.setattr(torch, "get_num_threads", lambda: -1.5)
        monkeypatch.setattr(workers, "_connect", lambda most, threads: 1)
        with refuses(ConfigError, "no_workers", "a Ray worker cannot start"):
            workers.begin(1)


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers() if pytest.importorskip("ray") else None
    assert workers is not None

    def init(**options: Any) -> None:
        assert options["address"] == "somewhere:1"
        raise ConnectionError("nobody there\nmore lines")

    monkeypatch.setenv("RAY_ADDRESS", "somewhere:1")
    monkeypatch.setattr(workers.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(workers.ray, "init", init)
    with refuses(ConfigError, "no_cluster", r"somewhere:1.*nobody there$"):
        workers.begin(1)


@pytest.mark.slow
def test_without_the_package_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = make_sites()
    uploads = upload_all(sites, tmp_path / "sites")
    monkeypatch.setitem(sys.modules, "ray", None)
    with refuses(ConfigError, "no_ray", r"fedbicross\[ray\]"):
        with_ray(sites, uploads, tmp_path / "work", Said())
    assert not (tmp_path / "work" / "fusion.json").exists()
    assert len(sites.fuse(uploads, tmp_path / "work")) == 3, "the local engine does not need it"


def test_a_method_without_trajectories_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    sites, said = make_sites(), Said()
    monkeypatch.setattr(Workers, "_connect", lambda *args: pytest.fail("no cluster is needed"))
    assert len(with_ray(sites, upload_all(sites, tmp_path / "sites"), tmp_path / "work", said)) == 3
    assert "note: nothing was spread: this fedavg makes no trajectories" in said.lines


def test_workers_are_for_ray() -> None:
    outcome = call("server", "fuse", "uploads", "--key", "server.key", "--workers", "2")
    assert outcome.code == 2 and "error[engine]: --workers is for --engine ray" in outcome.err


@pytest.mark.slow
def test_the_local_engine_never_imports_ray() -> None:
    probe = "import sys, fedbicross.cli.server, fedbicross.methods.fedisca, fedbicross.steps.trajectory"
    done = subprocess.run(
        [sys.executable, "-c", f"{probe}; print('ray' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_moving_keeps_the_shape_of_things() -> None:
    Pair = namedtuple("Pair", "left right")
    value = {"a": (Pair(torch.ones(2), 3.0), None), "b": torch.zeros(())}
    found = map_leaves(value, to("meta"))
    assert type(found["a"][0]) is Pair and found["a"][0].left.is_meta and found["b"].is_meta
    assert found["a"][0].right == 3.0 and found["a"][1] is None
    assert size((Pair(torch.ones(2), 3.0), (torch.ones(3, dtype=torch.int64), "x"))) == 8 + 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_travels_with_its_layout(dtype: torch.dtype) -> None:
    plain = torch.randn(4, 3, 5, 2).to(dtype)
    cases = [plain, plain.to(memory_format=torch.channels_last), plain[1], plain[0, 0, 0, 0], plain[:0]]
    for tensor in [*cases, torch.ones(1, 3, 1, 2).to(dtype)]:
        found = from_bytes(to_bytes(tensor))
        assert found.dtype == dtype and found.stride() == tensor.stride() and torch.equal(found, tensor)
        assert not found.numel() or found.data_ptr() != tensor.data_ptr()
    skipping = plain[..., ::2]
    assert torch.equal(from_bytes(to_bytes(skipping)), skipping)
    assert to_bytes(0.5) == 0.5 and from_bytes(None) is None
