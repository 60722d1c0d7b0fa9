"""The papers' equations: pure functions of tensors, and small classes that hold what a loop changes.

None knows a client, an upload or a context. Each submodule is imported when it is first used, and torch with it.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
