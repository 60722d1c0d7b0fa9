"""What may come in between sites: an upload at the server, a reply at a site.

Bytes are verified before anything else touches them: form, signer, run, digests, and only then content.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedbicross import parts, pipeline
from fedbicross.bundle import REPLY, UPLOAD, inspect, read_file, validate
from fedbicross.bundle.format import check_kind
from fedbicross.bundle.sign import check_signer
from fedbicross.errors import MAX_MESSAGE, FedBiCrossError, MethodError, UploadError, printable
from fedbicross.messages import Reply, Upload
from fedbicross.transport.federation_file import CountPolicy, FederationFile, check_not_expired, find_client

MAX_NOTES = 100  # of a reply that are shown


def verify_upload(federation: FederationFile, data: bytes) -> Upload:
    """The upload in these bytes, if it is a listed client's, signed by that client, for this run, and fit for use."""
    upload = open_upload(federation, data)
    pipeline.check_upload(federation.build(), upload, federation.task)
    if federation.training.dp is not None:
        parts.private.check(upload, federation.training.dp)
    if not counts_agree(federation.class_counts, upload):
        raise UploadError(
            "small_count", f"{upload.client!r} sends a number of images that by class_counts should have stayed there"
        )
    return upload


Verified = tuple[Path, str | None, FedBiCrossError | None]  # the file, its sender if it is one, and why it is refused


def verify_files(federation: FederationFile, paths: Iterable[Path]) -> list[Verified]:
    """Every check of ``fuse`` on each file: alone, one at a time in memory, and then against the others."""
    method, said = federation.build(), dict[str, Any]()
    found: list[Verified] = []
    for path in paths:
        try:
            upload = verify_upload(federation, read_file(path, UPLOAD))
            said[upload.client] = method.must_agree(upload)
            found.append((path, upload.client, None))
        except (UploadError, MethodError) as error:
            found.append((path, None, error))
    differs = pipeline.who_differs(said)
    return [(path, client, error or differs.get(client or "")) for path, client, error in found]


def open_upload(federation: FederationFile, data: bytes) -> Upload:
    """The part of ``verify_upload`` before the method's own checks: who sent it, for what, and whether it is whole."""
    check_not_expired(federation)
    header = inspect(data, UPLOAD)
    check_kind(header, "upload")
    check_signer(header, federation.clients)  # an upload's signer is also its sender
    _check_run(federation, header.manifest.get("run_id"), "upload")
    _check_agreement(federation, header.manifest.get("agreement"), "upload")
    upload = Upload.unpack(data)
    validate.check_same_task([upload], federation.task)
    if upload.task.model != federation.model:
        theirs = f"{upload.client!r} has model {upload.task.model[:64]!r}"
        raise UploadError("task_model", f"{theirs}, the federation {federation.model!r}")
    return upload


def open_reply(federation: FederationFile, data: bytes, client_name: str) -> Reply:
    """Verify that these bytes are this run's reply to this client, signed by the server."""
    find_client(federation, client_name)
    check_not_expired(federation)
    header = inspect(data, REPLY)
    check_kind(header, "reply")
    check_signer(header, {"server": federation.server})
    _check_run(federation, header.manifest.get("run_id"), "reply")
    _check_agreement(federation, header.manifest.get("agreement"), "reply")
    validate.check_client(header.manifest.get("client"), client_name)
    reply = Reply.unpack(data)
    validate.check_finite(reply.tensors)
    return reply


def notes_in(reply: Reply) -> list[str]:
    """What the server noted on the uploads behind its reply, fit to be shown."""
    given = reply.info.get("notes", [])
    if not isinstance(given, list) or not all(isinstance(note, str) for note in given):
        raise UploadError("manifest", "'notes' of the reply are no list of texts")
    return [printable(note)[:MAX_MESSAGE] for note in given[:MAX_NOTES]]


def counts_agree(policy: CountPolicy, upload: Upload) -> bool:
    """Whether every number of images in the upload is one that may leave a site; behind noise a small one may."""
    numbers = [*(upload.class_counts or ()), *([] if upload.num_samples is None else [upload.num_samples])]
    small = upload.privacy is None and any(0 < number < policy.smallest for number in numbers)
    return not small and (policy.send or not numbers)


def _check_run(federation: FederationFile, found: object, what: str) -> None:
    if found == federation.run:
        return
    run_id = found.partition("+")[0] if isinstance(found, str) else None
    if run_id == federation.run_id:
        raise UploadError("other_settings", f"this {what} was made under other settings of run {run_id!r}")
    validate.check_run(run_id, federation.run_id)


def _check_agreement(federation: FederationFile, found: object, what: str) -> None:
    """Whoever signed it agreed to these members, this purpose and this last day."""
    ours = federation.agreement.model_dump()
    if found == ours:
        return
    theirs = found if isinstance(found, dict) else {}
    if theirs.get("members") != ours["members"]:
        raise UploadError("other_members", f"this {what} was signed for a federation of other members or keys")
    raise UploadError("other_agreement", f"this {what} was signed for another purpose or another last day")
