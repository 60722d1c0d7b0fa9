from .api import resume as resume
from .api import run as run
from .context import Context as Context
from .context import Task as Task
from .data import Dataset as Dataset
from .data import load_dataset as load_dataset
from .deploy.folder import load_model as load_model
from .engine.recipe import Training as Training
from .errors import FedBiCrossError as FedBiCrossError
from .federation import simulate as simulate
from .messages import Client as Client
from .messages import Predictor as Predictor
from .messages import Reply as Reply
from .messages import Upload as Upload
from .methods import METHODS as METHODS
from .methods.base import Method as Method
from .methods.base import MethodConfig as MethodConfig
from .results import Results as Results

__version__: str
