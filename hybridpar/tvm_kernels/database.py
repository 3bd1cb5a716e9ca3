"""The kernel database: a file of JSON lines, one record each, that is only ever appended to.

A record says what was computed, where and with which versions it was measured, the parameters of the kernel, and its
time beside that of torch. Each line is appended with one write under a lock, so two writers mix whole lines and a
writer that dies leaves at most one broken line, which readers count and skip. Two files are merged by taking the lines
of both. Nothing in a record is executed: parameters are numbers, which are checked before they become code.

The `op` of a line says which operation it is of. Lines of an operation that is not known here are passed over, so that
an older reader can use what it knows.

`python scripts/package_kernels.py FILE...` picks the records that come with the package.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.resources
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from hybridpar.errors import UsageError, cannot_write
from hybridpar.formats.cache import cache_directory
from hybridpar.formats.file_reader import parse_json, read_text
from hybridpar.tvm_kernels.operation import KernelKey, named_operation
from hybridpar.tvm_kernels.record import RECORD_VERSION, KernelRecord

#: What a line without `op` is of.
_FIRST_OPERATION = "depthwise_conv2d"

#: Bytes of a database: some 400,000 records.
_MOST_BYTES = 256 << 20

_WHAT = "It is a file of JSON lines that `hybridpar tune` writes."

_log = logging.getLogger(__name__)


class Database:
    """Records, by what they are of.

    Args:
        name: What to call it in messages.
        records: Of any operations.

    Attributes:
        records: All of them, in the order in which they came.
        damaged: Lines that are no records.
        other_versions: Lines of a version that this package does not read.
    """

    def __init__(self, name: str = "the database", records: Iterable[KernelRecord] = ()) -> None:
        self.name = name
        self.records: list[KernelRecord] = []
        self.damaged = self.other_versions = 0
        self._by_key: dict[KernelKey, list[KernelRecord]] = {}
        for record in records:
            self._enter(record)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[KernelKey]:
        return iter(self._by_key)

    def add(self, records: Iterable[KernelRecord]) -> None:
        """Take in more records, but none twice; nothing is written.

        Args:
            records: Of any operations.
        """
        for record in records:
            if record not in self._by_key.get(record.key, ()):
                self._enter(record)

    def _enter(self, record: KernelRecord) -> None:
        self.records.append(record)
        self._by_key.setdefault(record.key, []).append(record)

    def best(self, key: KernelKey, *, current: bool = True) -> KernelRecord | None:
        """The fastest record of the newest search for a key.

        Times of different searches are not compared: the machine may have been busy during one of them.

        Args:
            key: What is to be computed.
            current: Only records that may be used: of the versions that are installed, and without a `doubt`.

        Returns:
            The record; None where there is none.
        """
        found = [one for one in self._by_key.get(key, ()) if not current or (one.current and not one.doubt)]
        return min(found, key=lambda one: (-one.tuned_at, one.ms), default=None)


def parse_records(text: str, name: str = "the database") -> Database:
    """Read the lines of a database; lines that are no records are counted and skipped."""
    found: list[KernelRecord] = []
    damaged = versions = 0
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            data = parse_json(line)
            fields = data if isinstance(data, dict) else {}
            op, version = fields.get("op", _FIRST_OPERATION), fields.get("version")
            operation = named_operation(op) if isinstance(op, str) else None
            if isinstance(op, str) and operation is None:
                continue
            if isinstance(version, int) and version != RECORD_VERSION:
                versions += 1
            else:
                found.append(KernelRecord.model_validate(data))
        except ValueError:  # pydantic's errors among them
            damaged += 1
    database = Database(name, found)
    database.damaged, database.other_versions = damaged, versions
    return database


def read_database(path: str | Path) -> Database:
    """Read a database file. One log line says how many lines are damaged or of another version.

    Args:
        path: The file.

    Returns:
        The database.

    Raises:
        UsageError: There is no such file, it cannot be read, or it holds nothing but damage.
    """
    path = Path(path)
    # A line in another encoding is a damaged line, and not a damaged file.
    text = read_text(
        path,
        "the kernel database",
        UsageError,
        "Make one with `hybridpar tune MODEL -o FILE`, and name a new file there.",
        why=_WHAT,
        most=_MOST_BYTES,
        errors="replace",
    )
    database = parse_records(text, str(path))
    if not len(database) and database.damaged:
        raise UsageError(
            f"{path} is not a kernel database: none of its {database.damaged} line(s) is a record",
            _WHAT,
            "Name such a file, or a new one for `hybridpar tune MODEL -o`.",
        )
    _warn(database)
    return database


def _warn(database: Database) -> None:
    """Say in log lines what of a database is not used."""
    name = database.name
    if database.damaged:
        _log.warning("%s: %d line(s) are damaged and were skipped", name, database.damaged)
    if database.other_versions:
        _log.warning(
            "%s: %d record(s) are of a version that this hybridpar does not read and were skipped; tune again",
            name,
            database.other_versions,
        )
    old = [one for one in database.records if not one.current]
    if old:
        versions = ", ".join(f"{name} {version}" for name, version in old[0].operation.versions)
        _log.warning("%s: %d record(s) are not of %s and are not used; tune again", name, len(old), versions)
    # Quick ones say what need not be tried again.
    doubtful = [one for one in database.records if one.current and one.doubt and not one.quick]
    if doubtful:
        of, why = doubtful[0].key.shape.text, doubtful[0].doubt
        _log.warning("%s: %d record(s) are not used, of %s for instance %s; tune again", name, len(doubtful), of, why)


def user_database() -> Path:
    """Where `hybridpar tune` writes by default, and what `--kernels auto` reads."""
    return cache_directory() / "kernels.jsonl"


def packaged_records() -> list[KernelRecord]:
    """What comes with the package; on other devices, and of other versions, it says where a search may begin."""
    packaged = importlib.resources.files("hybridpar.tvm_kernels").joinpath("kernels.jsonl")
    with contextlib.suppress(FileNotFoundError):
        read = parse_records(packaged.read_text("utf-8"))
        # The packaged times come second to any that were measured here.
        return [one.model_copy(update={"tuned_at": 0.0}) for one in read.records]
    return []


def default_database() -> Database:
    """What comes with the package and what was tuned on this machine; the latter counts where both know a key.

    A file that is missing or cannot be read is as an empty one: a database can only make things faster.
    """
    found = Database("the packaged and the user's kernel database", packaged_records())
    try:
        if user_database().exists():
            found.add(read_database(user_database()).records)
    except UsageError as error:
        _log.warning("%s", error.what)
    return found


def append_records(path: str | Path, records: Iterable[KernelRecord]) -> None:
    """Add records at the end of a file, which is made if need be.

    Args:
        path: The file.
        records: Of any operations.

    Raises:
        UsageError: It cannot be written.
    """
    path, lines = Path(path), [record.line() for record in records]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: a line is still one write
                fcntl.flock(handle, fcntl.LOCK_EX)
            size = os.fstat(handle).st_size
            # A writer may have died within a line; the next record must not be lost with it.
            if lines and size and os.pread(handle, 1, size - 1) != b"\n":
                os.write(handle, b"\n")
            for line in lines:
                data = line.encode() + b"\n"
                if os.write(handle, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(handle)
    except OSError as error:
        raise UsageError(
            cannot_write(path, error),
            "Records of kernels are appended to it as they are measured.",
            "Name another place with -o.",
        ) from error
