"""Which clients belong together: FedBiCross stage 1, the rivals of its Fig. 2, and a choice of K from uploads alone."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
