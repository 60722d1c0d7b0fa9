from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, x25519

from fedbicross.bundle import keys
from fedbicross.errors import ConfigError
from small import refuses

P = 2**255 - 19
D = -121665 * pow(121666, P - 2, P) % P
Point = tuple[int, int]


def refused(code: str, work: object, *args: object) -> None:
    with refuses(ConfigError, code) as caught:
        work(*args)  # type: ignore[operator]
    assert "\n" not in caught.value.args[0]


def test_round_trip(tmp_path: Path) -> None:
    key, path = keys.generate_key(), tmp_path / "site.key"
    keys.save_private_key(path, key)
    again = keys.load_private_key(path)
    assert again.private_bytes_raw() == key.private_bytes_raw()
    assert keys.public_text(again) == keys.public_text(key.public_key()) == keys.public_text(key)
    assert keys.public_text(keys.parse_public(keys.public_text(key))) == keys.public_text(key)
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_only_the_owner_can_read_it_whatever_the_umask(mask: int, tmp_path: Path) -> None:
    path = tmp_path / "site.key"
    old = os.umask(mask)
    try:
        keys.save_private_key(path, keys.generate_key())
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_private_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between creation and writing nobody else can open it: mode 0600 is given to open itself."""
    modes, real = [], os.open

    def watched(path: object, flags: int, mode: int = 0o777, **options: object) -> int:
        modes.append((bool(flags & os.O_EXCL), mode))
        return real(path, flags, mode)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", watched)
    keys.save_private_key(tmp_path / "site.key", keys.generate_key())
    assert modes == [(True, 0o600)]


def test_a_public_key_in_the_private_ones_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "site.pub").write_text(keys.public_text(keys.generate_key()) + "\n")
    with refuses(ConfigError, "key_file", "is a public key"):
        keys.load_private_key(tmp_path / "site.pub")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "site.key"
    keys.save_private_key(path, keys.generate_key())
    before = path.read_bytes()
    refused("key_exists", keys.save_private_key, path, keys.generate_key())
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    refused("key_exists", keys.save_private_key, tmp_path / "link", keys.generate_key())
    assert path.read_bytes() == before and not (tmp_path / "absent").exists()
    refused("key_write", keys.save_private_key, tmp_path / "no" / "where", keys.generate_key())


def test_a_full_disk_leaves_no_half_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused("key_write", keys.save_private_key, tmp_path / "site.key", keys.generate_key())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o601, 0o644, 0o777])
def test_keys_that_others_can_reach(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "site.key"
    keys.save_private_key(path, keys.generate_key())
    path.chmod(mode)
    refused("key_permissions", keys.load_private_key, path)


def pem(key: object, password: bytes | None = None) -> bytes:
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)  # type: ignore[attr-defined]
    )


@pytest.mark.timeout(20)
def test_what_is_no_key_file(tmp_path: Path) -> None:
    contents = {
        "empty": b"",
        "text": b"hello",
        "cut": pem(keys.generate_key())[:60],
        "other curve": pem(ec.generate_private_key(ec.SECP256R1())),
        "other use": pem(x25519.X25519PrivateKey.generate()),
        "password": pem(keys.generate_key(), b"secret"),
        "public": keys.generate_key()
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
        "long": pem(keys.generate_key()) + b"\n" * 5000,
        "noise": os.urandom(200),
    }
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        path.chmod(0o600)
        refused("key_file", keys.load_private_key, path)
    good = tmp_path / "good"
    keys.save_private_key(good, keys.generate_key())
    (tmp_path / "link").symlink_to(good)
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name in ("link", "fifo", "folder", "absent"):
        refused("key_file", keys.load_private_key, tmp_path / name)


def test_one_key_has_one_text() -> None:
    text = keys.public_text(keys.generate_key())
    body = text.removeprefix(keys.PREFIX)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    last = letters.index(body[42])  # its two lowest bits encode nothing
    loose = keys.PREFIX + body[:42] + letters[last ^ 1] + "="
    assert base64.b64decode(loose.removeprefix(keys.PREFIX)) == base64.b64decode(body)
    spellings = [
        loose,
        text + "\n",
        " " + text,
        text[:-1],
        text + "=",
        body,
        text.upper(),
        text.replace("=", "%3D"),
        "",
    ]
    for bad in spellings:
        refused("bad_key", keys.parse_public, bad)


def add(a: Point, b: Point) -> Point:
    """Addition on the twisted Edwards curve -x² + y² = 1 + d x² y² (RFC 8032)."""
    (x1, y1), (x2, y2) = a, b
    t = D * x1 * x2 * y1 * y2 % P
    x = (x1 * y2 + x2 * y1) * pow(1 + t, P - 2, P)
    y = (y1 * y2 + x1 * x2) * pow(1 - t, P - 2, P)
    return x % P, y % P


def some_point(y: int) -> Point | None:
    """The curve's point with this y, if there is one."""
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    return (x, y) if (x * x - square) % P == 0 else None


def multiple(point: Point, times: int) -> Point:
    result: Point = (0, 1)
    while times:
        result = add(result, point) if times & 1 else result
        point, times = add(point, point), times >> 1
    return result


def test_every_weak_point_is_refused() -> None:
    """The points whose order divides 8, found by multiplying arbitrary points by the large prime factor."""
    large = 2**252 + 27742317777372353535851937790883648493
    weak = {multiple(point, large) for y in range(2, 14) if (point := some_point(y))}
    weak = {multiple(point, times) for point in weak for times in range(8)}
    assert len(weak) == 8
    encodings = {
        (y + wrap * P) | sign << 255 for _, y in weak for wrap in (0, 1) for sign in (0, 1) if y + wrap * P < 2**255
    }
    assert len(encodings) == 14
    for number in encodings:
        text = keys.PREFIX + base64.b64encode(number.to_bytes(32, "little")).decode()
        refused("weak_key", keys.parse_public, text)


def test_fingerprints() -> None:
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    assert keys.fingerprint(key) == keys.fingerprint(key.public_key()) == keys.fingerprint(keys.public_text(key))
    assert len(keys.fingerprint(key)) == 19 and keys.fingerprint(key) != keys.fingerprint(keys.generate_key())
