"""A run from its settings to its rows: configuration, storage, the loop over seeds and methods."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
