from __future__ import annotations

import json

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from safetensors.torch import load

from faults.toy_bundle import ALLOWED, key, toy, toy_tensors, toy_upload
from fedbicross.bundle import check_signer, inspect, sign
from fedbicross.bundle.keys import public_text
from fedbicross.messages import Reply, Upload


def test_same_key_and_data_give_the_same_bytes() -> None:
    data = toy_upload().pack()
    assert sign(data, key("north")) == sign(data, key("north")) == sign(sign(data, key("north")), key("north"))
    assert sign(sign(data, key("south")), key("north")) == sign(data, key("north")), "a new signature replaces the old"
    assert sign(data, key("north")) != sign(data, key("south"))


def test_a_signed_bundle_is_still_a_safetensors_file() -> None:
    assert all(torch.equal(value, toy_tensors()[name]) for name, value in load(toy()).items())
    assert Upload.unpack(toy()).pack() == toy_upload().pack()


def test_the_name_of_the_signer() -> None:
    assert check_signer(inspect(toy()), ALLOWED) == "north"
    reply = sign(Reply({}, {}, "north", "r").pack(), key("server"))
    assert check_signer(inspect(reply), {"hub": public_text(key("server"))}) == "hub"


def test_anyone_can_check_the_signature_by_hand() -> None:
    """As the documentation says it: the domain, the signer's text, a zero byte, the manifest's text."""
    header = json.loads(toy()[8 : 8 + int.from_bytes(toy()[:8], "little")])["__metadata__"]
    message = (
        b"fedbicross bundle signature, version 1\0" + header["signer"].encode() + b"\0" + header["fedbicross"].encode()
    )
    public = Ed25519PublicKey.from_public_bytes(key("north").public_key().public_bytes_raw())
    public.verify(bytes.fromhex(header["signature"]), message)
