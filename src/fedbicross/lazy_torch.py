"""``torch`` for modules that must import in an instant, such as methods: it is loaded when its first attribute is used.

Not by `lazy_loader.load`, which leaves a half-loaded torch in ``sys.modules``, where other packages look for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()
