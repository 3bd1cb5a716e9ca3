"""Why: what was measured for a plan is wanted again in the next run, and must not be taken for something else.

One JSON file for each thing that was measured, named after everything that it depends on. A file that is damaged is
measured again, and a directory that cannot be written costs only that: a cache never makes a run fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridpar.cluster import cache_directory


def folder() -> Path:
    """Where it is kept: planner/ in the package's cache directory."""
    return cache_directory() / "planner"


def path_of(kind: str, key: Mapping[str, Any]) -> Path:
    """The file of something that was measured.

    Args:
        kind: What sort of thing it is.
        key: All that it depends on, as JSON would have it.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return folder() / f"{kind}-{digest}.json"


def load(kind: str, key: Mapping[str, Any]) -> Any | None:
    """What was kept under a key; None where there is nothing that can be used.

    Args:
        kind: As for `path_of`.
        key: Likewise.
    """
    try:
        entry = json.loads(path_of(kind, key).read_text(encoding="utf-8"))
        if entry["key"] != json.loads(json.dumps(key)):
            return None
        return entry.get("data")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(kind: str, key: Mapping[str, Any], data: object) -> None:
    """Keep something; the file is replaced as a whole or not at all."""
    path = path_of(kind, key)
    entry = {"key": key, "data": data}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(entry, file)
            os.replace(aside, path)
        except BaseException:
            os.unlink(aside)
            raise


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
