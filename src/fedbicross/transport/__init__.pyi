from . import federation_file as federation_file
from . import files as files
from . import flower as flower
from . import local_page as local_page
from . import post as post
from . import site_audit as site_audit
from . import site_data as site_data
from . import work as work
