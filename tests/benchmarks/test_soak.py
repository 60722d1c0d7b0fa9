"""The soak can fail: it tells a traceback, a silent change and a hang from a refusal, and its damage is damage."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import soak
from fedbicross.errors import UploadError
from fedbicross.methods import METHODS
from fedbicross.parts.settings import EncoderConfig


@pytest.mark.parametrize(
    ("ended", "result", "verdict"),
    [
        (soak.Ended(0, "fine"), "right", "same"),
        (soak.Ended(0, "fine"), "other", "silent"),
        (soak.Ended(4, "error[damaged]: rows/x.json"), "right", "refused"),
        (soak.Ended(1, "it broke"), "right", "traceback"),
        (soak.Ended(0, f"{soak.TRACEBACK}: ..."), "right", "traceback"),
        (soak.Ended(-11, ""), "right", "died"),
        (soak.Ended(None, ""), "right", "hang"),
    ],
)
def test_every_end_is_told_apart(ended: soak.Ended, result: str, verdict: str) -> None:
    assert soak.judge(ended, lambda: result, "right") == verdict


def test_a_result_that_is_gone_is_a_silent_failure(tmp_path: Path) -> None:
    assert soak.judge(soak.Ended(0, ""), lambda: (tmp_path / "gone").read_bytes(), b"").startswith("silent")


@pytest.mark.parametrize("how", soak.HOWS)
def test_every_kind_of_damage_changes_the_file(how: str, tmp_path: Path) -> None:
    rng = random.Random(3)
    (tmp_path / "a").mkdir()
    path, other = tmp_path / "a/row.json", tmp_path / "a/other.json"
    path.write_bytes(b'{"accuracy": 0.5, "clients": [1, 2]}')
    other.write_bytes(b"[]")
    before = path.read_bytes()
    assert soak.spoil(tmp_path, "a/row.json", how, rng)
    assert not path.is_file() or path.read_bytes() != before


def test_made_up_manifests_differ_and_are_json() -> None:
    rng, seen = random.Random(0), set()
    for _ in range(1000):
        value = {"num_samples": 3, "extra": {"dim": 4, "encoder": {"digest": "x"}}, "counts": [1, 2]}
        soak.change_json(value, rng)
        seen.add(json.dumps(value))
    assert len(seen) > 100
    assert any('"dim": true' in text for text in seen), "a bool for an int"


def test_a_check_that_breaks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbicross.methods.majority import Majority

    monkeypatch.setattr(soak, "METHODS", {"majority": Majority})
    monkeypatch.setattr(soak, "SENDING_OTHERWISE", ())
    good = soak.fuzz(0.2, random.Random(0))
    assert good["cases"] > 5 and good["tracebacks"] == 0 and good["refused"] > 0

    def breaks(*given: object) -> None:
        raise TypeError("bool is an int")

    monkeypatch.setattr("fedbicross.pipeline.check_upload", breaks)
    bad = soak.fuzz(0.2, random.Random(0))
    assert bad["tracebacks"] > 0 and "TypeError: bool is an int" in bad["failures"][0]

    def refuses(*given: object) -> None:
        raise UploadError("no", "no")

    monkeypatch.setattr("fedbicross.pipeline.check_upload", refuses)
    assert soak.fuzz(0.2, random.Random(0))["accepted"] == 0


def test_methods_on_frozen_features_are_tried_with_the_tiny_encoder() -> None:
    """Another one would have to be downloaded first, and the soak ends before it has begun."""
    sending = {name: cls for name, cls in METHODS.items() if not cls.pools_data}
    on_features = {name for name, cls in sending.items() if issubclass(cls.Config, EncoderConfig)}
    assert on_features and all(soak.TINY[name]["encoder"] == "tiny" for name in on_features)
