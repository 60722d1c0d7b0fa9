"""What a run has to say: one self-contained page, and tables to paste into a paper or a spreadsheet."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
