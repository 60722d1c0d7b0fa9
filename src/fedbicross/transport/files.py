"""The three verbs between sites that share nothing but files: bytes in, bytes out, everything signed.

::

     site                            server                               site
     make_upload() --bytes--> receive(), fuse_uploads() --bytes--> open_reply(), personalize()

The result equals ``simulate()`` on the same data, names and seed. Every step keeps its work in a folder, so that the
same call again goes on where a killed one stopped and a finished one costs nothing. Nothing here can reach
``fedbicross.data``: the server runs it.
"""

from fedbicross.messages import MANIFESTS, Client, file_name
from fedbicross.transport.federation_file import FederationFile, federation_text, load_federation, new_federation
from fedbicross.transport.server import AUDIT, Received, Refused, fuse_received, fuse_uploads, receive
from fedbicross.transport.site import SENT, SiteModels, audit_file, both_models, check_key, make_upload, personalize
from fedbicross.transport.site_audit import Audited, HeldOut
from fedbicross.transport.verify import notes_in, open_reply, open_upload, verify_files, verify_upload

__all__ = [
    "AUDIT",
    "MANIFESTS",
    "SENT",
    "Audited",
    "Client",
    "FederationFile",
    "HeldOut",
    "Received",
    "Refused",
    "SiteModels",
    "audit_file",
    "both_models",
    "check_key",
    "federation_text",
    "file_name",
    "fuse_received",
    "fuse_uploads",
    "load_federation",
    "make_upload",
    "new_federation",
    "notes_in",
    "open_reply",
    "open_upload",
    "personalize",
    "receive",
    "verify_files",
    "verify_upload",
]
