"""What is kept of a run of the tests."""

from __future__ import annotations

from pathlib import Path

from benchmarks.suite import told


def test_a_junit_file_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10" time="61.26">'
        '<testcase classname="a" name="b" time="0.1"/></testsuite></testsuites>'
    )
    assert told(file) == {"passed": 4, "failed": 3, "skipped": 3, "seconds": 61.3}
