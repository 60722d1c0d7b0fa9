"""An upload or a reply in words, for somebody who has to sign that it may leave."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from fedbicross import bundle, transport
from fedbicross.cli.common import verdict
from fedbicross.errors import ConfigError, FedBiCrossError, UploadError
from fedbicross.privacy.statement import Statement

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.bundle import Header
    from fedbicross.transport.federation_file import FederationFile


def facts(data: bytes) -> dict[str, Any]:
    """Size and digest of the file."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def check_readable(header: Header) -> None:
    """Only an upload or a reply can be put into words, and only one whose manifest has the fields of its kind."""
    if header.kind not in transport.files.MANIFESTS:
        raise UploadError("wrong_kind", f"a bundle of kind {header.kind[:32]!r} is neither an upload nor a reply")
    bundle.validate.read_manifest(transport.files.MANIFESTS[header.kind], header.manifest)


def as_json(data: bytes, header: Header, agreed: FederationFile | None) -> dict[str, Any]:
    """The whole description, for programs."""
    sizes = {name: info.end - info.start for name, info in header.tensors.items()}
    described = {"kind": header.kind, "manifest": header.manifest, "signer": header.signer, "tensors": sizes}
    return {**facts(data), **described, "checked": _verdict(data, header, agreed)}


def _verdict(data: bytes, header: Header, agreed: FederationFile | None) -> str:
    """What the receiver of this file would say of it."""
    if agreed is None:
        return "not checked: no federation file given"
    try:
        if header.kind == "upload":
            transport.files.verify_upload(agreed, data)
        else:
            transport.files.open_reply(agreed, data, str(header.manifest.get("client")))
    except FedBiCrossError as error:
        return verdict(error)
    return "ok"


def words(data: bytes, header: Header, agreed: FederationFile | None) -> list[tuple[str, str]]:
    """The file line by line, for somebody who has to sign that it may leave."""
    manifest = header.manifest
    try:
        signer = "nobody" if header.signer is None else bundle.keys.fingerprint(header.signer)
    except ConfigError:
        signer = "no readable key"
    rows = [("kind", header.kind), ("bytes", f"{len(data):,}"), ("SHA-256", str(facts(data)["sha256"]))]
    rows += [("run", str(manifest.get("run_id"))), ("signed by the key", signer)]
    rows += [("from" if header.kind == "upload" else "to", str(manifest.get("client")))]
    rows += _agreement(manifest.get("agreement"))
    rows += _networks(header)
    if header.kind == "upload":
        rows += [("images per class", _counts(manifest)), ("number of images", _plain(manifest.get("num_samples")))]
        rows += [("further numbers and words", _plain(manifest.get("extra")))]
        rows += [("differential privacy", _privacy(manifest.get("privacy")))]
    else:
        rows += [("further numbers and words", _plain(manifest.get("info")))]
    if agreed is not None:
        rows += [
            (
                "the method says",
                agreed.build().leaves(agreed.training) if header.kind == "upload" else "a reply of the server",
            )
        ]
    return [*rows, ("checked", _verdict(data, header, agreed))]


def _privacy(found: dict[str, Any] | None) -> str:
    return "none" if found is None else Statement(**found).words


def _agreement(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return [("signed for", "no agreement")]
    members = f"the members with the digest {found['members'][:16]}…"
    until = f"until {found['expires']}" if found["expires"] else "no last day"
    return [("signed for", f"{members}; {until}"), ("purpose", found["purpose"] or "not written down")]


def _networks(header: Header) -> list[tuple[str, str]]:
    """Which tensors are the weights of a network, which its statistics, and which are something else."""

    def weigh(names: list[str]) -> str:
        count, total = len(names), sum(header.tensors[n].end - header.tensors[n].start for n in names)
        return f"{count} tensor(s), {total:,} bytes"

    if header.kind != "upload":
        return [("tensors", weigh(list(header.tensors)))]
    task = header.manifest["task"]
    try:
        network = bundle.validate.model_tensors(
            task["model"], task["channels"], len(task["classes"]), task["image_size"]
        )
    except UploadError:
        network = {}
    # Not by its name alone: a tensor of another shape could hold anything.
    part = {name for name, info in header.tensors.items() if network.get(name, (0, 0))[1] == info.shape}
    rest = [name for name in header.tensors if name not in part]
    weights = [name for name in header.tensors if name in part and not _statistic(name)]
    statistics = [name for name in header.tensors if name in part and _statistic(name)]
    return [
        (f"weights of a {task['model']}", weigh(weights)),
        ("means and variances of its features on the site's images", weigh(statistics)),
        ("tensors that are no part of the network", f"{weigh(rest)}: {', '.join(rest)}" if rest else "none"),
    ]


def tensor_rows(data: bytes, header: Header) -> list[tuple[str, str, str, str]]:
    """Name, shape, bytes and range of every tensor; the ranges only where the content is what the header says."""
    try:
        tensors = bundle.unpack(data, header.kind)[0]
    except UploadError:
        tensors = {}
    return [
        (name, shape_text(info.shape), f"{info.end - info.start:,}", _range(tensors.get(name)))
        for name, info in header.tensors.items()
    ]


def shape_text(shape: tuple[int, ...]) -> str:
    """The sides of a tensor in words."""
    return " × ".join(map(str, shape)) or "one number"


def _range(tensor: Tensor | None) -> str:
    if tensor is None:
        return "not read: the file is damaged"
    if not tensor.numel():
        return "empty"
    values = tensor.double()
    return ", ".join(f"{float(value):.4g}" for value in (values.min(), values.max(), values.mean()))


def _statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def _counts(manifest: dict[str, Any]) -> str:
    counts = manifest["class_counts"]
    if counts is None:
        return "not in the file"
    return ", ".join(f"{name}: {count}" for name, count in zip_longest(manifest["task"]["classes"], counts))


def _plain(value: object) -> str:
    return "not in the file" if value in (None, {}, []) else str(value)
