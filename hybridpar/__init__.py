"""Train PyTorch vision models faster on the hardware you have.

Names and sub-packages are imported when they are first used, so that `import hybridpar` and `hybridpar --help` cost
nothing: after `import hybridpar`, `hybridpar.compress` is there without an import of its own.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from hybridpar.registry import lazy_names

if TYPE_CHECKING:
    from hybridpar.config import TrainConfig as TrainConfig
    from hybridpar.errors import HybridparError as HybridparError
    from hybridpar.integrations.data_parallel import DataParallel as DataParallel
    from hybridpar.partition import partition_model as partition_model
    from hybridpar.plan import Plan as Plan
    from hybridpar.plan import read_plan as read_plan
    from hybridpar.train.trainer import Evaluation as Evaluation
    from hybridpar.train.trainer import StepResult as StepResult
    from hybridpar.train.trainer import Trainer as Trainer

__version__ = "0.1.0"

_MODULES = {
    "config": "TrainConfig",
    "errors": "HybridparError",
    "integrations.data_parallel": "DataParallel",
    "partition": "partition_model",
    "plan": "Plan read_plan",
    "train.trainer": "Evaluation StepResult Trainer",
}
_load, _, _names = lazy_names(__name__, _MODULES)
__all__ = [*_names, "__version__"]


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"hybridpar.{name}") if name in _packages() else _load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_names, *_packages()})


def _packages() -> set[str]:
    """Names of the sub-packages; none of them is imported."""
    return {module.name for module in pkgutil.iter_modules(__path__) if module.ispkg}
