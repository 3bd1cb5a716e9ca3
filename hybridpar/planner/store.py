"""Measures numbers until repetitions agree, and keeps them.

Noisy measurements are repeated a few times, and are not kept where they stay noisy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybridpar.comm.world import World
from hybridpar.formats.cache import load_measurement, store_measurement
from hybridpar.machine.steady import MOST_NOISE, repeat_until_steady

_log = logging.getLogger(__name__)

#: The name of a number that is about the others, see `remembered`, and how often these are measured at most.
NOISE, MOST_TRIES = "noise", 3


def remembered(
    kind: str,
    key: Mapping[str, Any],
    directory: Path | None,
    measure: Callable[[], Mapping[str, float]],
    world: World | None = None,
) -> dict[str, float]:
    """Numbers by name that were kept, or are measured now and kept unless they are noisy."""
    if directory is not None:
        known = (
            _figures(kind, key, directory) if world is None else world.from_main(lambda: _figures(kind, key, directory))
        )
        if known is not None:
            return known
    tries, noise = repeat_until_steady(
        lambda: dict(measure()), lambda tries: min(map(_noise_of, tries)), MOST_NOISE, MOST_TRIES
    )
    found = min(tries, key=_noise_of)
    found.pop(NOISE, None)
    if world is not None and not world.is_main:
        return found
    if noise > MOST_NOISE:
        _log.warning(
            "%s: repeated measurements lie %.0f %% apart; they are used now and not kept: measure again when nothing "
            "else runs",
            kind,
            100 * noise,
        )
    elif directory is not None:
        store_measurement(kind, key, found, directory)
    return found


def _figures(kind: str, key: Mapping[str, Any], directory: Path) -> dict[str, float] | None:
    """Numbers by name that were kept; None where there are none that can be used."""
    kept: Any = load_measurement(kind, key, directory)
    try:
        found = {str(name): float(value) for name, value in kept.items()}
    except (AttributeError, TypeError, ValueError):
        return None
    return found if all(map(math.isfinite, found.values())) else None


def _noise_of(figures: Mapping[str, float]) -> float:
    return figures.get(NOISE, 0.0)
