from . import gate as gate
from . import local as local
from . import pool as pool
from . import teachers as teachers
