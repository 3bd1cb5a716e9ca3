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

if TYPE_CHECKING:
    from hybridpar.config import TrainConfig
    from hybridpar.errors import HybridparError
    from hybridpar.integrations.data_parallel import DataParallel
    from hybridpar.optim.onebit_adam import OnebitAdam
    from hybridpar.partition import partition_model
    from hybridpar.plan import Plan, read_plan
    from hybridpar.train.trainer import Evaluation, StepResult, Trainer

__version__ = "0.1.0"

_HOME = {
    "DataParallel": "hybridpar.integrations.data_parallel",
    "Evaluation": "hybridpar.train.trainer",
    "HybridparError": "hybridpar.errors",
    "OnebitAdam": "hybridpar.optim.onebit_adam",
    "Plan": "hybridpar.plan",
    "StepResult": "hybridpar.train.trainer",
    "TrainConfig": "hybridpar.config",
    "Trainer": "hybridpar.train.trainer",
    "partition_model": "hybridpar.partition",
    "read_plan": "hybridpar.plan",
}

__all__ = [
    "DataParallel",
    "Evaluation",
    "HybridparError",
    "OnebitAdam",
    "Plan",
    "StepResult",
    "TrainConfig",
    "Trainer",
    "__version__",
    "partition_model",
    "read_plan",
]


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
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _packages():
        return importlib.import_module(f"hybridpar.{name}")
    raise AttributeError(f"module 'hybridpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_packages()})


def _packages() -> set[str]:
    """Names of the sub-packages; none of them is imported."""
    return {module.name for module in pkgutil.iter_modules(__path__) if module.ispkg}
