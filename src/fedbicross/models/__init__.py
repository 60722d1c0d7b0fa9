"""Classifiers by name; importing this package costs no torch: each name is loaded when it is first used.

Every model is ``head(features(x))``: ``features`` gives [B, D], ``head`` is one linear layer.
Weights are filled only by ``initialise`` from an explicit generator; the global random state is never touched.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
