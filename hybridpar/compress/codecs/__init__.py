"""The codecs, one per file.

Every module here is imported with the package, and enters its codec into `CODECS`.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
