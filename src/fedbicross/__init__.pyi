from .api import resume as resume
from .api import run as run
from .data import Dataset as Dataset
from .data import load_dataset as load_dataset
from .deploy.folder import load_model as load_model
from .federation import simulate as simulate
from .methods import METHODS as METHODS

__version__: str
