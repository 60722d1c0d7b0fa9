"""A statement that a data officer can file: whoever changes it, its page or its upload is found out."""

from __future__ import annotations

import html
import json
from typing import Any

import pytest

from fedbicross.bundle import keys
from fedbicross.disclosure import statement
from fedbicross.errors import UploadError

KEY, OTHER = keys.generate_key(), keys.generate_key()
ALLOWED = {"north": keys.public_text(KEY), "south": keys.public_text(OTHER)}
UPLOAD = b"the bytes that leave"
RATES = {
    "auc": {"value": 0.61, "low": 0.55, "high": 0.66},
    "tpr_at_0.01": {"value": 0.05, "low": 0.02, "high": 0.1},
    "tpr_at_0.001": None,
    "advantage": 0.12,
    "roc": [[0.0, 0.0], [0.2, 0.5], [1.0, 1.0]],
}
NETWORK: dict[str, Any] = {
    "kind": "network",
    "membership": {
        "members": 200,
        "controls": 150,
        "likelihood_ratio": RATES,
        "confidence": RATES,
        "difference_without_membership": {"value": 0.5, "low": 0.45, "high": 0.55},
        "shadows_attacked": 0.6,
        "shadows": 4,
    },
    "canaries": {"epsilon": 0.7, "guesses": 20, "correct": 17, "canaries": 40, "confidence": 0.95, "delta": 1e-5},
    "reconstruction": None,
    "memorised": 9,
    "other_tensors": ["pacfl.signature"],
    "counts_sent": True,
}


def body(found: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "client": "north",
        "run": "run+1",
        "method": "fedavg",
        "leaves": "The trained network.",
        "others_receive": "A model.",
        "images": {"trained_on": 200, "held_out": 150, "made_here": True},
        "effort": {"shadows": 4, "epochs": None},
        "policy": None,
        "counts": [3, 4],
        **more,
    }
    return statement.make(found or NETWORK, UPLOAD, **given)


def test_what_was_signed_comes_back() -> None:
    said = body()
    text, page = statement.sign(said, KEY)
    back = statement.verify(text, ALLOWED, page, UPLOAD)
    assert {key: back[key] for key in said} == json.loads(json.dumps(said))
    assert statement.verify(text, {"north": ALLOWED["north"]})["client"] == "north"


def test_what_is_not_covered_is_said() -> None:
    missing = " ".join(body()["not_covered"])
    for word in ("batch-normalisation", "pacfl.signature", "class counts", "0.1% false ones: that takes 1,000"):
        assert word in missing
    assert "1.0% false" not in missing
    assert "class counts" not in " ".join(body(counts=None)["not_covered"])
    assert "Nothing was measured" in body({"kind": "not_audited"})["not_covered"][0]
    assert body({"kind": "not_audited"})["covered"] == []


def test_what_satre_asks_for_is_answered_point_by_point() -> None:
    """By number, so that whoever collects statements finds the answers again."""
    text, page = statement.sign(body(), KEY)
    rows = statement.verify(text, ALLOWED)["satre_3_3_07"]
    asked = ("documented policy", "memorised records", "export of models", "person who checks")
    assert all(word in row[0] for word, row in zip(asked, rows, strict=True))
    assert [row[1].partition(" ")[0] for row in rows] == ["In", "Measured:", "Yes:", "Not"]
    assert all(len(row) == 2 and html.escape(row[0]) in page.decode() for row in rows)


def changed(text: bytes, path: tuple[str, ...], value: Any) -> bytes:
    outer = json.loads(text)
    inner = outer
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(outer).encode()


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        (("statement", "found", "membership", "likelihood_ratio", "auc", "high"), 0.51, "signature"),
        (("statement", "upload", "sha256"), "0" * 64, "signature"),
        (("statement", "client"), "south", "signature"),
        (("signature",), "00", "signature"),
        (("signature",), "0" * 128, "signature"),
        (("signature",), None, "signature"),
        pytest.param(("signer",), keys.public_text(OTHER), "signature", id="another key"),  # drawn anew
        (("signer",), "ed25519:nobody", "unknown_key"),
        (("signer",), 5, "statement"),
        (("more",), 1, "statement"),
        (("statement", "schema"), 2, "statement"),
        (("statement", "upload"), [], "statement"),
        (("statement",), [1], "statement"),
    ],
)
def test_any_change_is_refused(path: tuple[str, ...], value: Any, code: str) -> None:
    text, _ = statement.sign(body(), KEY)
    with pytest.raises(UploadError) as caught:
        statement.verify(changed(text, path, value), ALLOWED)
    assert caught.value.code == code


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"statement":{}}', b"\xff", b"[" * 200_000])
def test_what_is_no_statement_is_refused(data: bytes) -> None:
    with pytest.raises(UploadError) as caught:
        statement.verify(data, ALLOWED)
    assert caught.value.code == "statement"


def test_a_file_that_is_too_large_is_not_parsed() -> None:
    with pytest.raises(UploadError) as caught:
        statement.verify(b" " * (statement.MAX_BYTES + 1), ALLOWED)
    assert caught.value.code == "too_large"


def test_page_and_upload_belong_to_it() -> None:
    text, page = statement.sign(body(), KEY)
    for given, code in ((({"page": page + b" "}), "other_page"), ({"upload": UPLOAD + b" "}, "other_upload")):
        with pytest.raises(UploadError) as caught:
            statement.verify(text, ALLOWED, **given)
        assert caught.value.code == code


def test_a_site_signs_for_itself_only() -> None:
    text, _ = statement.sign(body(client="south"), KEY)
    with pytest.raises(UploadError) as caught:
        statement.verify(text, ALLOWED)
    assert caught.value.code == "name_key_mismatch"


def test_a_bundles_signature_is_no_statements() -> None:
    """The same key signs both; their domains keep them apart."""
    text, _ = statement.sign(body(), KEY)
    outer = json.loads(text)
    message = statement._message(outer["signer"], outer["statement"])
    assert message.startswith(b"fedbicross audit statement")
    forged = KEY.sign(message.partition(b"\0")[2]).hex()
    with pytest.raises(UploadError):
        statement.verify(changed(text, ("signature",), forged), ALLOWED)


def test_page_shows_values_and_nothing_that_runs() -> None:
    said = body(client="<script>alert(1)</script>", policy={"rules": {}, "reasons": ["AUC <b>over</b> 0.6"]})
    page = statement.render(said)
    assert "0.610 (0.550 to 0.660)" in page
    assert "5.0% (2.0% to 10.0%)" in page
    assert "too few held-out images" in page
    assert "Refused by the site" in page
    assert "<svg" in page
    assert "SATRE" in page
    assert "none: nothing bounds" in page
    assert "ε = 1, δ" in statement.render(body(privacy="ε = 1, δ = 1e-05"))
    assert "<script" not in page
    assert "<b>over" not in page
    assert "http" not in page


def test_page_of_other_kinds_of_upload() -> None:
    assert "Nothing." in statement.render(body({"kind": "not_audited"}))
    found = {
        "kind": "features",
        "features": {
            "copies": {"above_0.999": 3, "strangers_above_0.999": 2},
            "attack": {"synthetic": {"psnr": 20.0, "ssim": 0.41}, "others": {"psnr": 20.0, "ssim": 0.4}},
        },
    }
    page = statement.render(body(found))
    assert "0.410" in page
    assert "Membership inference on features" in page
