"""The folder through which everything travels between sites: a memory stick, a shared drive.

::

    post/
      NAME.pub                    the public key of each site
      federation.toml             what all agree on
      uploads/NAME.safetensors    one from each site
      replies/NAME.safetensors    one to each site
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbicross.bundle import UPLOAD, keys, read_file
from fedbicross.bundle.limits import Limits
from fedbicross.errors import ConfigError, FedBiCrossError
from fedbicross.messages import file_name
from fedbicross.transport.federation_file import MAX_CLIENTS, FederationFile, load_federation
from fedbicross.transport.verify import open_reply, verify_upload

MISSING, GOOD = "missing", "ok"


@dataclass(frozen=True)
class Post:
    """Where each file lies. Nothing here is trusted: whoever reads a file verifies it."""

    folder: Path

    def require(self) -> None:
        """Refuse a folder that is not there: a slip, or a stick that is not plugged in."""
        if not self.folder.is_dir():
            problem = f"{self.folder} is no folder; it is where public keys, uploads and replies travel"
            raise ConfigError("no_post", f"{problem}: is the stick plugged in?")

    @property
    def federation(self) -> Path:
        """The agreement."""
        return self.folder / "federation.toml"

    @property
    def uploads(self) -> Path:
        """What the server reads."""
        return self.folder / "uploads"

    @property
    def replies(self) -> Path:
        """What the server writes."""
        return self.folder / "replies"

    def public_key(self, name: str) -> Path:
        """Of a site."""
        return self.folder / f"{file_name(name)}.pub"

    def upload(self, name: str) -> Path:
        """From a site."""
        return self.uploads / f"{file_name(name)}.safetensors"

    def reply(self, name: str) -> Path:
        """To a site."""
        return self.replies / f"{file_name(name)}.safetensors"

    def public_keys(self) -> dict[str, str]:
        """The keys that lie here, by the names of their files."""
        found = sorted(self.folder.glob("*.pub"))
        if len(found) > MAX_CLIENTS:
            raise ConfigError("clients", f"{self.folder} holds more than {MAX_CLIENTS} public keys")
        return {path.stem: read_public_key(path) for path in found}


def read_public_key(path: Path) -> str:
    """The one line in a ``.pub`` file."""
    text = read_file(path, Limits(max_bytes=keys.MAX_KEY_FILE)).decode("ascii", "replace").strip()
    keys.parse_public(text)
    return text


def status(post: Post) -> dict[str, Any]:
    """How far a federation has come, by what lies in the folder; every file is verified and none is used."""
    post.require()
    if not post.federation.exists():
        names = {name: keys.fingerprint(text) for name, text in post.public_keys().items()}
        sites = [{"site": name, "key": text, "upload": MISSING, "reply": MISSING} for name, text in names.items()]
        return {"run": None, "quorum": None, "sites": sites, "next": "the server: fedbicross federation init --post"}
    agreed = load_federation(post.federation)
    sites = []
    for name, text in agreed.clients.items():
        upload = _verdict(post.upload(name), lambda data: verify_upload(agreed, data), name)
        reply = _verdict(post.reply(name), lambda data, name=name: open_reply(agreed, data, name), name)
        sites.append({"site": name, "key": keys.fingerprint(text), "upload": upload, "reply": reply})
    return {"run": agreed.run_id, "quorum": agreed.quorum, "sites": sites, "next": _next(agreed, sites)}


def _verdict(file: Path, check: Any, name: str) -> str:
    if not file.exists() and not file.is_symlink():
        return MISSING
    try:
        found = check(read_file(file, UPLOAD) if file.parent.name == "uploads" else read_file(file))
    except FedBiCrossError as error:
        return f"refused, {error.code}: {error.args[0]}"
    return GOOD if found.client == name else f"refused, wrong_client: it is of {found.client!r}"


def _next(agreed: FederationFile, sites: list[dict[str, str]]) -> str:
    """Whose turn it is."""
    if any(site["reply"] == GOOD for site in sites):
        return "each site with a reply: fedbicross client join"
    sent = sum(site["upload"] == GOOD for site in sites)
    waiting = ", ".join(site["site"] for site in sites if site["upload"] != GOOD)
    if sent < agreed.quorum:
        return f"{waiting}: fedbicross client join"
    late = f" (or wait for {waiting})" if waiting else ""
    return f"the server: fedbicross server fuse{late}"
