"""What methods are composed of: pieces that need a client, uploads or a context, shared by several methods.

Submodules are imported on first use, so that listing methods and checking settings needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbicross._lazy import lazy_submodules

if TYPE_CHECKING:
    from fedbicross.parts import gate as gate
    from fedbicross.parts import local as local
    from fedbicross.parts import pool as pool
    from fedbicross.parts import teachers as teachers

__getattr__ = lazy_submodules(__name__, ["gate", "local", "pool", "teachers"])
