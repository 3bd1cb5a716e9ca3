"""Train PyTorch vision models faster on the hardware you have.

Names are imported when they are first used, so that `import hybridpar` and `hybridpar --help` cost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridpar.config import TrainConfig
    from hybridpar.errors import HybridparError
    from hybridpar.partition import partition_model
    from hybridpar.plan import Plan, read_plan
    from hybridpar.recipes.onebit_adam import OnebitAdam
    from hybridpar.trainer import Evaluation, StepResult, Trainer

__version__ = "0.1.0"

_HOME = {
    "Evaluation": "hybridpar.trainer",
    "HybridparError": "hybridpar.errors",
    "OnebitAdam": "hybridpar.recipes.onebit_adam",
    "Plan": "hybridpar.plan",
    "StepResult": "hybridpar.trainer",
    "TrainConfig": "hybridpar.config",
    "Trainer": "hybridpar.trainer",
    "partition_model": "hybridpar.partition",
    "read_plan": "hybridpar.plan",
}

__all__ = [
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hybridpar' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
