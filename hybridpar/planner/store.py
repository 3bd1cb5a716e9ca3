"""A cache of measurements: one JSON file for each, named after everything that it depends on.

A damaged file is measured again, and a directory that cannot be written is only a warning: the cache never makes a run
fail. Noisy measurements are repeated a few times, and are not kept where they stay noisy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.formats.cache import cache_directory
from hybridpar.formats.file_reader import read_json
from hybridpar.machine.steady import MOST_NOISE, repeat_until_steady

_log = logging.getLogger(__name__)

#: The name of a number that is about the others, see `remembered`, and how often these are measured at most.
NOISE, MOST_TRIES = "noise", 3


def folder() -> Path:
    """Where it is kept: planner/ in the package's cache directory."""
    return cache_directory() / "planner"


def path_of(kind: str, key: Mapping[str, Any], directory: Path | None = None) -> Path:
    """The file of something that was measured.

    Args:
        kind: What sort of thing it is.
        key: All that it depends on, as JSON would have it.
        directory: Where it is kept; default: `folder()`.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return (directory or folder()) / f"{kind}-{digest}.json"


def load(kind: str, key: Mapping[str, Any], directory: Path | None = None) -> Any | None:
    """What was kept under a key; None where there is nothing that can be used.

    Args:
        kind: As for `path_of`.
        key: Likewise.
        directory: Likewise.
    """
    entry = _entry(path_of(kind, key, directory))
    return entry.get("data") if entry.get("key") == json.loads(json.dumps(key)) else None


def _entry(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where that is no entry."""
    try:
        found = read_json(path, "the measurement", UsageError)
    except UsageError:
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("key"), dict) else {}


def store(kind: str, key: Mapping[str, Any], data: object, directory: Path | None = None) -> None:
    """Keep something; the file is replaced as a whole or not at all. See `path_of`. A warning says where that fails.

    Args:
        kind: What sort of measurement it is.
        key: Everything that it depends on, as JSON would have it.
        data: What to keep, as JSON would have it.
        directory: As for `path_of`.
    """
    path = path_of(kind, key, directory)
    entry = {"key": key, "data": data}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(entry, file)
            os.replace(aside, path)
        except BaseException:
            os.unlink(aside)
            raise
    except OSError as error:
        _log.warning(
            "%s is not kept, and will be measured again: cannot write %s: %s", kind, path.parent, error.strerror
        )


def steadied(kind: str, measure: Callable[[], Mapping[str, float]], *, tell: bool = True) -> dict[str, float]:
    """Numbers by name, measured again where repetitions lie too far apart.

    Args:
        kind: What sort of thing it is, for a warning.
        measure: Measures them. One that is called `noise` says how far repetitions lay apart: above `MOST_NOISE` all is
            measured again, `MOST_TRIES` times at most, and the least noisy counts.
        tell: Warn where they still lie too far apart.

    Returns:
        The numbers, without `noise`.
    """
    return _steadied(kind, measure, tell)[0]


def _steadied(kind: str, measure: Callable[[], Mapping[str, float]], tell: bool) -> tuple[dict[str, float], bool]:
    """As `steadied`, and whether the numbers are steady enough to be kept."""
    tries, noise = repeat_until_steady(lambda: dict(measure()), _least_noise, MOST_NOISE, MOST_TRIES)
    found = min(tries, key=_noise_of)
    found.pop(NOISE, None)
    return found, not (tell and tell_noise(kind, noise))


def remembered(
    kind: str,
    key: Mapping[str, Any],
    directory: Path | None,
    measure: Callable[[], Mapping[str, float]],
    world: World | None = None,
) -> dict[str, float]:
    """Numbers by name that were kept, or are measured now and kept unless they are noisy.

    Args:
        kind: As for `path_of`.
        key: Likewise.
        directory: Where they are kept; None measures always.
        measure: As for `steadied`; with a world it is a collective that gives all workers the same.
        world: All workers of a job that measure together: what the first of them knows counts, and it keeps what is
            found. None for a worker alone.

    Returns:
        The numbers, without `noise`.
    """
    known = None
    if directory is not None:
        known = (
            _figures(kind, key, directory) if world is None else world.from_main(lambda: _figures(kind, key, directory))
        )
    if known is not None:
        return known
    main = world is None or world.is_main
    found, steady = _steadied(kind, measure, main)
    if main and steady and directory is not None:
        store(kind, key, found, directory)
    return found


def _figures(kind: str, key: Mapping[str, Any], directory: Path | None) -> dict[str, float] | None:
    """Numbers by name that were kept; None where there are none that can be used."""
    kept = None if directory is None else load(kind, key, directory)
    try:
        found = {str(name): float(value) for name, value in kept.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return None
    return found if all(map(math.isfinite, found.values())) else None


def _noise_of(figures: Mapping[str, float]) -> float:
    return figures.get(NOISE, 0.0)


def _least_noise(tries: Sequence[Mapping[str, float]]) -> float:
    return min(map(_noise_of, tries))


def tell_noise(kind: str, noise: float) -> bool:
    """Whether something must not be kept, as its repetitions lay too far apart; a warning says so.

    Args:
        kind: As for `path_of`.
        noise: How far they lay apart, relative.
    """
    if noise <= MOST_NOISE:
        return False
    _log.warning(
        "%s: repeated measurements lie %.0f %% apart; they are used now and not kept: measure again when nothing else "
        "runs",
        kind,
        100 * noise,
    )
    return True


def forget(kind: str, key: Mapping[str, Any]) -> bool:
    """Delete what was kept under a key; whether there was anything.

    Args:
        kind: What sort of measurement it is.
        key: Everything that it depends on, as JSON would have it.

    Returns:
        Whether there was anything.
    """
    try:
        path_of(kind, key).unlink()
    except OSError:
        return False
    return True


def entries(kind: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Key and data of all that is kept of a kind, by the names of the files.

    Args:
        kind: What sort of measurement it is.
    """
    for path in sorted(folder().glob(f"{kind}-*.json")):
        entry = _entry(path)
        if "data" in entry:
            yield entry["key"], entry["data"]
