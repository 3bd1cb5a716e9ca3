"""Cuts a model into balanced pipeline stages, for any training loop.

Trace, measure, balance, split. The names below are the public ones; they load torch when first used, so that
the command line can describe its options without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridpar.registry import lazy_names

if TYPE_CHECKING:
    from hybridpar.partition.planning import PartitionedModel as PartitionedModel
    from hybridpar.partition.planning import partition_model as partition_model
    from hybridpar.partition.planning import stages_from_plan as stages_from_plan
    from hybridpar.partition.profile_cache import memory_format_name as memory_format_name
    from hybridpar.partition.split import split_model as split_model
    from hybridpar.partition.stage import Stage as Stage
    from hybridpar.partition.stage import run_stages as run_stages
    from hybridpar.partition.trace import trace_model as trace_model
    from hybridpar.partition.tracer import TracedModel as TracedModel
    from hybridpar.partition.units import ModelUnits as ModelUnits
    from hybridpar.partition.units import find_units as find_units

_MODULES = {
    "planning": "PartitionedModel partition_model stages_from_plan",
    "profile_cache": "memory_format_name",
    "split": "split_model",
    "stage": "Stage run_stages",
    "trace": "trace_model",
    "tracer": "TracedModel",
    "units": "ModelUnits find_units",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
