"""The pipeline schedules, one per file.

Every module here is imported with the package, and enters its schedule into `SCHEDULES`. None of them needs torch.
"""

import importlib
import pkgutil

from hybridpar.schedule.schedules.base import (
    SCHEDULES,
    ScheduleRequest,
    make,
    make_all,
    order_of_replica,
    planned_schedules,
    register_schedule,
)

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = [
    "SCHEDULES",
    "ScheduleRequest",
    "make",
    "make_all",
    "order_of_replica",
    "planned_schedules",
    "register_schedule",
]
