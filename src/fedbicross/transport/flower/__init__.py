"""The same signed files, carried by Flower (extra ``flower``): TRAIN fetches the upload, EVALUATE brings the reply.

Nothing outside this package imports ``flwr``. ``client`` and ``server`` hold the two apps, ``deploy`` the commands,
``supervise`` what keeps the server's processes up, ``certificates`` what guards the connection, ``gate`` the door
before the SuperLink, and ``envelope`` is the only place where bytes become Flower messages and messages bytes.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
