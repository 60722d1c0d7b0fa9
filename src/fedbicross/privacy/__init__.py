"""Differential privacy: the Gaussian mechanism, what releases add up to, where noise comes from, a site's ledger."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
