"""Checks that files can be written, before the work whose result they are to hold, and writes them whole."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from hybridpar.errors import RunDirectoryError, UsageError, cannot_write


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Another name in the same folder, for what takes the place of a file once it is whole; else the old one stays.

    A link is followed. What is no file, as a device or a pipe, is written to.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))
    aside = target.with_name(f".{target.stem}.{uuid.uuid4().hex}.tmp{target.suffix}")
    try:
        yield aside
        with open(aside, "rb") as stream:
            os.fsync(stream.fileno())
        aside.replace(target)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file of a run directory as a whole, or leave the old one as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside, open(aside, "wb") as file:
            file.writelines(chunks)
    except OSError as error:
        raise run_directory_error(path, error) from error


def run_directory_error(path: Path, error: OSError) -> RunDirectoryError:
    """The error to raise when a file of the run directory cannot be written."""
    what = cannot_write(path, error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        full = "The disk is full" if error.errno == errno.ENOSPC else "The disk quota is used up"
        why, fix = f"{full}; what was written before is kept.", "Free some space, then go on with --resume."
        return RunDirectoryError(what, why, fix)
    return RunDirectoryError(what, fix="Name a directory that you can write, with --run-dir or --output.")


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that could not be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {folder}", fix=f"Run: mkdir -p {folder}")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a directory", "A file is needed.", "Name a file in it.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written", fix="Name a file in a directory of yours.")
