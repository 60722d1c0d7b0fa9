"""The same run under other kernels: each setting in its own process, once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import kernels


def test_every_setting_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, calls = tmp_path / "kernels.json", list[tuple[list[str], str | None]]()

    def run(words: list[str], env: dict[str, str], **more: Any) -> SimpleNamespace:
        calls.append((words[-2:], env.get("ATEN_CPU_CAPABILITY")))
        found = {"rows": [], "rows_sha256": "0" * 64, "versions": {"cpu_capability": "AVX2"}}
        return SimpleNamespace(stdout=json.dumps(found))

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(kernels.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["kernels", "--seeds", "3", "--out", str(out)])
    kernels.main()
    once = [(["2", "3"], None), (["2", "3"], None), (["1", "3"], None), (["2", "3"], "avx2"), (["2", "3"], "default")]
    assert calls == once
    kernels.main()
    assert len(calls) == 5, "nothing is left to do"
    monkeypatch.setitem(kernels.RUN, "clients", 3)
    kernels.main()
    assert len(calls) == 10 and len(json.loads(out.read_text())["runs"]) == 5, "another run: all of it anew"
