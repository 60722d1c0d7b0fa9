"""What a shell offers after TAB (`fedbicross --install-completion`). Torch-free, so that it comes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fedbicross import data as images
from fedbicross import methods as known
from fedbicross import models as networks
from fedbicross.evaluate.names import CHOICES


def _offer(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete the last of several names with commas between them."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


methods = _offer(lambda: [*known.method_names(), *known.PLUGINS.names()])
models = _offer(lambda: networks.MODELS)
data = _offer(lambda: [name for name, info in images.DATASETS.items() if not info.refused])
partitions = _offer(lambda: images.PARTITIONS)
metrics = _offer(lambda: CHOICES)
