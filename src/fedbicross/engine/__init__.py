"""How the work gets done on a device: training, prediction, ensembles. Submodules load on first use."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
