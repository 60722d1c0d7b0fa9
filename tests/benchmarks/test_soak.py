"""The soak can fail: it tells a traceback, a silent change and a hang from a refusal, and its damage is damage."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks import soak
from fedbicross.bundle import pack
from fedbicross.errors import UploadError
from fedbicross.messages import Reply
from fedbicross.methods import METHODS
from fedbicross.parts.settings import EncoderConfig

EMPTY_REPLY = {"client": None, "run_id": None, "agreement": None, "info": {}}


@pytest.mark.parametrize(
    ("ended", "result", "verdict"),
    [
        (soak.Ended(0, "fine"), "right", "same"),
        (soak.Ended(0, "fine"), "other", "silent"),
        (soak.Ended(4, "error[damaged]: rows/x.json"), "right", "refused"),
        (soak.Ended(5, "north.safetensors | refused, signature: it does not fit"), "right", "refused"),
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
    monkeypatch.setattr(soak, "FUSING_OTHERWISE", ())
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


@pytest.fixture
def only_fedcgs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "METHODS", {"fedcgs": METHODS["fedcgs"]})
    monkeypatch.setattr(soak, "SENDING_OTHERWISE", ())
    monkeypatch.setattr(soak, "FUSING_OTHERWISE", ())


@pytest.mark.usefixtures("only_fedcgs")
def test_a_fusion_is_fused_refused_or_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = soak.honest_uploads()["fedcgs"]

    def one_fusion() -> tuple[str, str]:
        return soak.fusion(soak.tiny("fedcgs"), uploads)

    assert one_fusion() == ("", "")
    with monkeypatch.context() as patched:
        patched.setattr(METHODS["fedcgs"], "fuse", lambda *given: [Reply({"w": torch.full((2,), torch.nan)})] * 3)
        assert one_fusion() == ("non_finite", ""), "it is not packed"
        patched.setattr(Reply, "pack", lambda self: pack("reply", self.tensors, EMPTY_REPLY, finite=False))
        assert one_fusion() == ("", "'w' in a reply is not finite")
    monkeypatch.setattr(METHODS["fedcgs"], "fuse", lambda *given: 1 / 0)
    assert one_fusion() == ("", "ZeroDivisionError: division by zero")


@pytest.mark.usefixtures("only_fedcgs")
def test_what_the_door_lets_in_is_fused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CONFUSED", ("x", 1))
    found = soak.fuzz(0.5, random.Random(0))
    assert found["fused"] > 0 and found["fusion_failures"] == 0
    assert found["fused"] + found["refused_at_fusion"] <= found["accepted"]
    assert sum(found["fusion_codes"].values()) == found["refused_at_fusion"]
    monkeypatch.setattr(METHODS["fedcgs"], "fuse", lambda *given: 1 / 0)
    found = soak.fuzz(0.5, random.Random(0))
    assert found["fusion_failures"] == len(found["failures"]) > 0 == found["fused"]
    assert "at the fusion: ZeroDivisionError" in found["failures"][0]


def test_the_specs_that_are_fused_cover_sums_features_and_networks() -> None:
    specs = [*METHODS, *soak.SENDING_OTHERWISE, *soak.FUSING_OTHERWISE]
    fused = {spec for spec in specs if spec.partition(":")[0] in soak.FUSED}
    assert {"fedavg", "ensemble:class_weighted", "fedcgs:private", "analytic:private", "fedpft"} <= fused
    assert all(soak.tiny(spec).name for spec in fused), "the table of settings holds nothing that they refuse"


def test_what_only_the_last_net_of_the_door_catches_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: object, upload: object) -> None:
        raise TypeError("bool is an int")

    monkeypatch.setattr(METHODS["majority"], "check_upload", breaks)
    monkeypatch.setattr(soak, "METHODS", {"majority": METHODS["majority"]})
    monkeypatch.setattr(soak, "SENDING_OTHERWISE", ())
    monkeypatch.setattr(soak, "FUSING_OTHERWISE", ())
    found = soak.fuzz(0.2, random.Random(0))
    assert found["tracebacks"] > 0 and "error[unexpected]" in found["failures"][0]


def test_the_verbs_of_an_exchange_are_killed_and_what_they_read_is_damaged() -> None:
    names = {verb.name for verb in soak.VERBS}
    assert names >= {"federation init", "audit upload", "export", "client join, to the upload", "server verify"}
    assert names - {verb.name for verb in soak.VERBS if verb.reads} == {"run", "client keygen"}, "they read no file"


def test_files_that_are_read_are_named_by_folder_or_by_name(tmp_path: Path) -> None:
    (tmp_path / "work/objects").mkdir(parents=True)
    for name in ("work/site.json", "work/objects/0965", "work/tables", "federation.toml"):
        (tmp_path / name).write_bytes(b"x")
    assert soak.victims(tmp_path, "work") == ["work/site.json"]
    assert soak.victims(tmp_path, "federation.toml") == ["federation.toml"]


def test_an_upload_that_is_gone_and_named_is_not_silent(tmp_path: Path) -> None:
    (tmp_path / "post/uploads").mkdir(parents=True)
    for name in soak.SITES:
        (tmp_path / f"post/uploads/{name}.safetensors").write_bytes(name.encode())
    log, expected = tmp_path / "server.log", soak.UPLOADS(tmp_path)
    verdicts = []
    for said in ("3 of 3 sites, quorum 3; missing: none", "2 of 3 sites, quorum 3; missing: north"):
        log.write_text(said, encoding="utf-8")
        for content in (b"north", b"other"):
            (tmp_path / "post/uploads/north.safetensors").write_bytes(content)
            verdicts.append(soak.judge(soak.Ended(0, said), lambda: soak.verified(tmp_path), expected))
    assert verdicts == ["same", "silent", "refused", "refused"]


@pytest.mark.parametrize(
    ("said", "whole", "counted"),
    [
        ("error[exists]: it is there", True, "refused"),
        ("error[exists]: it is there", False, "bad"),
        ("error[damaged]: it is not", True, "bad"),
    ],
)
def test_after_a_kill_only_a_plain_refusal_over_whole_files_is_allowed(
    said: str, whole: bool, counted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verb = soak.Verb("audit", "north", ("audit",), refuses="exists", kept=lambda scene: whole)
    monkeypatch.setattr(soak, "VERBS", (verb,))
    for folder in ("before/north", "before/post"):
        (tmp_path / folder).mkdir(parents=True)
    scene = soak.Scene(tmp_path, {"audit": tmp_path / "before"}, results={"audit": None}, writes={"audit": 3})
    monkeypatch.setattr(scene, "give", lambda words, folder, at=0: soak.Ended(-9, "") if at else soak.Ended(4, said))
    (row,) = soak.kill(scene, 0.0, random.Random(0))
    assert (row["kills"], row["same"], row[counted]) == (1, 0, 1) and row["refused"] + row["bad"] == 1
    assert len(row["failures"]) == row["bad"]


def test_the_fingerprint_of_a_scene_stands_in_its_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(soak, "call", lambda words, folder, at: soak.Ended(0, " ".join(words)))
    ended = soak.Scene(tmp_path, fingerprint="dead beef").give(soak.JOIN, tmp_path)
    assert ended.said.endswith("--fingerprint dead beef")
