"""What becomes of a finished model, of a run or of a federation: calibrated, compared, described, exported, used."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
