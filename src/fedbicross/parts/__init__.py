"""What methods are composed of: pieces that need a client, uploads or a context; each is loaded on first use."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
