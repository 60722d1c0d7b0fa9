"""What methods are composed of: teachers, students, shots, replay, heads on features. Loaded on first use."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
