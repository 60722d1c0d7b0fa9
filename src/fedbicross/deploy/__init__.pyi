from . import answers as answers
from . import card as card
from . import compare as compare
from . import folder as folder
from . import graphs as graphs
from . import run_models as run_models
