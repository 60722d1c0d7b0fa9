from . import audit as audit
from . import config as config
from . import integrity as integrity
from . import progress as progress
from . import ray_workers as ray_workers
from . import runner as runner
from . import store as store
