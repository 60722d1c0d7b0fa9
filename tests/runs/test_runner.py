from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbicross
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Silent
from fedbicross.data import Dataset
from fedbicross.errors import FedBiCrossError, RunError
from fedbicross.report import write_report
from fedbicross.runs import runner
from fedbicross.runs.config import RunConfig, load_config
from fedbicross.runs.store import DiskStore
from small import later

TINY: dict[str, Any] = {
    "model": "resnet8",
    "clients": 3,
    "data": {"name": "cells", "train_size": 120, "test_size": 60, "image_size": 16},
    "training": {"recipe": "modern", "epochs": 1, "batch_size": 32},
    "partition": {"alpha": 0.5},
    "methods": ["fedavg", "ensemble:class_weighted"],
    "device": "cpu",
}


def tiny(**more: Any) -> RunConfig:
    return load_config(flags={**TINY, **more})


def timeless(results: dict[str, Any]) -> str:
    return canonical_json([{k: v for k, v in row.items() if not k.startswith("seconds")} for row in results["rows"]])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "tiny"
    return out, runner.run(tiny(), out)


def test_folder_and_schema(finished: tuple[Path, dict[str, Any]]) -> None:
    out, results = finished
    for name in ("config.toml", "partition.json", "uploads", "replies", "models", "events.jsonl", "results.json"):
        assert (out / name).exists(), name
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    assert results["schema"] == 1
    assert results["complete"]
    methods = [row["method"] for row in results["rows"]]
    assert methods == ["majority", "local_only", "ensemble", "centralised", "fedavg", "ensemble:class_weighted"]
    for row in results["rows"]:
        assert set(row["accuracy"]) == {"global", "matched", "label_set"}
        assert all(0 <= value <= 1 for value in row["accuracy"].values())
        assert row["seconds"] >= 0
        assert row["num_clients"] == len(row["clients"]) == 3
        assert isinstance(row["harmed_clients"], int)
    by_name = {row["method"]: row for row in results["rows"]}
    assert by_name["local_only"]["upload_bytes"] == by_name["majority"]["reply_bytes"] == 0
    assert by_name["local_only"]["harmed_clients"] == 0
    assert by_name["fedavg"]["upload_bytes"] > 3 * 4 * 78_000
    assert by_name["ensemble"]["reply_bytes"] > 2 * by_name["fedavg"]["reply_bytes"]
    assert by_name["centralised"]["role"] == "upper_bound"
    assert by_name["fedavg"]["client_flops"] == by_name["local_only"]["client_flops"] > 0
    assert set(results["training"]["0"]) == {"client-0", "client-1", "client-2"}
    assert sum(client["num_samples"] for client in results["clients"]["0"]) == 120


def test_same_seed_same_rows_and_in_memory_too(finished: tuple[Path, dict[str, Any]]) -> None:
    again = runner.run(tiny())
    assert timeless(again) == timeless(finished[1])
    assert again["rows_sha256"] == finished[1]["rows_sha256"]
    assert timeless(runner.run(tiny(seeds=[1]))) != timeless(again)


def test_order_of_methods_and_company_change_no_row(finished: tuple[Path, dict[str, Any]]) -> None:
    alone = runner.run(tiny(methods=["fedavg"], baselines=["local_only"]))
    row = next(row for row in alone["rows"] if row["method"] == "fedavg")
    other = next(row for row in finished[1]["rows"] if row["method"] == "fedavg")
    assert timeless({"rows": [row]}) == timeless({"rows": [other]})


def test_without_a_network_of_its_own_a_client_is_compared_with_its_head_on_the_frozen_encoder() -> None:
    tables = {name: {"encoder": "tiny"} for name in ("local_head", "fedcgs")}
    tables["local_head"]["epochs_classifier"] = 1
    rows = runner.run(tiny(methods=["fedcgs"], baselines=["local_head"], method=tables))["rows"]
    head, other = sorted(rows, key=lambda row: row["method"] != "local_head")
    assert head["harmed_clients"] == 0
    assert other["harmed_clients"] == sum(
        ours["accuracy"]["matched"] < own["accuracy"]["matched"]
        for ours, own in zip(other["clients"], head["clients"], strict=True)
    )


