"""What may come in between sites: an upload at the server, a reply at a site.

Bytes are verified before anything else touches them: form, signer, run, digests, and only then content.
"""

from __future__ import annotations

from fedbicross import pipeline
from fedbicross.bundle import REPLY, UPLOAD, inspect, validate
from fedbicross.bundle.format import check_kind
from fedbicross.bundle.sign import check_signer
from fedbicross.errors import UploadError
from fedbicross.messages import Reply, Upload
from fedbicross.transport.federation_file import CountPolicy, FederationFile, check_not_expired, find_client


def verify_upload(federation: FederationFile, data: bytes) -> Upload:
    """The upload in these bytes, if it is a listed client's, signed by that client, for this run, and fit for use."""
    upload = open_upload(federation, data)
    pipeline.check_upload(federation.build(), upload, federation.task)
    if not counts_agree(federation.class_counts, upload):
        raise UploadError(
            "small_count", f"{upload.client!r} sends a number of images that by class_counts should have stayed there"
        )
    return upload


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


def counts_agree(policy: CountPolicy, upload: Upload) -> bool:
    """Whether every number of images in the upload is one that may leave a site."""
    numbers = [*(upload.class_counts or ()), *([] if upload.num_samples is None else [upload.num_samples])]
    return not any(0 < number < policy.smallest for number in numbers) and (policy.send or not numbers)


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
