"""How a run is judged: protocols, metrics and summaries. Submodules load on first use (numpy costs time)."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
