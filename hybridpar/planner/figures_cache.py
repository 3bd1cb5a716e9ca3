"""Why: what was measured of a model besides its units' times is kept beside these, under everything it depends on.

A file that is damaged or of another key is measured again; a directory that cannot be written costs only that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
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
    known = recalled(name, key, directory)
    if known is None:
        known = measure()
        keep(name, key, directory, known)
    return known


def recalled(name: str, key: Mapping[str, Any], directory: Path | None) -> dict[str, float] | None:
    """Figures that were kept; None where there are none. See `remembered`."""
    if directory is None:
        return None
    path, plain = _place(name, key, directory)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] != plain:
            return None
        figures = {str(name): float(value) for name, value in data["figures"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return figures if all(map(math.isfinite, figures.values())) else None


def keep(name: str, key: Mapping[str, Any], directory: Path | None, figures: Mapping[str, float]) -> None:
    """Keep figures for the next time; where the directory cannot be written, nothing is kept. See `remembered`."""
    if directory is None:
        return
    path, plain = _place(name, key, directory)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps({"key": plain, "figures": dict(figures)}, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()


def _place(name: str, key: Mapping[str, Any], directory: Path) -> tuple[Path, Any]:
    """The file of figures, and their key as JSON gives it back."""
    plain = json.loads(json.dumps(key))
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:24]
    return directory / f"{name}-{digest}.json", plain
