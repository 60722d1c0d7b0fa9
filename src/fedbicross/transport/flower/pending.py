"""Questions to nodes and their answers. Flower's own ``send_and_receive`` hands everything over when the last answer
is in; here each answer is taken the moment it comes, and one at a time, so that the server holds one upload in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid


@dataclass
class PendingMessages:
    """Messages under way: which node each went to. An error made by Flower does not name the node itself."""

    grid: Grid
    waiting: dict[str, int] = field(default_factory=dict)  # node by message id

    def send(self, message: Message) -> bool:
        """Send one message; False if Flower did not take it."""
        node = message.metadata.dst_node_id
        for number in self.grid.push_messages([message]):
            if number:
                self.waiting[number] = node
                return True
        return False

    def answers(self) -> Iterator[tuple[int, Message]]:
        """What has come since the last call: the node that was asked, and its answer."""
        for number, node in list(self.waiting.items()):
            for message in self.grid.pull_messages([number]):
                del self.waiting[number]
                yield node, message
                break
