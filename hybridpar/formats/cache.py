"""The directory in which measurements and compiled kernels are kept, and the files of measurements in it.

A measurement is one JSON file, named after everything that it depends on. A damaged file, and a directory that cannot
be written, are only a warning: the cache never makes a run fail.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hybridpar.errors import UsageError, cannot_write
from hybridpar.formats.file_reader import read_json
from hybridpar.formats.output_files import written_aside

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Where measurements are kept: `HYBRIDPAR_CACHE`, else hybridpar/ in `XDG_CACHE_HOME`, else in ~/.cache."""
    if named := os.environ.get("HYBRIDPAR_CACHE"):
        return Path(named)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "hybridpar"
    try:
        return Path.home() / ".cache" / "hybridpar"
    except RuntimeError:  # a user without an entry in the password file and without HOME
        return Path(tempfile.gettempdir()) / f"hybridpar-{os.getuid()}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process is inside with the same file, as far as its file system has locks.

    The lock belongs to the open file, so it cannot outlive its process. Where the file cannot be opened there is none.
    """
    with ExitStack() as opened:
        with suppress(OSError):
            fcntl.flock(opened.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield


def measurements_directory() -> Path:
    """Where measurements of models and links are kept: planner/ in the package's cache directory."""
    return cache_directory() / "planner"


def measurement_file(kind: str, key: Mapping[str, Any], directory: Path | None = None) -> Path:
    """The file of something that was measured."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return (directory or measurements_directory()) / f"{kind}-{digest}.json"


def load_measurement(
    kind: str, key: Mapping[str, Any], types: TypeAdapter[_T], directory: Path | None = None
) -> _T | None:
    """What was kept under a key; None, with a warning of a damaged file, where there is nothing that can be used."""
    path = measurement_file(kind, key, directory)
    try:
        return types.validate_python(read_json(path, "the measurement", UsageError)["data"])
    except (UsageError, LookupError, TypeError, ValueError):
        if path.exists():
            _log.warning("%s is damaged; measuring again", path)
        return None


def store_measurement(kind: str, key: Mapping[str, Any], data: object, directory: Path | None = None) -> None:
    """Keep something; the file is replaced as a whole or not at all. A warning says where that fails."""
    path = measurement_file(kind, key, directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with written_aside(path) as aside:
            aside.write_text(json.dumps({"key": key, "data": data}), encoding="utf-8")
    except OSError as error:
        _log.warning("%s will be measured again: %s", kind, cannot_write(path.parent, error))
