"""The operations that can be tuned, each in one file; all files are imported when the first is asked for."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
