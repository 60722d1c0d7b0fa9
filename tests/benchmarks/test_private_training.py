"""The benchmark of DP-SGD, on drawn cells, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import private_training as bench
from docs import measured
from fedbicross import models


@pytest.mark.slow
def test_every_model_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    monkeypatch.setattr(bench, "PARTITIONS", {"iid": "alike"})
    monkeypatch.setattr(bench, "GATED", ("ensemble:personal",))
    monkeypatch.setattr(bench.private, "clipped_sums", bench.private.clipped_sums)  # what it replaces comes back
    monkeypatch.setattr(sys, "argv", ["private_training", "--quick", "--out", str(tmp_path / "found.json")])
    bench.main()
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert len(found["development"]) == 2
    assert found["chosen"]["8"] in [row["settings"] for row in found["development"]]
    lines = {(line["model"], line["epsilon"]): line for line in bench.summary(found["rows"])}
    assert set(lines) == {(bench.ALONE, None), ("the same with batch norm", None)} | {
        (model, 8.0) for model in (bench.NOISY, *bench.SHARED, "ensemble:personal")
    }
    (tmp_path / "results/privacy").mkdir(parents=True)
    (tmp_path / "found.json").rename(tmp_path / "results/privacy/dp-sgd.json")
    text = measured.private_training("dp-sgd", tmp_path / "docs/page.md", tmp_path)
    assert text.count("\n| `ensemble:personal` | 8 |") == 1 and "the best of 2 on images" in text
    assert measured.private_training("dp-features", tmp_path / "docs/page.md", tmp_path) == "Not measured yet."
    alone = lines[bench.ALONE, None]
    assert alone["sites"] == 5 and alone["matched_better"] == alone["matched_worse"] == 0


def test_heads_on_features_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PARTITIONS", {"iid": "alike"})
    out = tmp_path / "found.json"
    words = ["--quick", "--features", str(tmp_path / "kept"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["private_training", *words])
    bench.main()
    lines = {(line["model"], line["epsilon"]) for line in json.loads(out.read_text(encoding="utf-8"))["summary"]}
    assert lines == {(bench.ALONE, None), (bench.NOISY, 8.0), ("analytic", 8.0), ("analytic:personal", 8.0)}


def test_the_highest_accuracy_is_chosen_for_its_own_epsilon() -> None:
    def row(epsilon: float, lr: float, accuracy: float, loss: float) -> dict[str, object]:
        return {"epsilon": epsilon, "settings": {"lr": lr}, "accuracy": accuracy, "loss": loss}

    rows = [row(1, 0.1, 0.5, 2), row(1, 0.2, 0.6, 3), row(1, 0.3, 0.6, 1), row(8, 0.4, 0.9, 1)]
    assert bench.chosen(rows, 1) == {"lr": 0.3}
    assert bench.chosen(rows, 8) == {"lr": 0.4}


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_a_product_of_matrices(stride: int, float64: None) -> None:
    layer, images = nn.Conv2d(3, 4, 3, stride, 1).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with bench.AsProducts():
        found = layer(images)
    assert torch.allclose(found, layer(images), rtol=1e-12)


def test_sums_by_products_are_those_by_convolutions(float64: None) -> None:
    network = models.build("resnet8_gn", 3, 3, 8).double()
    images, labels = torch.randn(5, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    given = (network, dict(network.named_parameters()), images, labels, 1.0)
    for one, other in zip(bench.sums_by_products(*given)[1], bench._by_convolutions(*given)[1], strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
