"""Train PyTorch vision models faster on the hardware you have.

Names and sub-packages are imported when they are first used, so that `import hybridpar` and `hybridpar --help` cost
nothing: after `import hybridpar`, `hybridpar.compress` is there without an import of its own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import pkgutil
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hybridpar.formats.lazy_names import lazy_names

if TYPE_CHECKING:
    from hybridpar.config import TrainConfig as TrainConfig
    from hybridpar.errors import HybridparError as HybridparError
    from hybridpar.integrations.data_parallel import DataParallel as DataParallel
    from hybridpar.optim.onebit_adam import OnebitAdam as OnebitAdam
    from hybridpar.partition import partition_model as partition_model
    from hybridpar.plan import Plan as Plan
    from hybridpar.plan import read_plan as read_plan
    from hybridpar.train.trainer import Evaluation as Evaluation
    from hybridpar.train.trainer import StepResult as StepResult
    from hybridpar.train.trainer import Trainer as Trainer

__version__ = "0.1.0"

_load, _, _names = lazy_names(__name__, __file__)
__all__ = [*_names, "__version__"]


#: Modules that documentation once named, and where they are now.
_MOVED = {
    "hybridpar.cluster_file": "hybridpar.machine.cluster_file",
    "hybridpar.pipeline.actions": "hybridpar.schedule.actions",
    "hybridpar.pipeline.check": "hybridpar.schedule.check",
    "hybridpar.pipeline.picture": "hybridpar.schedule.picture",
    "hybridpar.pipeline.program": "hybridpar.schedule.program",
    "hybridpar.pipeline.schedules": "hybridpar.schedule.schedules",
    "hybridpar.pipeline.simulate": "hybridpar.schedule.simulate",
    "hybridpar.recipes": "hybridpar.optim",
    "hybridpar.recipes.gain": "hybridpar.train.gain",
    "hybridpar.recipes.onebit_adam": "hybridpar.optim.onebit_adam",
    "hybridpar.trainer": "hybridpar.train.trainer",
}


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets a module be imported by its former name: the former module holds the names of the new one."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, is_package=True) if name in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = _MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is {new} now", DeprecationWarning, stacklevel=2)
        names = vars(importlib.import_module(new))
        vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})


sys.meta_path.insert(0, _MovedModules())


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"hybridpar.{name}") if name in _packages() else _load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_names, *_packages()})


def _packages() -> set[str]:
    """Names of the sub-packages; none of them is imported."""
    return {module.name for module in pkgutil.iter_modules(__path__) if module.ispkg}
