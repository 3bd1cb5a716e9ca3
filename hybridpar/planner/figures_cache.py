"""Why: what was measured of a model besides its units' times is kept beside these, under everything it depends on.

A file that is damaged or of another key is measured again; a directory that cannot be written costs only that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def remembered(
    name: str, key: Mapping[str, Any], directory: Path | None, measure: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """Figures that were measured before under the same key, or are measured now and kept.

    Args:
        name: What they are; a part of the file's name.
        key: What they depend on, as JSON has it.
        directory: Where they are kept; None measures always.
        measure: Measures them.
    """
    if directory is None:
        return measure()
    plain = json.loads(json.dumps(key))
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:24]
    path = directory / f"{name}-{digest}.json"
    known = _read(path, plain)
    if known is None:
        known = measure()
        aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps({"key": plain, "figures": known}, indent=1) + "\n", encoding="utf-8")
            aside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
    return known


def _read(path: Path, key: object) -> dict[str, float] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] != key:
            return None
        figures = {str(name): float(value) for name, value in data["figures"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return figures if all(0 <= value < float("inf") for value in figures.values()) else None
