"""Caches measured profiles.

A profile is one JSON file, named after everything that its times depend on. A file that is damaged, or whose units
are not the model's, is measured again: a cache never makes a command fail. A profile that was taken while other
programs had the cores is measured again a few times, and is not kept where that did not help.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybridpar.errors import UsageError
from hybridpar.formats.cache import cache_directory
from hybridpar.formats.file_reader import read_json
from hybridpar.machine.cluster import cpu_name
from hybridpar.machine.process import describe_allocator
from hybridpar.machine.steady import MOST_NOISE, repeat_until_steady
from hybridpar.models import model_fingerprint
from hybridpar.partition.profile import Progress, UnitTimes, measure_units, steadied
from hybridpar.partition.units import ModelUnits

_log = logging.getLogger(__name__)

#: A profile with more noise than this is measured again, so often at most, and not after so many seconds.
NOISY, MOST_TRIES, MOST_SECONDS = 0.1, 3, 20.0


def profiles_directory() -> Path:
    """Where profiles are kept: profiles/ in the package's cache directory."""
    return cache_directory() / "profiles"


def device_name(device: torch.device) -> str:
    """Name of a device as its maker calls it.

    Args:
        device: The device.
    """
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else cpu_name()


def memory_format_name(tensor: torch.Tensor) -> str:
    """`channels_last` or `contiguous`.

    Args:
        tensor: Of any shape; only one of four dimensions can be channels_last.
    """
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
    announce: Callable[[str], None] | None = None,
    seconds: float = MOST_SECONDS,
) -> UnitTimes:
    """The times of all units: those that were kept, or measured now and kept.

    Args:
        units: The model and its units.
        inputs: One micro-batch, as for `measure_units`.
        passes: Passes of each measurement.
        threads: Intra-op threads on CPU; None keeps the present number.
        cache: Directory of profiles measured before; None measures always.
        progress: Told after every pass.
        announce: Told in one line what is being done.
        seconds: No measurement is begun again after so many.

    Raises:
        UsageError: See `measure_units`.
    """
    say = announce or (lambda line: None)
    key = profile_key(units, inputs, threads or torch.get_num_threads(), passes)
    known = load_profile(key, cache) if cache is not None else None
    if known is not None and known.noise <= MOST_NOISE:
        say("using the profile measured before")
        return known
    say("measuring")
    measure = partial(measure_units, units, inputs, passes=passes, threads=threads, progress=progress)
    tries, noise = repeat_until_steady(measure, lambda taken: steadied(taken).noise, NOISY, MOST_TRIES, seconds)
    times = steadied(tries)
    if not noise <= MOST_NOISE:
        _log.warning(
            "the profile of %s has %.0f %% noise after %d measurement(s): it is used now and not kept; measure again "
            "when nothing else runs",
            type(units.model).__name__,
            100 * noise,
            len(tries),
        )
    elif cache is not None:
        store_profile(key, times, cache)
    return times


def profile_key(units: ModelUnits, inputs: Sequence[torch.Tensor], threads: int, passes: int) -> dict[str, Any]:
    """Everything that measured times depend on.

    Args:
        units: The model and its units.
        inputs: One micro-batch.
        threads: Intra-op threads on CPU.
        passes: Passes of a measurement.
    """
    parameter = next(units.model.parameters(), inputs[0])
    return {
        "model": model_fingerprint(units.model),
        "inputs": [[list(item.shape), str(item.dtype), memory_format_name(item)] for item in inputs],
        "dtype": str(parameter.dtype),
        "memory_format": memory_format_name(
            next((item for item in units.model.parameters() if item.dim() == 4), inputs[0])
        ),
        "device": device_name(inputs[0].device),
        "threads": threads,
        "allocator": describe_allocator(),
        "passes": passes,
        "torch": str(torch.__version__),
        "units": [unit.name for unit in units.graph.units],
        # Layers that do the same in another way say so, and how.
        "variants": sorted(
            {str(one) for module in units.model.modules() if (one := getattr(module, "kernel_variant", ""))}
        ),
    }


def profile_path(key: dict[str, Any], directory: Path) -> Path:
    """The file of a profile."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return directory / f"{key['model']}-{digest}.json"


def load_profile(key: dict[str, Any], directory: Path) -> UnitTimes | None:
    """The times measured for a key before, or None."""
    try:
        data = read_json(profile_path(key, directory), "the profile", UsageError)
        times = data["times"]
        forward, backward = tuple(map(float, times["forward_ms"])), tuple(map(float, times["backward_ms"]))
        rest = [float(times[name]) for name in ("step_ms", "calibration", "noise", "spread")]
    except (UsageError, ValueError, KeyError, TypeError):
        return None
    count = len(key["units"])
    numbers = (*forward, *backward, *rest)
    if data.get("key") != key or len(forward) != count or len(backward) != count:
        return None
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        return None
    step_ms, calibration, noise, spread = rest
    return UnitTimes(forward, backward, step_ms, calibration, noise, spread)


def store_profile(key: dict[str, Any], times: UnitTimes, directory: Path) -> None:
    """Keep times for later; where the directory cannot be written, nothing is kept."""
    path = profile_path(key, directory)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps({"key": key, "times": asdict(times)}, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # where the directory is a file, for instance
            aside.unlink()
