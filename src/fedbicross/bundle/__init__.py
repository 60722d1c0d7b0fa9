"""The trust boundary: how tensors and a manifest become one file, and how such a file is read back.

``pack``/``unpack`` (format), ``sign``/``check_signer`` (who made it), ``read_file`` (one safe read),
``validate`` (does it make sense), ``audit`` (what was accepted and refused).
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
