from . import clinical as clinical
from . import metrics as metrics
from . import mmd as mmd
from . import protocols as protocols
from . import reconstruction as reconstruction
from . import summary as summary
from .names import METRICS as METRICS
from .names import PROTOCOLS as PROTOCOLS
