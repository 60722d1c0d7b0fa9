"""Where images come from and who holds them: loaders, the embedded ``cells`` set, downloads, partitions."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