@pytest.fixture(scope="module")
def two_ways(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "two"
    config = tiny(methods=["fedavg", "ensemble:consensus"], baselines=["local_only"], seeds=[0, 1], clients=2)
    return out, runner.run(config, out)


def test_all_rows_are_measured_against_the_better_way_of_training_alone(
    two_ways: tuple[Path, dict[str, Any]],
) -> None:
    for seed in (0, 1):
        rows = {row["method"]: row for row in two_ways[1]["rows"] if row["seed"] == seed}
        assert list(rows) == ["local_only", "local_only:balanced", "fedavg", "ensemble:consensus"]
        local = [rows["local_only"], rows["local_only:balanced"]]
        best = max(local, key=lambda row: row["accuracy"]["matched"])
        assert {row["alone"] for row in rows.values()} == {best["method"]}
        assert [row["role"] for row in rows.values()] == ["baseline", "baseline", "method", "method"]
        for row in rows.values():
            for ours, own in zip(row["clients"], best["clients"], strict=True):
                gain, pairs = ours["gain_over_local"]["matched"], ours["against_alone"]
                assert gain == pytest.approx(ours["accuracy"]["matched"] - own["accuracy"]["matched"], abs=1e-12)
                assert pairs["images"] == ours["test_images"]["matched"]
                assert (pairs["won"] - pairs["lost"]) / pairs["images"] == pytest.approx(gain, abs=1e-12)
                assert ours["clearly_harmed"] == (pairs["interval"][1] < 0)
            assert row["clearly_harmed_clients"] <= row["harmed_clients"]
        assert best["harmed_clients"] == best["clearly_harmed_clients"] == 0


@pytest.mark.parametrize("lost", ["rows/seed-0/fedavg.json", "rows/seed-0/local_only.json", "predictions"])
def test_a_resumed_run_finds_the_same_bar(two_ways: tuple[Path, dict[str, Any]], tmp_path: Path, lost: str) -> None:
    out = shutil.copytree(two_ways[0], tmp_path / "copy")
    shutil.rmtree(out / lost) if (out / lost).is_dir() else (out / lost).unlink()
    (out / "rows/seed-1/ensemble+consensus.json").unlink()
    assert timeless(runner.resume(out)) == timeless(two_ways[1])


def test_without_training_alone_nothing_is_compared() -> None:
    row = runner.run(tiny(methods=["fedavg"], baselines=[]))["rows"][0]
    assert row["alone"] is None and row["harmed_clients"] is None and row["clearly_harmed_clients"] is None
    assert all(client["against_alone"] is None for client in row["clients"])


def test_resume_of_a_finished_run_recomputes_nothing(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out = shutil.copytree(finished[0], tmp_path / "copy")
    before = len((out / "events.jsonl").read_text().splitlines())
    assert timeless(runner.resume(out)) == timeless(finished[1])
    assert len((out / "events.jsonl").read_text().splitlines()) == before


@pytest.mark.parametrize("lost", ["predictions", *later("rows", "replies", "models", "uploads", "client_models")])
def test_resume_after_losing_a_stage_gives_the_same_rows(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, lost: str
) -> None:
    out = shutil.copytree(finished[0], tmp_path / "copy")
    shutil.rmtree(out / lost)
    shutil.rmtree(out / "rows", ignore_errors=True)
    assert timeless(runner.resume(out)) == timeless(finished[1])


def test_a_client_model_that_was_deleted_is_made_again(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Without it the results would lack the curves of its training, and not say so."""
    folder, results = finished
    out = tmp_path / "run"
    shutil.copytree(folder, out)
    gone = sorted((out / "client_models").iterdir())[0]
    gone.unlink()
    runner.resume(out)
    assert json.loads((out / "results.json").read_text())["training"] == results["training"] and gone.exists()


def test_a_damaged_file_is_named_not_used(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out = shutil.copytree(finished[0], tmp_path / "copy")
    shutil.rmtree(out / "rows")
    victim = next((out / "models").rglob("client-0.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-5] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(FedBiCrossError):
        runner.resume(out)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("config.toml", b"epochs = 1", b"epochs = 300"),
        ("rows/seed-0/fedavg.json", b'"accuracy":{"global":0', b'"accuracy":{"global":1'),
        ("results.json", b'"accuracy": {', b'"accurasy": {'),
    ],
)
def test_what_was_edited_is_not_published(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, name: str, old: bytes, new: bytes
) -> None:
    """Settings edited after the run would stand over accuracies that were never measured with them."""
    out = shutil.copytree(finished[0], tmp_path / "copy")
    text = (out / name).read_bytes()
    assert old in text
    (out / name).write_bytes(text.replace(old, new))
    for publish in (write_report, *([] if name == "results.json" else [runner.resume])):
        with pytest.raises(RunError, match=name) as caught:
            publish(out)
        assert caught.value.code == "damaged"
    if name == "results.json":
        assert timeless(runner.resume(out)) == timeless(finished[1]), "made again from the rows"
        write_report(out)


def test_a_run_of_an_earlier_version_says_that_it_cannot_be_checked(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out = shutil.copytree(finished[0], tmp_path / "copy")
    (out / "SHA256SUMS").unlink()
    with pytest.raises(RunError, match="earlier version") as caught:
        runner.resume(out)
    assert caught.value.code == "no_digests"
    write_report(out)  # from the results alone, whose rows carry their digest
    results = (out / "results.json").read_text()
    (out / "results.json").write_text(results.replace('"harmed_clients": 0', '"harmed_clients": 1', 1))
    with pytest.raises(RunError) as caught:
        write_report(out)
    assert caught.value.code == "results_changed"


def test_a_row_under_another_name_is_refused(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out = shutil.copytree(finished[0], tmp_path / "copy")
    row = (out / "rows/seed-0/fedavg.json").read_bytes()
    (out / "rows/seed-0/ensemble.json").write_bytes(row)
    with pytest.raises(RunError, match=r"rows/seed-0/ensemble.json"):
        runner.resume(out)
    DiskStore(out).save("rows/seed-0/ensemble.json", row)
    with pytest.raises(RunError, match="another method"):
        runner.resume(out)


@pytest.mark.parametrize("name", ["upload/seed-0/fedavg/client-1", "fuse/seed-0/fedavg/server"])
def test_a_record_that_vanished_is_named(finished: tuple[Path, dict[str, Any]], tmp_path: Path, name: str) -> None:
    """Nothing would make it again, and costs, warnings and curves would be other ones."""
    out = shutil.copytree(finished[0], tmp_path / "copy")
    (out / f"records/{name}.json").unlink()
    with pytest.raises(RunError, match=f"records/{name}.json is missing"):
        runner.resume(out)


def test_times_are_those_of_the_first_run_even_if_the_log_is_lost(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out = shutil.copytree(finished[0], tmp_path / "copy")
    (out / "events.jsonl").unlink()
    again = {row["method"]: row["seconds_by_stage"] for row in runner.resume(out)["rows"]}
    assert again == {row["method"]: row["seconds_by_stage"] for row in finished[1]["rows"]}


def test_several_seeds_give_several_rows_and_fixed_seeds_share_models() -> None:
    config = tiny(
        seeds=[0, 1],
        baselines=["local_only"],
        methods=[],
        partition={"alpha": 0.5, "seed": 7},
        training={**TINY["training"], "seed": 7},
    )
    results = runner.run(config)
    assert [(row["method"], row["seed"]) for row in results["rows"]] == [("local_only", 0), ("local_only", 1)]
    first, second = ({**row, "seed": None} for row in results["rows"])
    assert timeless({"rows": [first]}) == timeless({"rows": [second]})


def test_a_saved_partition_is_reused(finished: tuple[Path, dict[str, Any]]) -> None:
    out, results = finished
    config = tiny(partition={"alpha": 9.0, "file": str(out / "partition.json")})
    assert timeless(runner.run(config)) == timeless(results)


def test_refusals_before_anything_is_written(tmp_path: Path, finished: tuple[Path, dict[str, Any]]) -> None:
    cases: dict[str, Any] = {
        "more clients than samples": tiny(clients=500),
        "no gpu": tiny(device="cuda"),
    }
    for name, config in cases.items():
        with pytest.raises(FedBiCrossError):
            runner.run(config, tmp_path / "never")
        assert not (tmp_path / "never").exists(), name
    with pytest.raises(RunError, match="resume"):
        runner.run(tiny(), finished[0])
    with pytest.raises(RunError) as caught:
        runner.resume(tmp_path)
    assert caught.value.code == "not_a_run"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(RunError):
        runner.run(tiny(), tmp_path / "mine", replace=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    assert [p.name for p in (tmp_path / "mine").iterdir()] in (
        ["thesis.txt"],
        [".lock", "thesis.txt"],
        ["thesis.txt", ".lock"],
    )


def test_changed_data_are_noticed(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out = shutil.copytree(finished[0], tmp_path / "copy")
    text = (out / "config.toml").read_text().replace("train_size = 120", "train_size = 121")
    DiskStore(out).write("config.toml", text.encode())
    with pytest.raises(RunError, match="not those"):
        runner.resume(out)


def test_arrays_from_python_and_a_client_without_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (40, 12, 12, 3)).astype(np.uint8)
    labels = rng.integers(0, 2, 40)
    dataset = Dataset.from_arrays("mine", images[10:], labels[10:], images[:10], labels[:10])
    results = fedbicross.run(
        dataset,
        model="resnet8",
        clients=2,
        methods=["fedavg"],
        baselines=["local_only"],
        training={"epochs": 1},
        out=tmp_path / "mine",
    )
    assert results["dataset"]["name"] == "mine"
    assert (tmp_path / "mine" / "report.html").exists()
    with pytest.raises(RunError, match="pass the same dataset"):
        runner.resume(tmp_path / "mine")
    assert timeless(fedbicross.resume(tmp_path / "mine", dataset=dataset)) == timeless(results)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 100])
def test_one_and_a_hundred_clients(clients: int) -> None:
    data = {**TINY["data"], "train_size": 200, "test_size": 20, "image_size": 8}
    config = tiny(clients=clients, data=data, methods=["ensemble:class_weighted", "fedavg"], baselines=["local_only"])
    for row in runner.run(config)["rows"]:
        assert all(value is not None and np.isfinite(value) for value in row["accuracy"].values())
        assert row["num_clients"] == clients


SHOTS = {"steps": 2, "batch": 6, "epochs": 1, "memory": 2, "steps_distil": 2, "noise_images": 10}
FEW = {"fedisca": {k: SHOTS[k] for k in ("steps", "batch", "epochs")}, "e_fedisca": SHOTS}


@pytest.mark.slow
def test_accuracy_after_every_shot_is_kept_and_nothing_is_chosen_by_it(tmp_path: Path) -> None:
    config = tiny(
        methods=["fedisca:two_shots", "e_fedisca", "fedavg:multi_round"],
        baselines=["local_only"],
        method={**FEW, "fedavg:multi_round": {"rounds": 3}},
    )
    results = runner.run(config, tmp_path / "out")
    rows = {row["method"]: row for row in results["rows"]}
    for spec, rounds in (("fedisca:two_shots", 2), ("fedavg:multi_round", 3)):
        by_round = rows[spec]["accuracy_by_round"]
        assert [entry["round"] for entry in by_round] == list(range(1, rounds + 1))
        assert by_round[-1]["accuracy"] == pytest.approx(rows[spec]["accuracy"]), "the row is that of the last round"
        assert rows[spec]["rounds"] == rounds
    assert rows["e_fedisca"]["accuracy_by_round"] == rows["local_only"]["accuracy_by_round"] == []
    two = rows["fedisca:two_shots"]
    assert two["upload_bytes"] > 2 * 3 * 4 * 78_000 and two["client_flops"] == 2 * rows["local_only"]["client_flops"]
    assert two["seconds_by_stage"]["local_training"] > 0, "the first shot's, though only the last one's files are left"
    write_report(tmp_path / "out")
    assert "After each round" in (tmp_path / "out" / "report.html").read_text()
    first = {p: by_round[0]["accuracy"][p] for p in by_round[0]["accuracy"]}
    alone = runner.run(tiny(methods=["fedavg:multi_round"], baselines=[], method={"fedavg:multi_round": {"rounds": 3}}))
    assert alone["rows"][0]["accuracy_by_round"][0]["accuracy"] == first
    shutil.rmtree(tmp_path / "out" / "rows")
    shutil.rmtree(tmp_path / "out" / "models")
    assert timeless(runner.resume(tmp_path / "out")) == timeless(results)


@pytest.mark.slow
def test_a_run_of_mixed_architectures(tmp_path: Path) -> None:
    config = tiny(
        client_models=["wrn16_2", "vgg8_bn"],
        methods=["fedisca", "fedbicross"],
        method={"fedisca": FEW["fedisca"], "fedbicross": {"steps": 2, "batch": 6, "probes": 4, "epochs_personal": 1}},
    )
    results = runner.run(config, tmp_path / "out")
    own = {"client-0": "wrn16_2", "client-1": "vgg8", "client-2": "wrn16_2"}
    assert {entry["client"]: entry["model"] for entry in results["clients"]["0"]} == own
    assert {client: entry["model"] for client, entry in results["training"]["0"].items()} == own
    for row in results["rows"]:
        assert {client["client"]: client["model"] for client in row["clients"]} == own
        assert all(value is not None and np.isfinite(value) for value in row["accuracy"].values())
    sizes = {client["client"]: client["upload_bytes"] for client in results["rows"][-1]["clients"]}
    assert sizes["client-1"] > 15_000_000 > 3_000_000 > sizes["client-0"] > 2_000_000
    write_report(tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Architectures differ. wrn16_2: client-0, client-2; vgg8: client-1." in page
    assert "resnet8; clients also vgg8, wrn16_2" in page


def test_more_architectures_than_sites_in_the_data_are_refused(tmp_path: Path) -> None:
    """Where the data bring their own clients, how many there are is known only now."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (40, 8, 8, 3)).astype(np.uint8), rng.integers(0, 2, 40)
    sites = np.array(["north", "south"])[np.arange(40) % 2]
    dataset = Dataset.from_arrays("mine", images[10:], labels[10:], images[:10], labels[:10], train_sites=sites[10:])
    config = load_config(
        flags={
            "data": {"name": "python:mine"},
            "model": "resnet8",
            "client_models": ["resnet8", "vgg8", "wrn16_2"],
            "partition": {"kind": "natural"},
            "methods": ["ensemble"],
        }
    )
    with pytest.raises(FedBiCrossError, match="3 architectures for 2 clients"):
        runner.run(config, tmp_path / "never", dataset=dataset)
    assert not (tmp_path / "never").exists()


def test_what_was_read_and_what_is_odd_about_it_is_said_first() -> None:
    said: list[str] = []

    class Heard(Silent):
        def say(self, message: str) -> None:
            said.append(message)

    rng = np.random.default_rng(0)
    images, labels = rng.integers(256, size=(60, 8, 8, 3), dtype=np.uint8), np.arange(60) % 2
    images[2] = images[0]  # a copy
    data = Dataset.from_arrays("mine", images[:40], labels[:40], images[40:], labels[40:], classes=["north", "south"])
    config = tiny(data={"name": "python:mine"}, methods=["majority"], baselines=[], clients=1)
    runner.run(config, dataset=data, progress=Heard())
    assert said[0].startswith("data: mine, 40 images to train on and 20 to test on, 2 classes: north, south")
    assert said[1].startswith("warning: 1 training image ") and said[2].startswith("== majority")


def test_days_of_work_on_a_processor_are_announced_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Heard(Silent):
        def say(self, message: str) -> None:
            said.append(message)

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_Seed", stop)
        for settings in ({"model": "resnet18", "training": {"recipe": "paper", "epochs": 100}}, {}):
            data = {"name": "cells", "image_size": 28, "train_size": 2000, "test_size": 60}
            with pytest.raises(KeyboardInterrupt):
                runner.run(tiny(**{"data": data, **settings}), progress=Heard())
            patch.setattr(runner, "PATIENCE", 600.0)
    (warning,) = [line for line in said if not line.startswith("data: ")]
    assert warning.startswith("warning: training resnet18 for 100 epochs on 2,000 images is ")
    assert "on a CPU (at least " in warning and "--quick" in warning
