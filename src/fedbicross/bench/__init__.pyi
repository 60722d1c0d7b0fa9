from . import budgets as budgets
from . import cells as cells
from . import page as page
from . import publish as publish
from . import statistics as statistics
from . import suite as suite
from . import table as table
from . import work as work
