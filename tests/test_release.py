"""A release can be made again by anybody, to the same bytes, and checked by its signature."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = [name for name in ("git", "make", "ssh-keygen", "sha256sum") if shutil.which(name) is None]


def run(*command: str | Path, stdin: bytes = b"", cwd: Path = ROOT) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(word) for word in command], cwd=cwd, input=stdin, capture_output=True)


def make(checkout: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """With the environment that runs the tests, as it is: `make` would install the checkout into it."""
    as_they_are = [word for target in (".venv/.ready", "sbom") for word in ("-o", target)]
    return run("make", f"BIN={Path(sys.executable).parent}", *as_they_are, *words, cwd=checkout)


def installed_from() -> str:
    """Where a new process finds the package."""
    where = "import importlib.util; print(importlib.util.find_spec('fedbicross').origin)"
    return run(sys.executable, "-c", where, cwd=Path(sys.prefix)).stdout.decode()


@pytest.mark.slow
@pytest.mark.skipif(bool(NEEDED) or not (ROOT / ".git").exists(), reason="needs git, make, ssh-keygen, and a checkout")
def test_a_release_is_the_same_wherever_it_is_built_and_says_who_made_it(tmp_path: Path) -> None:
    key, signers = tmp_path / "key", tmp_path / "signers"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key)
    signers.write_text("releases " + key.with_suffix(".pub").read_text(encoding="ascii"), encoding="ascii")
    sums, before = [], installed_from()
    for number in range(2):
        checkout = tmp_path / f"checkout-{number}"
        assert run("git", "clone", "-q", ROOT, checkout).returncode == 0
        (checkout / "src" / "fedbicross" / "not_committed.py").write_text(f"NUMBER = {number}\n", encoding="utf-8")
        (checkout / "sbom.json").write_text("{}", encoding="utf-8")  # which needs an index
        done = make(checkout, "release", f"KEY={key}")
        assert done.returncode == 0, done.stderr.decode()
        sums.append((checkout / "dist" / "SHA256SUMS").read_bytes())
    assert sums[0] == sums[1]
    assert installed_from() == before and not (checkout / ".venv").exists()

    dist = tmp_path / "checkout-0" / "dist"
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert {line.split()[1].decode() for line in sums[0].splitlines()} == {wheel.name, source.name, "sbom.json"}
    assert run("sha256sum", "-c", "SHA256SUMS", cwd=dist).returncode == 0
    names = zipfile.ZipFile(wheel).namelist()
    assert "fedbicross/disclosure/templates/statement.html.j2" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/")) or "not_committed" in name]
    with tarfile.open(source) as files:
        assert any(name.endswith("/requirements.lock") for name in files.getnames())

    verify = ("ssh-keygen", "-Y", "verify", "-f", signers, "-I", "releases", "-n", "fedbicross", "-s")
    signature = dist / "SHA256SUMS.sig"
    assert run(*verify, signature, stdin=sums[0]).returncode == 0
    assert run(*verify, signature, stdin=sums[0].replace(b"a", b"b", 1)).returncode != 0


@pytest.mark.skipif("make" in NEEDED, reason="needs make")
def test_a_release_without_a_key_is_refused() -> None:
    done = make(ROOT, "release", "KEY=")
    assert done.returncode == 2 and b"make release KEY=" in done.stderr
