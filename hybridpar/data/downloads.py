"""Downloads a data set once, although all workers load it at the same time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpar.errors import DataError


@contextmanager
def one_download(name: str, root: Path) -> Iterator[None]:
    """Hold the right to download into a directory; others wait, and then find the files there.

    The lock belongs to the open file, so it cannot outlive its process.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with open(root / f".{name}.lock", "w") as file:
            with _locked(file.fileno()):
                yield
    # Torchvision reports a failed transfer as an OSError, and a wrong checksum as a RuntimeError.
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"cannot download {name} into {root}: {error}",
            fix="Check the network and that the directory can be written, or put the files there by hand.",
        ) from error


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    if os.name != "posix":  # No such lock there: start once with one worker to download.
        yield
        return
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def download_fix(looked_for: str) -> str:
    """What to do about files that are not there."""
    return f"Run again with --data NAME,download, or name the directory that holds {looked_for} with --data-root."
