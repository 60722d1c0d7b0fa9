"""At the server: ask every node for its upload, keep each on arrival, fuse at the quorum, bring each its own reply.

Everything that counts lies in the server's folder, not in Flower: if any process dies, the same `flwr run` again goes
on from there. What a node says is trusted no further than the signatures in the bytes that it sends.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from fedbicross import pipeline
from fedbicross.atomic import write_atomic
from fedbicross.bundle import UPLOAD, read_file
from fedbicross.bundle.format import canonical_json
from fedbicross.errors import FedBiCrossError, MethodError, PolicyError, RunError, UploadError
from fedbicross.messages import file_name
from fedbicross.transport.files import FederationFile, fuse_uploads, load_federation, verify_upload
from fedbicross.transport.flower.envelope import bundle_of, content, note_of
from fedbicross.transport.flower.pending import PendingMessages
from fedbicross.transport.flower.settings import LOG, LogFile, RunOptions, settings_of_superlink
from fedbicross.transport.flower.summary import SUMMARY, Summary
from fedbicross.transport.server import FUSION, begun_with

UPLOADS = "uploads"
SERVER_WORK = "server"  # where the fusion keeps what it needs to go on
_REMIND = 3600.0  # seconds without an answer after which a question is asked again; doubles
_NODE_ERRORS = {  # Flower's numbers in words; its texts may hold anything
    1: "app_not_loaded",
    2: "app_failed",
    3: "message_lost",
    4: "answer_lost",
    5: "node_lost",
    7: "app_refused",
    8: "app_killed",
}


_Stamp = tuple[int, int]  # when a file was changed last, and its size
_Said = Mapping[str, Any] | FedBiCrossError  # what has to be the same in all uploads, or why one cannot be used


@dataclass
class Node:
    """A node, and what came of it in this run."""

    registered: str = ""  # the name that the operator gave the node's key, if any
    name: str | None = None  # of the federation's site; known by the signature on its upload
    failures: int = 0
    unanswered: int = 0  # questions since the last answer
    ask_again: float = 0.0  # not before this moment
    busy: bool = False  # a question is under way
    declined: bool = False  # the site's own policy refuses: that is a decision, and asking again changes nothing
    delivered: bool = False


class OneShot:
    """One round. ``fuse`` maps the files of the uploads to the reply for each site."""

    def __init__(
        self,
        federation: FederationFile,
        folder: Path,
        fuse: Callable[[Mapping[str, Path]], dict[str, bytes]],
        options: RunOptions,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        patience: float = 10.0,
    ) -> None:
        self.federation, self.folder, self.fuse, self.limits, self.say = federation, folder, fuse, options, say
        self.method, self.quorum = federation.build(), options.quorum or federation.quorum
        self.clock, self.sleep, self.patience = clock, sleep, patience
        self.sites: dict[int, Node] = {}  # by node
        self.replies: dict[str, bytes] = {}
        self.left_out = set(options.sites("without", federation))
        self.said: dict[str, tuple[_Stamp, _Said]] = {}  # of each upload, as long as its file is this one
        self.too_few: dict[str, _Stamp] | None = None  # uploads of which the fusion left too many out
        self.outcome = Summary(federation.run, 0, declined=dict.fromkeys(self.left_out, "left_out"))
        self.began = self.last_news = clock()

    def run(self, grid: Grid) -> None:
        """Sites may come, go and come back at any time; nothing travels down before an upload came up."""
        count = len(self.federation.clients)
        self.say(f"run {self.federation.run}: {self.federation.method}, {count} sites, quorum {self.quorum}")
        try:
            self._check_left_out()
            self._round(PendingMessages(grid, self.say, self.patience))
        except FedBiCrossError as error:
            self.outcome.error = str(error)
            self._end()
            raise
        self._end()

    def _check_left_out(self) -> None:
        settled = sorted(self.left_out.intersection(begun_with(self.folder / SERVER_WORK)))
        if settled:
            raise RunError(
                "begun",
                f"the fusion was begun with {', '.join(settled)}: go on without --without, or in another --work",
            )

    def _round(self, pending: PendingMessages) -> None:
        while True:
            for question in [*self._ask_for_uploads(pending), *self._bring_replies()]:
                if pending.send(question):
                    self._asked(self.sites[question.metadata.dst_node_id])
            for node, answer in pending.answers():
                site = self.sites[node]
                site.busy, site.unanswered = node in pending.waiting.values(), 0
                self._take(node, answer)
            if not self.replies and self._time_to_fuse():
                self._fuse()
                continue  # the replies leave at once
            if self.replies and self._time_to_end():
                break
            self.sleep(self.limits.poll_seconds)

    # --- questions -----------------------------------------------------------------------------------------

    def _ask_for_uploads(self, pending: PendingMessages) -> Iterable[Message]:
        """Ask every node that is online for its upload; it is also how a node shows which site it is."""
        for node in pending.nodes():
            site = self.sites.setdefault(node.node_id, Node(node.name, declined=node.name in self.left_out))
            if site.name is None and self._may_ask(site):
                yield self._question(MessageType.TRAIN, node.node_id)

    def _bring_replies(self) -> Iterable[Message]:
        """Each site's own reply, to the node that sent that site's upload."""
        for node, site in self.sites.items():
            if site.name in self.replies and not site.delivered and self._may_ask(site):
                yield self._question(MessageType.EVALUATE, node, self.replies[site.name])

    def _asked(self, site: Node) -> None:
        """A question can get lost in Flower, so it is asked again in the end: a site answers from what it has kept."""
        site.busy, site.ask_again = True, self.clock() + _REMIND * 2**site.unanswered
        site.unanswered += 1

    # --- answers -------------------------------------------------------------------------------------------

    def _take(self, node: int, message: Message | None) -> None:
        """One answer; whatever is wrong with it concerns this node only."""
        try:
            if message is None:
                raise UploadError("unreadable", f"node {node} sent what is no message of Flower's")
            if message.has_error():
                code = _NODE_ERRORS.get(message.error.code, "unknown")
                raise UploadError(code, f"node {node} gave no answer ({code})")
            if message.metadata.message_type == MessageType.TRAIN:
                self._take_upload(node, message)
            else:
                self._take_receipt(node, message)
        except (UploadError, MethodError) as error:
            self._failed(node, error)
        except FedBiCrossError as error:
            if error.code != "out_of_memory":
                raise  # not of this node's making
            self._failed(node, error)  # nor is this, but it passes
        except Exception as error:
            self._failed(node, UploadError("unexpected", f"the answer of node {node} cannot be taken: {error!r}"))

    def _take_upload(self, node: int, message: Message) -> None:
        _check_note(node, message)
        data = bundle_of(message)
        upload = verify_upload(self.federation, data)
        name = upload.client
        site = self.sites[node]
        if site.registered in self.federation.clients and site.registered != name:
            raise UploadError("wrong_node", f"the node registered for {site.registered!r} sent {name!r}'s upload")
        if any(other.name == name for other in self.sites.values() if other is not site):
            raise UploadError("two_nodes", f"node {node} sent {name!r}'s upload, as another node did before")
        if name in self.left_out:
            site.declined = True
            self.say(f"upload from {name}: not taken, since the operator leaves {name} out of this run")
            return
        path = self._path(name)
        if not path.is_file() or (path.read_bytes() != data and name in self._unusable() and not self._begun()):
            write_atomic(path, data)  # on arrival: from here on no crash can lose it
            self.said[name] = _stamp(path), self.method.must_agree(upload)
            self.last_news = self.clock()
            self.say(
                f"upload from {name}: {len(data):,} bytes ({len(self._uploads())} of {len(self.federation.clients)})"
            )
        elif path.read_bytes() != data:
            raise UploadError("two_uploads", f"{name!r} sent an upload before, and another one now; the first stays")
        if site.name is None:  # else it was asked twice
            site.name, site.failures, site.ask_again = name, 0, 0.0
        self.outcome.declined.pop(name, None)  # an earlier node of the same site may have refused

    def _take_receipt(self, node: int, message: Message) -> None:
        site = self.sites[node]
        note = _check_note(node, message)
        reply = self.replies.get(site.name or "")
        if site.name is None or reply is None or note.get("sha256") != hashlib.sha256(reply).hexdigest():
            raise UploadError("receipt", f"node {node} confirms another reply than the one it was sent")
        site.delivered = True
        self.last_news = self.clock()
        state = _word(note.get("state", ""))
        self.outcome.delivered[site.name] = state
        self.say(f"reply to {site.name}: {state}")

    def _failed(self, node: int, error: FedBiCrossError) -> None:
        """Note it, and ask again later: at first after a minute, then ever more rarely. A policy is not asked again."""
        site = self.sites[node]
        label = site.name or (site.registered if site.registered in self.federation.clients else f"node {node}")
        self.outcome.refused.append(error.code)
        if error.code.startswith(PolicyError.begins):
            site.declined = True
            if label in self.federation.clients and not self._other_node_of(label, site):
                self.outcome.declined.setdefault(label, error.code)
            self.say(f"{label}: {error}; it is not asked again in this run")
            return
        pause = min(self.limits.retry_seconds * 2**site.failures, max(3600.0, self.limits.retry_seconds))
        site.failures += 1
        site.ask_again = self.clock() + pause
        self.say(f"{label}: {error}; asked again in {pause:.0f} s")

    def _other_node_of(self, name: str, site: Node) -> bool:
        """Whether another node may still speak for this site, or did."""
        others = (other for other in self.sites.values() if other is not site)
        return any(name in (other.name, other.registered) and not other.declined for other in others)

    # --- when ----------------------------------------------------------------------------------------------

    def _may_ask(self, site: Node) -> bool:
        return not site.declined and self.clock() >= site.ask_again

    def _question(self, kind: str, node: int, bundle: bytes | None = None) -> Message:
        question = content({"run": self.federation.run}, bundle)
        # Flower drops an answer that comes later than this.
        return Message(question, node, kind, ttl=self.limits.deadline_seconds, group_id="1")

    def _path(self, name: str) -> Path:
        return self.folder / UPLOADS / f"{file_name(name)}.safetensors"

    def _uploads(self) -> dict[str, Path]:
        paths = {name: self._path(name) for name in self.federation.clients if name not in self.left_out}
        return {name: path for name, path in paths.items() if path.is_file()}

    def _unusable(self) -> dict[str, FedBiCrossError]:
        """Uploads that the fusion would refuse: damaged since they came, or unlike most others in what has to agree."""
        said = {name: found for name, path in self._uploads().items() if (found := self._said(name, path)) is not None}
        damaged = {name: found for name, found in said.items() if isinstance(found, FedBiCrossError)}
        others = {name: found for name, found in said.items() if not isinstance(found, FedBiCrossError)}
        return {**damaged, **pipeline.who_differs(others)}

    def _said(self, name: str, path: Path) -> _Said | None:
        """What an upload says; read again only if the file has changed, as one that is still being copied does.

        None where it cannot be told now: the memory is full, or the file is gone.
        """
        try:
            stamp = _stamp(path)
            if name not in self.said or self.said[name][0] != stamp:
                upload = verify_upload(self.federation, read_file(path, UPLOAD))
                self.said[name] = stamp, self.method.must_agree(upload)
        except (UploadError, MethodError) as error:
            self.said[name] = stamp, error
        except (RunError, MemoryError, FileNotFoundError):
            return None
        return self.said[name][1]

    def _begun(self) -> bool:
        """Whether a fusion was begun, so that it is settled who takes part."""
        return (self.folder / SERVER_WORK / FUSION).exists()

    def _time_to_fuse(self) -> bool:
        if self._begun():
            return True
        uploads, now = self._uploads(), self.clock()
        unusable = set(self._unusable())
        usable, awaited = len(uploads) - len(unusable), self._awaited(unusable)
        over = now - self.began >= self.limits.deadline_seconds
        if usable < self.quorum:
            if over or not awaited or len(awaited | set(uploads)) < self.quorum:
                hint = "; --quorum goes on with fewer" if usable else ""
                raise MethodError(
                    "quorum", f"{usable} uploads can be used, {self.quorum} are needed; {self._lacking()}{hint}"
                )
            return False
        if awaited and not over and self.too_few == {name: _stamp(path) for name, path in uploads.items()}:
            return False
        return not awaited or over or now - self.last_news >= self.limits.grace_seconds

    def _awaited(self, unusable: set[str]) -> set[str]:
        """Sites that may still send an upload, or another one for one that cannot be used."""
        to_mend = unusable - {site.name for site in self.sites.values()}  # of an earlier run: it may have another now
        return (set(self.federation.clients) - set(self._uploads()) | to_mend) - set(self.outcome.declined)

    def _fuse(self) -> None:
        missing, uploads = self._lacking(), self._uploads()
        self.say("fusing" + (f"; {missing}" if missing else ""))
        while True:
            over = self.clock() - self.began >= self.limits.deadline_seconds
            try:
                self.replies = self.fuse(uploads)
                break
            except MethodError as error:  # who was left out for what sticks out in his upload does not count
                if error.code != "quorum" or over or not self._awaited(set(self._unusable())):
                    raise
                self.say(f"{error}; waiting for more")
                self.too_few = {name: _stamp(path) for name, path in uploads.items()}
                return
            except RunError as error:  # the server of a run that was cut off may need a moment to go
                if error.code != "locked" or over:
                    raise
                self.say(str(error))
                self.sleep(self.limits.poll_seconds)
        self.last_news = self.clock()

    def _lacking(self) -> str:
        here = self._uploads()
        names = [name for name in sorted(self.federation.clients) if name not in here]
        declined = [f"{name} ({code})" for name, code in sorted(self.outcome.declined.items()) if name not in here]
        unusable = [f"{name} ({error.code})" for name, error in sorted(self._unusable().items())]
        lists = {"missing": names, "declined": declined, "cannot be used": unusable}
        return "; ".join(f"{label}: {', '.join(several)}" for label, several in lists.items() if several)

    def _time_to_end(self) -> bool:
        taking_part = [site for site in self.sites.values() if site.name in self.replies]
        delivered = {site.name for site in taking_part if site.delivered}
        if set(self.replies) <= delivered | set(self.outcome.declined):
            return True
        if self.clock() - self.began >= self.limits.deadline_seconds:
            return True
        busy = any(site.busy for site in taking_part)  # a site is at work on its reply, or Flower will say it is lost
        return not busy and self.clock() - self.last_news >= self.limits.grace_seconds

    def _end(self) -> None:
        here, out = self._uploads(), self.outcome
        out.missing = [name for name in sorted(self.federation.clients) if name not in here]
        with contextlib.suppress(FedBiCrossError):  # what ended the run already
            out.unusable = {name: error.code for name, error in self._unusable().items() if name not in self.replies}
        out.late = sorted(set(here) - set(self.replies) - set(out.unusable)) if self.replies else []
        out.undelivered = sorted(set(self.replies) - set(out.delivered))
        out.complete = bool(self.replies)
        write_atomic(self.folder / SUMMARY, canonical_json(vars(out)).encode())
        for label, names in (("missing", out.missing), ("late", out.late), ("not yet delivered", out.undelivered)):
            if names:
                self.say(f"{label}: {', '.join(names)}")


def _check_note(node: int, message: Message) -> dict[str, str]:
    """The note of an answer, unless it says that the site could not do it: then its code."""
    note = note_of(message)
    if note.get("code"):
        raise UploadError(_word(note["code"]), f"node {node} could not do it; the reason is in the log of that site")
    return note


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _word(text: str) -> str:
    """A word from outside, fit for a log."""
    plain = "".join(letter for letter in text if letter.isascii() and (letter.isalnum() or letter == "_"))
    return plain[:40] or "unnamed"


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """What `flwr run` starts at the server. The folder comes from the server's own environment, never with the run."""
    settings = settings_of_superlink()
    federation = load_federation(settings.federation_file)
    folder = settings.folder(federation)
    log = LogFile(Path(settings.work) / LOG, print)
    key = settings.load_key()

    options = RunOptions.from_run_config(context.run_config)
    try:
        options.check(federation)
        choices: dict[str, Any] = {"hold_on_notes": options.hold_on_notes, "trust": options.sites("trust", federation)}
        choices |= {"quorum": options.quorum or None, "device": settings.device}

        def fuse(uploads: Mapping[str, Path]) -> dict[str, bytes]:
            return fuse_uploads(federation, uploads, folder / SERVER_WORK, key, log, **choices)

        shot = OneShot(federation, folder, fuse, options, log.say)
        shot.outcome.flower_run = context.run_id
        shot.run(grid)
    except FedBiCrossError as error:
        log.say(str(error))
        raise
