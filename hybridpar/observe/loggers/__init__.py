"""The loggers, one per file.

Every module here enters its logger into `LOGGERS`, and imports its tool when a logger is created.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
