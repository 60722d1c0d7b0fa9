from __future__ import annotations

import platform
from pathlib import Path

import torch

from fedbicross.runs.environment import processor, versions


def test_versions_name_the_processor_and_its_kernels() -> None:
    found = versions("cpu")
    assert found["cpu"] == processor() != ""
    assert found["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["device"] == "cpu" and found["torch"].startswith(torch.__version__.partition("+")[0])


def test_the_processor_by_name_or_at_least_by_kind(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("vendor_id\t: Some\nmodel name\t: Some  CPU @ 2.0 GHz\nmodel name\t: Some CPU\n")
    assert processor(tmp_path / "cpuinfo") == "Some CPU @ 2.0 GHz"
    (tmp_path / "cpuinfo").write_text("CPU implementer\t: 0x41\n")  # ARM
    assert processor(tmp_path / "cpuinfo") == processor(tmp_path / "absent") != ""
    assert processor(tmp_path / "absent") in (platform.processor(), platform.machine())
