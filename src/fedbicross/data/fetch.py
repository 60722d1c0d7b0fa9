"""The only place that touches the network, and only when asked to: download a MedMNIST file, resumably.

Bytes go to ``FILE.part``; only a complete file with the right checksum gets the final name. An interrupted download
keeps its ``.part`` and continues from there next time. The SHA-256 is recorded in ``FILE.sha256`` on first use.

Not by ``pooch``: it checks what it downloads, but cannot continue (1.9), and the largest file here has 13 GB.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbicross.data.catalogue import MEDMNIST_URL, medmnist_info
from fedbicross.errors import ConfigError, DataError

MAX_BYTES = 16 * 2**30  # the largest file of the record has some 13 GB
_BLOCK = 1 << 18

Progress = Callable[[int, int | None], None]


def fetch(
    name: str,
    image_size: int = 28,
    data_dir: Path | str = ".",
    *,
    url: str | None = None,
    md5: str | None = None,
    sha256: str | None = None,
    progress: Progress | None = None,
    timeout: float = 30.0,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Download one dataset file and return its path; a file that is already there is checked, never replaced.

    The published MD5 is required of files from the default address; with another ``url`` only what is passed as
    ``md5`` or ``sha256`` is. ``progress`` is called with (bytes so far, bytes in all or None).
    """
    info = medmnist_info(name, image_size)
    if url is None:
        url = MEDMNIST_URL.format(file=info.file_name(image_size))
        md5 = md5 or info.md5[image_size]
    if not url.startswith(("https://", "http://")):
        raise ConfigError("bad_url", f"only http and https addresses can be fetched, not {url!r}")
    target = Path(data_dir) / info.file_name(image_size)
    try:
        if target.exists():
            if problem := _checksum_problem(target, md5, sha256 or _recorded(target)):
                raise DataError("file_differs", f"{target} exists but {problem}; move it away to download it again")
        else:
            _fetch_new(url, target, md5, sha256, timeout, max_bytes, progress)
        _record(target)
    except OSError as error:
        raise DataError(
            "cannot_write", f"cannot write {target}: {error.strerror}; it will continue if run again"
        ) from error
    return target


def _fetch_new(
    url: str,
    target: Path,
    md5: str | None,
    sha256: str | None,
    timeout: float,
    max_bytes: int,
    progress: Progress | None,
) -> None:
    """Download beside ``target``, check, and only then give the final name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    _download(url, part, target, timeout, max_bytes, progress)
    if problem := _checksum_problem(part, md5, sha256):
        part.unlink()
        raise DataError("bad_checksum", f"the download of {target.name} was deleted: {problem}")
    if not zipfile.is_zipfile(part):
        part.unlink()
        raise DataError("corrupt_file", f"what {url} sent is not an .npz file; it was deleted")
    part.replace(target)


def _download(url: str, part: Path, target: Path, timeout: float, max_bytes: int, progress: Progress | None) -> None:
    """Fill ``part``, continuing where it ends if the server allows."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "fedbicross", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    by_hand = f"download {url} by hand and save it as {target}"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:
            # Nothing is left to send, or the file changed: start again unless it is complete.
            if _total(error.headers.get("Content-Range")) != have:
                part.unlink()
                _download(url, part, target, timeout, max_bytes, progress)
            return
        raise DataError("http_error", f"the server answered {error.code} {error.reason}; {by_hand}") from error
    except (http.client.InvalidURL, ValueError) as error:
        raise ConfigError("bad_url", f"{url!r} is no address ({error})") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        raise DataError("offline", f"{url} cannot be reached ({reason}); {by_hand}") from error
    with response:
        start = _resume_point(response, have)
        total = _expected_size(response, start)
        if total is not None and total > max_bytes:
            raise DataError("too_large", f"{target.name} has {total:,} bytes; the limit is {max_bytes:,}")
        with part.open("r+b" if start else "wb") as stream:
            stream.seek(start)
            done = start
            while done <= max_bytes and (block := _read(response, part, done, total)):
                done += stream.write(block)
                if progress:
                    progress(done, total)
    if done > max_bytes:
        part.unlink()
        raise DataError("too_large", f"{target.name} is larger than the limit of {max_bytes:,} bytes; it was deleted")
    if total is not None and done < total:
        raise _interrupted(part, done, total)


def _read(response: Any, part: Path, done: int, total: int | None) -> bytes:
    """The next block; only the network is to blame here, not the disk."""
    try:
        return bytes(response.read(_BLOCK))
    except (http.client.HTTPException, OSError) as error:
        raise _interrupted(part, done, total) from error


def _interrupted(part: Path, done: int, total: int | None) -> DataError:
    of = "" if total is None else f" of {total:,}"
    return DataError("interrupted", f"the download stopped after {done:,}{of} bytes; run it again to continue {part}")


def _resume_point(response: Any, have: int) -> int:
    """Where the server really starts: ``have`` if it honours Range exactly, else 0."""
    if response.status != 206:
        return 0
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", ""))
    if match and int(match[1]) == have:
        return have
    raise DataError("bad_range", f"the server resumed at the wrong place ({response.headers.get('Content-Range')!r})")


def _expected_size(response: Any, start: int) -> int | None:
    total = _total(response.headers.get("Content-Range")) if response.status == 206 else None
    if total is not None:
        return total
    length = response.headers.get("Content-Length", "")
    return start + int(length) if length.isdecimal() else None


def _total(content_range: str | None) -> int | None:
    match = re.fullmatch(r"bytes .*/(\d+)", content_range or "")
    return int(match[1]) if match else None


def _checksum_problem(path: Path, md5: str | None, sha256: str | None) -> str:
    """A phrase when a checksum differs, empty when all given ones match."""
    for kind, expected in (("md5", md5), ("sha256", sha256)):
        if expected and (found := _hash(path, kind)) != expected.strip().lower():
            return f"its {kind} is {found}, not {expected}"
    return ""


def _hash(path: Path, kind: str) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def _sidecar(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _record(target: Path) -> None:
    """Remember the SHA-256, in the format of ``sha256sum -c``, unless it is already remembered."""
    if not _sidecar(target).exists():
        _sidecar(target).write_text(f"{_hash(target, 'sha256')}  {target.name}\n", encoding="utf-8")


def _recorded(target: Path) -> str | None:
    if not _sidecar(target).exists():
        return None
    words = _sidecar(target).read_text(encoding="utf-8", errors="replace").split()
    return words[0] if words else None
