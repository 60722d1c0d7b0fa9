"""What an upload gives away, measured at the site before it leaves, and the site's own rules about it.

Nothing here reads images from disk: a site hands over what it trained on and what it kept back.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
