"""The papers' equations as pure functions; each submodule is imported when it is first used, and torch with it."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
