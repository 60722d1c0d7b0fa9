from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedbicross.errors import ConfigError
from fedbicross.transport.flower.certificates import make_certificates, make_node_key
from small import refuses


def handshake(folder: Path, host: str, authority: Path) -> None:
    """TLS between two contexts in memory."""
    server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context(cafile=authority)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass


def test_certificates_work_for_the_hosts_named_and_no_other(tmp_path: Path) -> None:
    make_certificates(tmp_path / "a", ["fed.example.org", "10.1.2.3"])
    make_certificates(tmp_path / "b", ["fed.example.org"])
    for host in ("fed.example.org", "10.1.2.3", "localhost", "127.0.0.1"):
        handshake(tmp_path / "a", host, tmp_path / "a/ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "a", "other.example.org", tmp_path / "a/ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "a", "fed.example.org", tmp_path / "b/ca.crt")


def test_private_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"])
    make_node_key(tmp_path / "node.key")
    for name in ("server.key", "node.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert not any(b"PRIVATE" in data for path, data in before.items() if path.suffix != ".key")
    for again in (
        lambda: make_certificates(tmp_path, ["localhost"]),
        lambda: make_node_key(tmp_path / "node.key"),
    ):
        with pytest.raises(ConfigError, match="never overwritten"):
            again()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_node_key_is_what_flower_takes(tmp_path: Path) -> None:
    make_node_key(tmp_path / "node.key")
    private = load_ssh_private_key((tmp_path / "node.key").read_bytes(), None)
    assert isinstance(private, EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    public = load_ssh_public_key((tmp_path / "node.key.pub").read_bytes())
    assert public == private.public_key()


def test_a_strange_host_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a host name nor an address"):
        make_certificates(tmp_path, ["bücher.example"])
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for work in (
        lambda: make_certificates(tmp_path / "file", ["localhost"]),
        lambda: make_node_key(tmp_path / "file/k"),
    ):
        with refuses(ConfigError, "key_write"):
            work()
