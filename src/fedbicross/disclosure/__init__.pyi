from . import audit as audit
from . import effort as effort
from . import policy as policy
from . import shadows as shadows
from . import statement as statement
from . import tokens as tokens
