"""How the bytes travel between hospitals and server: files carried by hand, or an existing engine.

Whatever the carrier, the same functions of ``files`` make, check, fuse and open the same signed bytes.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
