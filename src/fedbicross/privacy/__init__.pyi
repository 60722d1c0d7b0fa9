from . import accountant as accountant
from . import gaussian as gaussian
from . import ledger as ledger
from . import noise as noise
from . import statement as statement
