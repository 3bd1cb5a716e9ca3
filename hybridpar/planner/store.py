"""Why: what was measured for a plan is wanted again in the next run, and must not be taken for something else.

One JSON file for each thing that was measured, named after everything that it depends on. A file that is damaged is
measured again, and a directory that cannot be written costs only that: a cache never makes a run fail.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridpar.cluster import cache_directory
from hybridpar.pipeline.world import World

_log = logging.getLogger(__name__)


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
    try:
        entry = json.loads(path_of(kind, key, directory).read_text(encoding="utf-8"))
        if entry["key"] != json.loads(json.dumps(key)):
            return None
        return entry.get("data")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(kind: str, key: Mapping[str, Any], data: object, directory: Path | None = None) -> None:
    """Keep something; the file is replaced as a whole or not at all. See `path_of`. A warning says where that fails."""
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


def figures(kind: str, key: Mapping[str, Any], directory: Path | None) -> dict[str, float] | None:
    """Numbers by name that were kept; None where there are none that can be used.

    Args:
        kind: As for `path_of`.
        key: Likewise.
        directory: Where they are kept; None keeps nothing.
    """
    data = None if directory is None else load(kind, key, directory)
    try:
        found = {str(name): float(value) for name, value in data.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return None
    return found if all(map(math.isfinite, found.values())) else None


def remembered(
    kind: str,
    key: Mapping[str, Any],
    directory: Path | None,
    measure: Callable[[], Mapping[str, float]],
    world: World | None = None,
) -> dict[str, float]:
    """Numbers by name that were kept, or are measured now and kept.

    Args:
        kind: As for `path_of`.
        key: Likewise.
        directory: Where they are kept; None measures always.
        measure: Measures them; with a world it is a collective that gives all workers the same.
        world: All workers of a job that measure together: what the first of them knows counts, and it keeps what is
            found. None for a worker alone.
    """
    known = figures(kind, key, directory) if world is None else world.from_main(lambda: figures(kind, key, directory))
    if known is None:
        known = dict(measure())
        if directory is not None and (world is None or world.is_main):
            store(kind, key, known, directory)
    return known


def forget(kind: str, key: Mapping[str, Any]) -> bool:
    """Delete what was kept under a key; whether there was anything."""
    try:
        path_of(kind, key).unlink()
    except OSError:
        return False
    return True


def entries(kind: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Key and data of all that is kept of a kind, by the names of the files."""
    for path in sorted(folder().glob(f"{kind}-*.json")):
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            found = dict(entry["key"]), entry["data"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield found
