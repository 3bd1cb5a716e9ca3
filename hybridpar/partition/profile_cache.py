"""Keeps measured profiles, under everything that their times depend on.

What is damaged, or of other units than the model's, is measured again. A profile that was taken while other
programs had the cores is not kept.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter

from hybridpar.formats.cache import load_measurement, store_measurement
from hybridpar.machine.devices import cpu_name
from hybridpar.machine.process import describe_allocator
from hybridpar.machine.steady import MOST_NOISE
from hybridpar.models import model_fingerprint
from hybridpar.partition.profile import Progress, UnitTimes, measure_units
from hybridpar.partition.units import ModelUnits

_log = logging.getLogger(__name__)

#: Name of the profiles in the cache.
KIND = "units"

TIMES: TypeAdapter[UnitTimes] = TypeAdapter(UnitTimes)


def device_name(device: torch.device) -> str:
    """Name of a device as its maker calls it."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else cpu_name()


def memory_format_name(tensor: torch.Tensor) -> Literal["channels_last", "contiguous"]:
    """`channels_last` or `contiguous`."""
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    return "channels_last" if last else "contiguous"


def measured_profile(
    units: ModelUnits,
    inputs: Sequence[torch.Tensor],
    *,
    passes: int,
    threads: int | None,
    cache: Path | None,
    progress: Progress | None = None,
) -> UnitTimes:
    """The times of all units: those that were kept, or measured now and kept."""
    key = profile_key(units, inputs, threads or torch.get_num_threads(), passes)
    known = load_measurement(KIND, key, TIMES, cache) if cache is not None else None
    fits = known is not None and len(known.forward_ms) == len(known.backward_ms) == len(units.graph)
    if known is not None and fits and known.noise <= MOST_NOISE:
        return known
    times = measure_units(units, inputs, passes=passes, threads=threads, progress=progress)
    if cache is None:  # the planner's, on every worker: it counts with their noise
        return times
    if not times.noise <= MOST_NOISE:
        _log.warning(
            "repeated timings of the layers of %s differ by %.0f %%, as other programs run too: they are used now, and "
            "measured again the next time",
            type(units.model).__name__,
            100 * times.noise,
        )
    else:
        store_measurement(KIND, key, TIMES.dump_python(times, mode="json"), cache)
    return times


def machine_key(device: torch.device, threads: int | None = None) -> dict[str, Any]:
    """What times on a device depend on, whatever is measured."""
    return {
        "device": device_name(device),
        "threads": threads or torch.get_num_threads(),
        "allocator": describe_allocator(),
        "torch": str(torch.__version__),
    }


def profile_key(units: ModelUnits, inputs: Sequence[torch.Tensor], threads: int, passes: int) -> dict[str, Any]:
    """Everything that measured times depend on."""
    parameter = next(units.model.parameters(), inputs[0])
    return {
        "model": model_fingerprint(units.model),
        "inputs": [[list(item.shape), str(item.dtype), memory_format_name(item)] for item in inputs],
        "dtype": str(parameter.dtype),
        "memory_format": memory_format_name(
            next((item for item in units.model.parameters() if item.dim() == 4), inputs[0])
        ),
        **machine_key(inputs[0].device, threads),
        "passes": passes,
        "units": [unit.name for unit in units.graph.units],
        # Layers that do the same in another way say so, and how.
        "variants": sorted({str(getattr(module, "kernel_variant", "")) for module in units.model.modules()} - {""}),
    }
