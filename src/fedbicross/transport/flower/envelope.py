"""The one place where bytes become Flower messages, and messages bytes.

A bundle travels as one opaque array of bytes, which Flower cuts into chunks of 5 MB, so that no message limit is met.
What is inside is checked by signature later; here only the envelope is.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedbicross.errors import UploadError

_STYPE = "fedbicross.bundle"  # no loader of Flower's knows it, so that nothing is ever decoded on the way
_NOTE, _BUNDLE = "note", "bundle"
MAX_NOTE = 200  # characters of one value


def content(note: dict[str, str], bundle: bytes | None = None) -> RecordDict:
    """A note of short texts and, if there is one, a bundle."""
    record = RecordDict({_NOTE: ConfigRecord(dict(note))})
    if bundle is not None:
        record[_BUNDLE] = ArrayRecord({_BUNDLE: Array("uint8", (len(bundle),), _STYPE, bundle)})
    return record


def note_of(message: Message) -> dict[str, str]:
    """The short texts of a message."""
    record = message.content.config_records.get(_NOTE)
    if record is None or not all(isinstance(value, str) and len(value) <= MAX_NOTE for value in record.values()):
        raise UploadError("envelope", "the message carries no plain note")
    return {str(key)[:MAX_NOTE]: str(value) for key, value in record.items()}


def bundle_of(message: Message) -> bytes:
    """The bundle of a message, byte for byte as it was sent."""
    arrays = message.content.array_records.get(_BUNDLE)
    if arrays is None or list(arrays) != [_BUNDLE]:
        raise UploadError("envelope", "the message carries no bundle")
    array = arrays[_BUNDLE]
    if array.stype != _STYPE or array.dtype != "uint8" or array.shape != (len(array.data),):
        raise UploadError("envelope", "the message carries an array that is no bundle")
    return bytes(array.data)
