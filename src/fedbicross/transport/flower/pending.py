"""Questions to nodes and their answers. Flower's own ``send_and_receive`` hands everything over when the last answer
is in; here each answer is taken the moment it comes, and one at a time, so that the server holds one upload in memory.

Nothing that one node sends, or does not finish sending, keeps the answers of others away; and a SuperLink that
hiccups is asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid


class _Pull:
    """One answer being fetched, in a thread: Flower waits up to two hours for a node to finish sending."""

    def __init__(self, grid: Grid, number: str) -> None:
        self.found: list[Message] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._fetch, args=(grid, number), daemon=True)
        self._thread.start()

    def _fetch(self, grid: Grid, number: str) -> None:
        try:
            self.found = list(grid.pull_messages([number]))
        except Exception as error:  # kept for the thread that asks
            self.error = error

    def done(self, patience: float) -> bool:
        """Whether it has come to an end, waiting for at most so many seconds."""
        self._thread.join(patience)
        return not self._thread.is_alive()


@dataclass
class PendingMessages:
    """Messages under way: which node each went to. An error made by Flower does not name the node itself."""

    grid: Grid
    say: Callable[[str], None]
    patience: float  # seconds for one answer while others wait; then it is fetched beside them
    waiting: dict[str, int] = field(default_factory=dict)  # node by message id
    pulls: dict[str, _Pull] = field(default_factory=dict)  # those that take longer
    away: bool = False  # the SuperLink did not answer the last time

    def nodes(self) -> list[Any]:
        """The nodes that are online."""
        try:
            found = list(self.grid.get_nodes())
        except httpx.HTTPError as error:
            self._no_answer(error)
            return []
        self.away = False
        return found

    def send(self, message: Message) -> bool:
        """Send one message; False if Flower did not take it."""
        node = message.metadata.dst_node_id
        try:
            numbers = list(self.grid.push_messages([message]))
        except httpx.HTTPError as error:
            self._no_answer(error)
            return False
        for number in numbers:
            if number:
                self.waiting[number] = node
                return True
        return False

    def answers(self) -> Iterator[tuple[int, Message | None]]:
        """What has come since the last call: the node that was asked, and its answer; none if it is unreadable."""
        for number, node in list(self.waiting.items()):
            begun = self.pulls.pop(number, None)
            pull = begun or _Pull(self.grid, number)
            if not pull.done(0.0 if begun else self.patience):
                self.pulls[number] = pull
            elif isinstance(pull.error, httpx.HTTPError):
                self._no_answer(pull.error)  # asked again: Flower has the answer still, or says that it is lost
            elif pull.error is not None or pull.found:
                del self.waiting[number]
                yield node, pull.found[0] if pull.found else None

    def _no_answer(self, error: httpx.HTTPError) -> None:
        if not self.away:
            self.say(f"Flower's SuperLink does not answer ({type(error).__name__}); it is asked again")
        self.away = True
