"""One-shot, personalised federated learning for medical images: one file out of each hospital, one file back.

Importing this package is instant: the names in ``__init__.pyi`` are loaded, and torch with them, when first used.
"""

import lazy_loader as lazy

__version__ = "0.1.0"
__getattr__, _, __all__ = lazy.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __dir__() -> list[str]:
    return __all__
