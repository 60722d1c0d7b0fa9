from . import federation_file as federation_file
from . import files as files
from . import flower as flower
from . import model_folder as model_folder
from . import onnx_export as onnx_export
from . import site_data as site_data
from . import work as work
