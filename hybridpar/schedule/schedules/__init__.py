"""The pipeline schedules, one per file.

A module here enters its schedule into `SCHEDULES`, which imports it when it is asked for. None of them needs torch.
"""

from hybridpar.schedule.schedules.base import (
    SCHEDULES,
    ScheduleRequest,
    make,
    make_all,
    order_of_replica,
    planned_schedules,
    register_schedule,
)

__all__ = [
    "SCHEDULES",
    "ScheduleRequest",
    "make",
    "make_all",
    "order_of_replica",
    "planned_schedules",
    "register_schedule",
]
