"""Writes the files of a run directory as a whole or not at all.

Files are written aside, flushed to the disk, and renamed over the old ones.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

from hybridpar.errors import RunDirectoryError, cannot_write
from hybridpar.formats.output_files import written_aside


def run_directory_error(path: Path, error: OSError) -> RunDirectoryError:
    """The error to raise when a file of the run directory cannot be written."""
    what = cannot_write(path, error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        full = "The disk is full" if error.errno == errno.ENOSPC else "The disk quota is used up"
        return RunDirectoryError(
            what, f"{full}; what was written before is kept.", "Free some space, then go on with --resume."
        )
    return RunDirectoryError(
        what,
        "A run writes its metrics, checkpoints and summary there.",
        "Name a directory you can write with --run-dir.",
    )


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file as a whole, or leave the old one as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside, open(aside, "wb") as file:
            file.writelines(chunks)
    except OSError as error:
        raise run_directory_error(path, error) from error
