from . import rounds as rounds
from . import tables as tables
from .write import write_report as write_report
