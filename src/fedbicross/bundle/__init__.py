"""The trust boundary: how tensors and a manifest become one file, and how such a file is read back.

``pack``/``unpack`` (format), ``sign``/``verify_signature`` (who made it), ``read_file`` (one safe read),
``validate`` (does it make sense), ``audit`` (what was accepted and refused).
"""

from fedbicross.bundle.format import Header, Tensors, inspect, join_groups, pack, take_group, unpack
from fedbicross.bundle.limits import OWN, REPLY, UPLOAD, Limits
from fedbicross.bundle.read import list_bundles, read_file
from fedbicross.bundle.sign import sign, verify_signature

__all__ = [
    "OWN",
    "REPLY",
    "UPLOAD",
    "Header",
    "Limits",
    "Tensors",
    "inspect",
    "join_groups",
    "list_bundles",
    "pack",
    "read_file",
    "sign",
    "take_group",
    "unpack",
    "verify_signature",
]
