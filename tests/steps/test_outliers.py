from __future__ import annotations

import math
import statistics

import pytest
import torch

from fedbicross.steps import outliers

from .tiny import noise


def others(values: list[float], i: int) -> float:
    return statistics.median(values[:i] + values[i + 1 :])


@pytest.mark.parametrize("count", [2, 3, 4, 7, 20])
def test_everybody_is_measured_by_the_others_only(count: int) -> None:
    sizes = noise(count, 3, seed=count).abs().double() + 0.1
    logs = sizes.log()
    slow = [[row[k] - others(logs[:, k].tolist(), i) for k in range(3)] for i, row in enumerate(logs.tolist())]
    assert outliers.larger_than_peers(sizes).tolist() == pytest.approx([math.exp(max(row)) for row in slow])
    assert outliers.apart_from_peers(sizes).tolist() == pytest.approx([math.exp(max(map(abs, row))) for row in slow])


def test_one_liar_among_five_moves_nobody_elses_score_far() -> None:
    honest = torch.tensor([[1.0], [1.2], [0.9], [1.1], [1.0]])
    lied = torch.tensor([[1.0], [1.2], [0.9], [1.1], [1e9]])
    assert float(outliers.larger_than_peers(lied)[4]) > 1e8
    close = outliers.larger_than_peers(lied)[:4], outliers.larger_than_peers(honest)[:4]
    assert torch.allclose(*close, rtol=0.2)


def test_nothing_beside_nothing_is_no_error() -> None:
    assert outliers.larger_than_peers(torch.zeros(3, 2)).tolist() == [1.0] * 3


def test_a_network_that_nobody_trained_has_nothing_of_the_common_start() -> None:
    start = noise(500, seed=1)
    weights = torch.stack([start, start + 0.1 * noise(500, seed=2), -start, noise(500, seed=3)])
    slow = [float((row * start).sum() / row.norm() / start.norm()) for row in weights.double()]
    found = outliers.cosines(weights, start)
    assert found.tolist() == pytest.approx(slow, abs=1e-6)
    assert found[0] > 0.999 and found[1] > 0.9 and found[2] < -0.999 and abs(found[3]) < 0.2


def slow_agreement(logits: torch.Tensor, known: torch.Tensor, least: int) -> list[float]:
    z = logits.double().clone()
    count, _, classes = z.shape
    for i in range(count):
        z[i] = z[i] - z[i].mean(1)[:, None]
        z[i] = z[i] - z[i].mean(0)[None]
    out = []
    for i in range(count):
        each = []
        for c in range(classes):
            peers = [z[j, :, c] / z[j, :, c].norm() for j in range(count) if j != i and known[j, c]]
            if known[i, c] and peers:
                mean = sum(peers) / len(peers)
                each.append(float((z[i, :, c] * mean).sum() / z[i, :, c].norm() / mean.norm()))
        out.append(sum(each) / len(each) if len(each) >= least else math.nan)
    return out


@pytest.mark.parametrize("least", [1, 3])
def test_agreement_is_about_shared_classes_only(least: int) -> None:
    logits = noise(4, 9, 5, seed=4)
    known = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
    found = outliers.agreement(logits, known, least).tolist()
    assert found == pytest.approx(slow_agreement(logits, known, least), nan_ok=True)
    assert math.isnan(found[3]), "it shares none"


def test_agreement_sees_neither_scale_nor_bias() -> None:
    logits, known = noise(3, 8, 4, seed=5), torch.ones(3, 4).bool()
    louder = logits.clone()
    louder[1] = 1000 * louder[1] + torch.tensor([0.0, 50.0, 0.0, 0.0])
    plain, found = (outliers.agreement(given, known, 1) for given in (logits, louder))
    assert found.tolist() == pytest.approx(plain.tolist(), abs=1e-4)
    turned = logits.clone()
    turned[1] = -turned[1]
    assert float(outliers.agreement(turned, known, 1)[1]) == pytest.approx(-float(plain[1]))


def test_constant_answers_agree_with_nothing_and_are_no_error() -> None:
    logits = noise(3, 8, 4, seed=6)
    logits[2] = 1.0
    assert outliers.agreement(logits, torch.ones(3, 4).bool(), 1)[2] == 0


def test_a_cap_binds_only_who_claims_too_much() -> None:
    assert outliers.capped(torch.tensor([40.0, 40.0, 60.0, 16000.0]), 20).tolist() == pytest.approx([1, 1, 1, 0.05])
    assert outliers.capped(torch.tensor([40.0, 40.0, 60.0, 700.0]), 20).tolist() == [1.0] * 4
