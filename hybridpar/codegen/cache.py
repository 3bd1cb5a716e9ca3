"""The cache of compiled kernels, whose files are checked before they are used.

A file's name says what it was made from, and the file begins with the hash of its content. A file that is damaged, or
that another user could have written, is not used but built anew. It is written aside and renamed, and a lock makes
processes that start together build once.

This is common to code for CPUs (`hybridpar.codegen.build`) and for CUDA (`hybridpar.codegen.nvrtc`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hybridpar.errors import first_line
from hybridpar.formats.cache import cache_directory

_log = logging.getLogger(__name__)

#: Seconds after which a build is given up.
TIMEOUT = 300.0
_Loaded = TypeVar("_Loaded")
_DIGEST = hashlib.sha256().digest_size


class KernelsUnavailable(Exception):
    """Kernels cannot be had here, and why; callers catch it."""


def wanted() -> bool:
    """Whether the user has kernels on: HYBRIDPAR_KERNELS is not `off`, `no`, `false` or 0."""
    return os.environ.get("HYBRIDPAR_KERNELS", "").strip().lower() not in ("off", "no", "false", "0")


def load_or_warn(what: str, load: Callable[[], _Loaded]) -> _Loaded | None:
    """Load kernels, or say in one line of the log why there are none."""
    if not wanted():
        _log.info("%s are switched off by HYBRIDPAR_KERNELS", what)
        return None
    try:
        return load()
    except (KernelsUnavailable, ImportError, OSError, RuntimeError, ValueError) as error:
        _log.warning("%s cannot be had, slower torch code is used: %s", what, first_line(error))
        return None


def cache_path(name: str, made_from: dict[str, Any], suffix: str) -> Path:
    """The cache file of something that is built on this machine."""
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:24]
    return cache_directory() / "kernels" / f"{name}-{digest}{suffix}"


def cached(path: Path, build: Callable[[], bytes]) -> bytes:
    """The content of a cache file, built if need be."""
    (content,) = cached_all([path], lambda _: [(0, build())])
    assert isinstance(content, bytes)
    return content


def cached_all(
    paths: Sequence[Path], build: Callable[[Sequence[int]], Iterable[tuple[int, bytes | KernelsUnavailable]]]
) -> list[bytes | KernelsUnavailable]:
    """The contents of cache files; those that are not there are built together."""
    contents: dict[int, bytes | KernelsUnavailable] = {}

    def look(level: int) -> list[int]:
        """Read what is there; which ones are missing."""
        for index, path in enumerate(paths):
            content = contents.get(index) or _verified(path, level)
            if content is not None:
                contents[index] = content
        return [index for index in range(len(paths)) if index not in contents]

    for directory in {path.parent for path in paths}:
        _private_directory(directory)
    missing = look(logging.DEBUG)
    if missing:
        with _lock(paths[missing[0]].with_suffix(".lock")):
            missing = look(logging.WARNING)  # another process may have built them while this one waited
            began = time.perf_counter()
            for index, content in build(missing) if missing else ():
                contents[index] = content
                if isinstance(content, bytes):
                    keep(paths[index], content)
                    _log.info("built %s, %.1f s after the start", paths[index], time.perf_counter() - began)
    return [contents[index] for index in range(len(paths))]


def keep(path: Path, content: bytes) -> None:
    """Put a file into the cache, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as aside:
        written = Path(aside, "written")
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)


def _private_directory(directory: Path) -> None:
    """Make the directory, and refuse one that somebody else could write to."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        about = directory.lstat()
    except OSError as error:
        raise KernelsUnavailable(f"{directory} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(about.st_mode) or not _private(about):
        raise KernelsUnavailable(f"{directory} is not this user's alone; remove it, or chmod 700 it")


def _private(about: os.stat_result) -> bool:
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _verified(path: Path, level: int) -> bytes | None:
    """The content of a cache file without its hash, or None where there is none to be trusted, said at a log level."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.log(level, "%s cannot be read (%s) and is built anew", path, error.strerror)
        return None
    if not _private(about):
        _log.log(level, "%s could have been written by another user and is built anew", path)
        return None
    if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
        _log.log(level, "%s is damaged and is built anew", path)
        return None
    return data[_DIGEST:]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process of the machine in at a time; where files cannot be locked, all of them."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KernelsUnavailable(f"{path.parent} cannot be written to: {error.strerror}") from error
    try:
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KernelsUnavailable(f"another process has been building for {TIMEOUT:.0f} s") from None
                time.sleep(0.05)
            except OSError:  # a file system without locks: renaming alone keeps the file whole
                break
        yield
    finally:
        os.close(handle)
