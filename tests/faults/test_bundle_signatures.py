"""Family H: who made a bundle, for whom and for which run; keys that stay secret; a log that shows what happened."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import os
import stat
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.toy_bundle import ALLOWED, RUN, key, receive, refusal, toy, toy_tensors, toy_upload
from fedbicross.bundle import audit, check_signer, format, inspect, keys, pack, read_file, sign, unpack, validate
from fedbicross.bundle.format import canonical_json, encode_header, with_metadata
from fedbicross.errors import ConfigError, FedBiCrossError, RunError
from fedbicross.messages import MANIFESTS, Reply, Upload

ORDER = 2**252 + 27742317777372353535851937790883648493  # of the group in which Ed25519 signs (RFC 8032)


def resigned(signature: str | None, signer: str | None = ALLOWED["north"]) -> bytes:
    return with_metadata(toy(), inspect(toy()), signer, signature)


def made_signature() -> str:
    return str(inspect(toy()).signature)


# --- 40: the signature itself -------------------------------------------------------------------------------------


def test_all_512_bit_flips_of_a_signature() -> None:
    good = bytes.fromhex(made_signature())
    for bit in range(512):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert refusal(lambda bad=bad: receive(resigned(bad.hex()))) == "signature"


def test_the_same_signature_written_otherwise() -> None:
    """S + L verifies in careless libraries; upper case and spaces decode in careless readers."""
    good = bytes.fromhex(made_signature())
    larger = (int.from_bytes(good[32:], "little") + ORDER).to_bytes(32, "little")
    text = good.hex()
    for bad in ((good[:32] + larger).hex(), text.upper(), text + " ", " " + text, text[:-2] + "é" * 2):
        assert refusal(lambda bad=bad: receive(resigned(bad))) == "signature"


@pytest.mark.parametrize(
    "bad", ["", "00", "0" * 128, "f" * 128, "0" * 127, "doubled", "truncated", "0x" + "0" * 126, "none", "null", "\0"]
)
def test_signatures_of_the_wrong_form(bad: str) -> None:
    text = {"doubled": made_signature() * 2, "truncated": made_signature()[:-2]}.get(bad, bad)
    assert refusal(lambda: receive(resigned(text))) == "signature"


def test_no_signature() -> None:
    assert refusal(lambda: receive(toy_upload().pack())) == "unsigned"
    assert refusal(lambda: receive(resigned(None, None))) == "unsigned"
    assert refusal(lambda: receive(resigned(None))) == "metadata"
    assert refusal(lambda: receive(resigned(made_signature(), None))) == "metadata"


RAW = base64.b64encode(bytes(31) + b"\x09").decode()


@pytest.mark.parametrize(
    "signer",
    ["", "none", "none:", "ed25519:", "ed25519", "rsa:" + RAW, "ED25519:" + RAW, "ed25519:" + RAW, RAW, "hmac:" + RAW,
     "north", ALLOWED["north"] + " ", ALLOWED["north"].replace("ed25519", "none"), "ed25519:" + "A" * 43 + "="],
    ids=range(14),
)  # fmt: skip
def test_algorithms_and_signers_that_are_not_on_the_list(signer: str) -> None:
    assert refusal(lambda: receive(resigned(made_signature(), signer))) == "unknown_key"


# --- 41: keys -----------------------------------------------------------------------------------------------------


def test_right_signature_wrong_key() -> None:
    forged = sign(toy_upload().pack(), key("stranger"))
    assert refusal(lambda: receive(forged)) == "unknown_key"
    claimed = with_metadata(forged, inspect(forged), ALLOWED["north"], inspect(forged).signature)
    assert refusal(lambda: receive(claimed)) == "signature"


def test_one_client_in_the_name_of_another() -> None:
    assert refusal(lambda: receive(sign(toy_upload("south").pack(), key("north")), "south")) == "name_key_mismatch"
    assert refusal(lambda: receive(sign(toy_upload("south").pack(), key("south")))) == "wrong_client"


def test_a_key_taken_off_the_list() -> None:
    rest = {name: text for name, text in ALLOWED.items() if name != "north"}
    assert refusal(lambda: receive(toy(), allowed=rest)) == "unknown_key"
    assert refusal(lambda: receive(toy(), allowed={})) == "unknown_key"
    renewed = {**ALLOWED, "north": keys.public_text(key("north, new"))}
    assert refusal(lambda: receive(toy(), allowed=renewed)) == "unknown_key"


def test_one_key_under_two_names() -> None:
    twice = {**ALLOWED, "east": ALLOWED["north"]}
    assert refusal(lambda: receive(toy(), allowed=twice), ConfigError) == "key_twice"


@pytest.mark.parametrize("text", ["", "none", "ed25519:", "ed25519:AAAA", ALLOWED["north"][:-1], 5, None, "*"])
def test_a_list_with_a_broken_key_lets_nobody_in(text: Any) -> None:
    assert refusal(lambda: receive(toy(), allowed={**ALLOWED, "east": text}), ConfigError) == "bad_key"


def test_a_placeholder_key_lets_nobody_in() -> None:
    zeros = "ed25519:" + base64.b64encode(bytes(32)).decode()
    assert refusal(lambda: receive(toy(), allowed={"north": zeros}), ConfigError) == "weak_key"


# --- 42: replay ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_id", ["run-8", "RUN-7", "run-7 ", "", None, RUN.upper(), RUN.replace("7", "8", 1)])
def test_an_upload_of_another_run(run_id: str | None) -> None:
    data = sign(toy_upload(run_id=run_id).pack(), key("north"))
    assert refusal(lambda: receive(data)) == "wrong_run"


@pytest.mark.parametrize("run_id", ["run-7", "run-7+", "run-7+" + "0" * 16, RUN + "0"])
def test_an_upload_made_under_other_settings(run_id: str) -> None:
    data = sign(toy_upload(run_id=run_id).pack(), key("north"))
    assert refusal(lambda: receive(data)) == "other_settings"


def test_an_upload_as_a_reply_and_the_other_way_round() -> None:
    reply = sign(Reply(toy_tensors(), {}, "north", RUN).pack(), key("north"))
    assert refusal(lambda: receive(reply)) == "wrong_kind"
    assert refusal(lambda: Reply.unpack(toy())) == "wrong_kind"


def test_a_reply_to_somebody_else_or_of_another_run() -> None:
    data = sign(Reply(toy_tensors(), {}, "north", RUN).pack(), key("server"))
    assert check_signer(inspect(data), {"server": keys.public_text(key("server"))}) == "server"
    reply = Reply.unpack(data)
    validate.check_client(reply.client, "north")
    validate.check_run(reply.run_id, RUN)
    for found, expected in ((reply.client, "south"), (None, "south"), (5, "south"), (["south"], "south")):
        assert refusal(lambda f=found, e=expected: validate.check_client(f, e)) == "wrong_client"
    assert refusal(lambda: validate.check_run(reply.run_id, "run-8")) == "wrong_run"
    assert refusal(lambda: check_signer(inspect(data), ALLOWED)) == "unknown_key", "a client cannot write replies"


def audit_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- 43: what the signature covers --------------------------------------------------------------------------------


def parts(data: bytes) -> tuple[Any, bytes]:
    return inspect(data), data[8 + int.from_bytes(data[:8], "little") :]


def test_manifests_swapped_between_two_valid_clients() -> None:
    other = sign(toy_upload("south", tensors={**toy_tensors(), "head.bias": torch.ones(3)}).pack(), key("south"))
    for first, second in ((toy(), other), (other, toy())):
        (header, _), (_, body) = parts(first), parts(second)
        head = first[: len(first) - len(body)]
        assert refusal(lambda head=head, body=body, n=header.manifest["client"]: receive(head + body, n)) == "digest"
        mixed = with_metadata(first, header, inspect(second).signer, inspect(second).signature)
        assert refusal(lambda mixed=mixed: receive(mixed)) == "signature"


@pytest.mark.parametrize("field", sorted(MANIFESTS["upload"].model_fields))
def test_every_field_of_the_manifest_is_signed(field: str) -> None:
    values = json.loads(inspect(toy()).text)
    values["manifest"][field] = "changed"
    check_forged_text(canonical_json(values))


def test_kind_format_and_digests_are_signed() -> None:
    values = json.loads(inspect(toy()).text)
    check_forged_text(canonical_json({**values, "kind": "reply"}), "wrong_kind")
    for name in values["tensors"]:
        check_forged_text(canonical_json({**values, "tensors": {**values["tensors"], name: "0" * 64}}))


def check_forged_text(text: str, at_the_server: str = "signature") -> None:
    header, body = parts(toy())
    table = {name: (info.dtype, info.shape) for name, info in header.tensors.items()}
    metadata = {format.MANIFEST: text, format.SIGNER: header.signer, format.SIGNATURE: header.signature}
    forged = encode_header(metadata, table)[0] + body
    assert inspect(forged).text == text, "well-formed but for the signature"
    assert refusal(lambda: check_signer(inspect(forged), ALLOWED)) == "signature"
    assert refusal(lambda: receive(forged)) == at_the_server


def test_a_tensor_of_the_same_bytes_under_another_name_type_or_shape() -> None:
    """One signed manifest, three tables that describe the same bytes otherwise."""
    data = sign(toy_upload(tensors={"w": torch.zeros(4)}).pack(), key("north"))
    header, body = parts(data)
    metadata = {format.MANIFEST: header.text, format.SIGNER: header.signer, format.SIGNATURE: header.signature}
    codes = {
        ("v", "F32", (4,)): "tensor_list",
        ("w", "I32", (4,)): "digest",
        ("w", "F32", (2, 2)): "digest",
        ("w", "U8", (16,)): "digest",
    }
    for (name, dtype, shape), code in codes.items():
        forged = encode_header(metadata, {name: (dtype, shape)})[0] + body
        assert refusal(lambda forged=forged: receive(forged)) == code


def test_a_signature_for_something_else_does_not_fit() -> None:
    text = inspect(toy()).text
    for message in (text.encode(), toy(), b"fedbicross bundle signature, version 2\0" + text.encode()):
        assert refusal(lambda message=message: receive(resigned(key("north").sign(message).hex()))) == "signature"


# --- 44: fails closed ---------------------------------------------------------------------------------------------


def test_signing_refuses_what_reading_refuses() -> None:
    damaged = bytearray(toy_upload().pack())
    damaged[-1] ^= 1
    assert refusal(lambda: sign(bytes(damaged), key("north"))) == "digest"
    assert refusal(lambda: sign(b"x" * 100, key("north"))) == "header_length"


# --- 45: after a refusal, and the log -----------------------------------------------------------------------------


def test_after_a_refusal_no_tensor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "build_tensors", lambda *a: pytest.fail("the loader was called"))
    forged = sign(toy_upload().pack(), key("stranger"))
    for data in (forged, toy_upload().pack(), resigned("0" * 128), sign(toy_upload("south").pack(), key("north"))):
        refusal(lambda data=data: receive(data))
    assert refusal(lambda: unpack(toy(), "reply")) == "wrong_kind"


def tick() -> str:
    return "2030-01-01T00:00:00Z"


def refuse_and_log(data: bytes, log: Path) -> str:
    try:
        receive(data)
    except FedBiCrossError as error:
        event = {"client": "north", "code": error.code, "sha256": audit_digest(data)}
        return audit.append(log, event, tick)
    raise AssertionError("accepted")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    for data in (b"", toy_upload().pack(), resigned("0" * 128), toy()[:-1], toy() + b"x"):
        refuse_and_log(data, path)
    return path


def test_a_refusal_leaves_time_client_code_and_digest(log: Path) -> None:
    assert audit.verify(log).entries == 5
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"]["code"] for line in lines] == ["too_short", "unsigned", "signature", "file_size", "file_size"]
    assert all(line["time"] == tick() and len(line["event"]["sha256"]) == 64 for line in lines)


def test_every_edit_of_the_log_is_noticed(log: Path) -> None:
    """Flipped bits and cuts at every so many places; every line removed, repeated, exchanged with the next."""
    data, last = log.read_bytes(), audit_digest(log.read_bytes().splitlines()[-1])
    lines = data.splitlines(keepends=True)
    broken = []
    for bit in range(0, 8 * len(data), 17):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        broken.append(bytes(changed))
    broken += [b"".join(lines[:i] + lines[i + 1 :]) for i in range(5)]
    broken += [b"".join([*lines[: i + 1], *lines[i:]]) for i in range(5)]
    broken += [b"".join([*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]]) for i in range(4)]
    broken += [data[:length] for length in range(0, len(data), 11)]
    broken += [data + b"\n", data + lines[0], b"\n" + data, data + b"{}\n"]
    for content in broken:
        log.write_bytes(content)
        assert refusal(lambda: audit.verify(log, last), RunError) in ("audit_broken", "audit_torn")
    log.write_bytes(data)
    assert audit.verify(log, last).entries == 5


# --- 46: private keys ---------------------------------------------------------------------------------------------


def secrets(secret: Any) -> list[bytes]:
    """A private key in every form in which it could slip out."""
    raw = secret.private_bytes_raw()
    pem = keys_pem(secret)
    return [raw, raw.hex().encode(), base64.b64encode(raw), raw[:16], *pem.splitlines()[1:-1], repr(raw).encode()]


def keys_pem(secret: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def test_a_private_key_never_leaves_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = keys.generate_key()
    path = tmp_path / "site.key"
    keys.save_private_key(path, secret)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    said = io.StringIO()
    outputs = [sign(toy_upload().pack(), secret), sign(Reply(toy_tensors()).pack(), secret)]
    audit.append(tmp_path / "audit.jsonl", {"signer": keys.public_text(secret), "finger": keys.fingerprint(secret)})
    broken = keys_pem(secret).replace(b"PRIVATE KEY", b"PUBLIC KEY")
    cases: list[tuple[bytes, int]] = [(broken, 0o600), (keys_pem(secret)[:-40], 0o600), (keys_pem(secret), 0o644)]
    for number, (content, mode) in enumerate(cases):
        copy = tmp_path / f"copy-{number}"
        copy.write_bytes(content)
        copy.chmod(mode)
        try:
            keys.load_private_key(copy)
        except ConfigError as error:
            print(error, repr(error), file=said)
            traceback.print_exception(error, file=said)
            traceback.print_tb(error.__traceback__, file=said)
        copy.unlink()
    for work in (
        lambda: keys.save_private_key(path, secret),
        lambda: keys.parse_public(keys_pem(secret).decode()[:40]),
    ):
        with pytest.raises(ConfigError) as caught:
            work()
        traceback.print_exception(caught.value, file=said)
    print(repr(secret), str(secret), keys.public_text(secret), file=said)
    assert said.getvalue().count("ConfigError") >= 5
    outputs += [said.getvalue().encode(), caplog.text.encode(), (tmp_path / "audit.jsonl").read_bytes()]
    for output in outputs:
        assert not any(form in output for form in secrets(secret))
    assert any(form in path.read_bytes() for form in secrets(secret)), "the search must be able to find it"


def test_public_halves_only_in_bundles() -> None:
    data = sign(toy_upload().pack(), key("north"))
    assert ALLOWED["north"].encode() in data
    assert key("north").private_bytes_raw() not in data


def test_a_signed_file_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "upload.safetensors"
    path.write_bytes(toy())
    assert receive(read_file(path)).pack() == toy_upload().pack()
    assert Upload.unpack(toy()).run_id == RUN
    assert os.listdir(tmp_path) == ["upload.safetensors"]  # noqa: PTH208
    assert pack("upload", {}, {}) == pack("upload", {}, {})
