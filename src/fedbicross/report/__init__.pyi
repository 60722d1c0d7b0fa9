from . import rounds as rounds
from . import summary as summary
from . import tables as tables
from . import text as text
from . import verdict as verdict
from .write import write_report as write_report
