"""Certificates for TLS and keys for nodes: what guards the connection, and signs no bundle. No import of Flower."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbicross.atomic import write_atomic
from fedbicross.bundle import keys
from fedbicross.errors import ConfigError

CA, CERTIFICATE, SERVER_KEY = "ca.crt", "server.crt", "server.key"
_SOON = 30  # days before the end of a certificate that is warned of


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 825) -> None:
    """A certificate authority of one's own and a server certificate for ``hosts``.

    The authority's private key is used once and forgotten, so that nobody can make a second server certificate.
    """
    begin = _now() - datetime.timedelta(hours=1)  # clocks differ a little
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])

    def certificate(subject: str, key: ec.EllipticCurvePrivateKey, *extensions: tuple[Any, bool]) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("fedbicross federation"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + datetime.timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(authority_key, hashes.SHA384())

    def usage(signs_certificates: bool) -> x509.KeyUsage:
        others = dict.fromkeys(
            (
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        return x509.KeyUsage(
            digital_signature=not signs_certificates,
            key_cert_sign=signs_certificates,
            crl_sign=signs_certificates,
            **others,
        )

    authority = certificate(
        "fedbicross federation",
        authority_key,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (usage(True), True),
    )
    every_host = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))
    server = certificate(
        every_host[0],
        server_key,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (usage(False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([_host(name) for name in every_host]), False),
    )
    for name in (CA, CERTIFICATE, SERVER_KEY):
        _check_absent(folder / name)
    _write_private(folder / SERVER_KEY, server_key, openssh=False)
    write_atomic(folder / CERTIFICATE, _pem(server))
    write_atomic(folder / CA, _pem(authority))


def check_dates(file: Path, say: Callable[[str], None], now: datetime.datetime | None = None) -> None:
    """Refuse a certificate outside of its dates: every connection would fail, each with a riddle. Say if it is soon."""
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError:
        raise ConfigError("certificate", f"{file} is no certificate (PEM)") from None
    now, begin, end = now or _now(), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    renew = "`fedbicross flower certificates` into another folder makes new ones, whose ca.crt every site needs"
    if now > end:
        raise ConfigError("certificate_expired", f"{file} expired on {end:%Y-%m-%d}; {renew}")
    if now < begin:
        raise ConfigError(
            "certificate_early", f"{file} is valid from {begin:%Y-%m-%d %H:%M} UTC on; is the clock right?"
        )
    if now > end - datetime.timedelta(days=_SOON):
        say(f"warning: {file} expires on {end:%Y-%m-%d}; {renew}")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def make_node_key(file: Path) -> None:
    """The key by which a SuperNode shows who it is: ``file`` (private) and ``file.pub`` (to hand over)."""
    public = file.with_name(file.name + ".pub")
    for path in (file, public):
        _check_absent(path)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(file, key, openssh=True)
    write_atomic(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def _host(name: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise ConfigError("host", f"{name!r} is neither a host name nor an address") from None


def _pem(certificate: Any) -> bytes:
    return bytes(certificate.public_bytes(Encoding.PEM))


def _write_private(file: Path, key: Any, openssh: bool) -> None:
    form = PrivateFormat.OpenSSH if openssh else PrivateFormat.PKCS8
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("key_write", f"cannot create {file}: {error.strerror}") from None
    keys.write_private(file, key.private_bytes(Encoding.PEM, form, NoEncryption()))


def _check_absent(file: Path) -> None:
    if file.exists():
        raise ConfigError("key_exists", f"{file} exists; keys and certificates are never overwritten")
