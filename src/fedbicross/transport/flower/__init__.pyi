from . import certificates as certificates
from . import deploy as deploy
from . import settings as settings
from . import supervise as supervise
from .version import NEWEST as NEWEST
from .version import OLDEST as OLDEST
from .version import TESTED as TESTED
from .version import require_flower as require_flower
