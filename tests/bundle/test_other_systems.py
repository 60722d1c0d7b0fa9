"""What other systems lack (Windows: links by name, sparse files, modes) is done without, here by taking it away."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedbicross
from fedbicross.bundle import audit, keys, read_file
from fedbicross.errors import ConfigError, RunError, UploadError
from fedbicross.messages import file_name
from fedbicross.runs.store import DiskStore

SOURCE = Path(fedbicross.__file__).parent
# The standard library's for Unix alone, and what `os` and `signal` have there alone.
UNIX_MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
UNIX_CALLS = {"fork", "forkpty", "getuid", "geteuid", "setsid", "killpg", "mkfifo", "uname", "getpgid", "chown"}
UNIX_CALLS |= {"SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM", "alarm", "setitimer", "sched_getaffinity", "statvfs"}
POSIX_ONLY = ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_DIRECTORY", "SEEK_HOLE", "SEEK_DATA", "fchmod")


def test_nothing_is_imported_or_called_that_only_unix_has() -> None:
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        tried = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in node.body}
        for node in ast.walk(tree):
            if id(node) in tried:
                continue  # it may fail there
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & set(UNIX_MODULES), file
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in UNIX_MODULES, file
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = node.attr if node.value.id in ("os", "signal") else None
                asked = f'hasattr(os, "{used}")' in text  # first, whether it is there
                assert used not in UNIX_CALLS or asked, (file, used)


@pytest.mark.slow
def test_everything_imports_where_those_modules_are_missing() -> None:
    hidden = [name for name in UNIX_MODULES if name != "posix"]  # Python itself needs it here
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); import fedbicross.cli.app\n"
        "print(sum(name.startswith('fedbicross') for name in sys.modules))"
    )
    everything = {**os.environ, "EAGER_IMPORT": "1"}  # of lazy_loader: nothing waits until it is used
    done = subprocess.run([sys.executable, "-c", code], env=everything, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150, "modules"


@pytest.fixture
def poorer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in POSIX_ONLY:
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(keys, "POSIX", False)


@pytest.mark.usefixtures("poorer")
def test_files_keys_and_logs_without_what_only_posix_has(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"content")
    assert read_file(file) == b"content"
    key = keys.generate_key()
    keys.save_private_key(tmp_path / "a.key", key)
    (tmp_path / "a.key").chmod(0o644)  # as such a system shows every file
    assert keys.public_text(keys.load_private_key(tmp_path / "a.key")) == keys.public_text(key)
    audit.append(tmp_path / "log", {"what": "test"})
    assert audit.verify(tmp_path / "log").entries == 1


@pytest.mark.usefixtures("poorer")
def test_links_are_refused_there_too(tmp_path: Path) -> None:
    for name, content in (("real.safetensors", b"content"), ("real.log", b"")):
        (tmp_path / name).write_bytes(content)
        (tmp_path / f"link-{name}").symlink_to(tmp_path / name)
    with pytest.raises(UploadError, match="link"):
        read_file(tmp_path / "link-real.safetensors")
    with pytest.raises(ConfigError, match="link"):
        keys.load_private_key(tmp_path / "link-real.safetensors")
    with pytest.raises(RunError, match="link"):
        audit.append(tmp_path / "link-real.log", {"what": "test"})


def test_a_store_counts_links_where_listing_a_folder_does_not(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.save("a", b"one")
    store.save("b", b"one")
    store.drop("a")
    assert store.load("b") == b"one" and len(list((tmp_path / "objects").iterdir())) == 1
    store.drop("b")
    assert not list((tmp_path / "objects").iterdir())


@pytest.mark.parametrize("name", ["con", "NUL", "com1", "aux.site"])
def test_no_file_is_named_like_a_device(name: str) -> None:
    assert file_name(name).startswith("client.") and file_name(name) != file_name(name + "x")
    assert file_name(f"{name.partition('.')[0]}sole") == f"{name.partition('.')[0]}sole"
