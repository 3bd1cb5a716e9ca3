"""The directory in which measurements and compiled kernels are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """Where measurements are kept: `HYBRIDPAR_CACHE`, else hybridpar/ in `XDG_CACHE_HOME`, else in ~/.cache."""
    if own := os.environ.get("HYBRIDPAR_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "hybridpar"
    try:
        return Path.home() / ".cache" / "hybridpar"
    except RuntimeError:  # a user without an entry in the password file and without HOME
        return Path(tempfile.gettempdir()) / f"hybridpar-{os.getuid()}"
