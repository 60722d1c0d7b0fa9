from . import audit as audit
from . import config as config
from . import progress as progress
from . import runner as runner
from . import spread as spread
from . import store as store
