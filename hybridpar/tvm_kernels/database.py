"""Why: what was measured once, for hours perhaps, is kept as plain text that can be merged, and can do no harm.

A database is a file of JSON lines, one record each. A record says what was computed, where and with which versions it
was measured, the parameters of the kernel, and its time beside that of torch. Lines are only ever appended, each with
one write under a lock, so two writers mix whole lines and a writer that dies leaves at most one broken line, which
readers count and skip. Two files are merged by taking the lines of both. Nothing in a record is executed: parameters
are numbers that the kernel's source checks.

Which operation a line is of, its `op` says. Those of convolutions, of norms and of both together have fields of their
own; lines of an operation that is not known here are passed over, so that an older reader can use what it knows.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.resources
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, field_validator

from hybridpar.errors import UsageError
from hybridpar.formats.file_reader import parse_json, read_text
from hybridpar.machine.cluster import cache_directory
from hybridpar.tvm_kernels.conv_norm_records import (
    CONV_NORM_OP,
    CONV_NORM_RECORD_VERSION,
    ConvNormKey,
    ConvNormRecord,
)
from hybridpar.tvm_kernels.device import installed_versions
from hybridpar.tvm_kernels.norm_records import NORM_OP, NORM_RECORD_VERSION, NormKey, NormRecord
from hybridpar.tvm_kernels.record import Record
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout, ShapeError

RECORD_VERSION: Literal[1] = 1

_CONVOLUTION = "depthwise_conv2d"

#: Bytes of a database: some 400,000 records.
_MOST_BYTES = 256 << 20

_log = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_Record = TypeVar("_Record")
_Measured = TypeVar("_Measured", bound=Record)


@dataclass(frozen=True, order=True)
class KernelKey:
    """What a kernel computes, and where: what a record must agree in to be of use.

    Attributes:
        direction: Forward, or which gradient.
        shape: The convolution.
        layout: Of activations.
        threads: Threads that compute it.
        device: Fingerprint of the device.
        dtype: Of all tensors.
        op: Name of the operation.
    """

    direction: Direction
    shape: ConvShape
    layout: Layout
    threads: int
    device: str
    dtype: str = "float32"
    op: str = "depthwise_conv2d"


class KernelRecord(Record):
    """One candidate that was measured. Times are milliseconds of one call, medians of interleaved pairs.

    With one thread they are time of the CPU, without what other processes took; with more they are time of the clock.
    """

    version: Literal[1] = RECORD_VERSION
    op: str = "depthwise_conv2d"
    direction: Direction
    shape: str = Field(description="as `ConvShape.text` has it")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    layout: Layout
    parameters: dict[str, int | float | str | bool | None] = Field(description="of the schedule")
    align: int = Field(4, ge=1, description="what the addresses of all tensors must be multiples of")
    ms: float | None = Field(gt=0, description="None where it was compiled and not measured")
    stock_ms: float | None = Field(gt=0, description="torch, in the better of its layouts")
    layout_ms: float | None = Field(
        None, gt=0, description="torch in the layout of the record, where that is not its better one"
    )
    floor_ms: float | None = Field(None, gt=0, description="what neither arithmetic nor memory can beat here")
    predicted_ms: float | None = Field(
        None, gt=0, description="what the cost model says of a candidate for a GPU that was compiled and not measured"
    )
    cubin: str | None = Field(None, description="its machine code, relative to the database's directory")

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, text: str) -> str:
        try:
            return ConvShape.parse(text).text
        except ShapeError as error:
            raise ValueError(error.what) from error

    @property
    def key(self) -> KernelKey:
        """What it is a record of."""
        shape = ConvShape.parse(self.shape)
        return KernelKey(self.direction, shape, self.layout, self.threads, self.device, self.dtype, self.op)

    @property
    def current(self) -> bool:
        """Whether it was measured with the versions that are installed."""
        return tuple(sorted(self.versions.items())) == installed_versions()

    @property
    def times(self) -> tuple[float | None, float | None]:
        """Milliseconds of the kernel, and of torch in the layout that the convolution is in."""
        return self.ms, self.stock_ms if self.layout_ms is None else self.layout_ms

    def line(self) -> str:
        """The record as a line of a database."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True) | {"ms": self.ms, "stock_ms": self.stock_ms})


#: A record of any operation.
AnyRecord = KernelRecord | NormRecord | ConvNormRecord

#: The version of each operation's records that this package reads.
_VERSIONS: dict[str, int] = {
    _CONVOLUTION: RECORD_VERSION,
    NORM_OP: NORM_RECORD_VERSION,
    CONV_NORM_OP: CONV_NORM_RECORD_VERSION,
}


@dataclass
class Database:
    """Records, by what they are of.

    Attributes:
        name: What to call it in messages.
        records: Of convolutions.
        damaged: Lines that are no records.
        other_versions: Lines of a version that this package does not read.
        norms: Records of norms.
        other_operations: Lines of operations that this package does not know.
        conv_norms: Records of convolutions together with the norms behind them.
    """

    name: str = "the database"
    records: list[KernelRecord] = field(default_factory=list)
    damaged: int = 0
    other_versions: int = 0
    norms: list[NormRecord] = field(default_factory=list)
    other_operations: int = 0
    conv_norms: list[ConvNormRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_key: dict[KernelKey, list[KernelRecord]] = {}
        for record in self.records:
            self._by_key.setdefault(record.key, []).append(record)
        self._norm_by_key: dict[NormKey, list[NormRecord]] = {}
        for norm in self.norms:
            self._norm_by_key.setdefault(norm.key, []).append(norm)
        self._conv_norm_by_key: dict[ConvNormKey, list[ConvNormRecord]] = {}
        for both in self.conv_norms:
            self._conv_norm_by_key.setdefault(both.key, []).append(both)

    def __len__(self) -> int:
        return len(self.records) + len(self.norms) + len(self.conv_norms)

    @property
    def everything(self) -> list[AnyRecord]:
        """Records of all operations."""
        return [*self.records, *self.norms, *self.conv_norms]

    def add(self, records: Iterable[AnyRecord]) -> None:
        """Take in more records; nothing is written."""
        for record in records:
            if isinstance(record, NormRecord):
                _keep(record, record.key, self.norms, self._norm_by_key)
            elif isinstance(record, ConvNormRecord):
                _keep(record, record.key, self.conv_norms, self._conv_norm_by_key)
            else:
                _keep(record, record.key, self.records, self._by_key)

    @property
    def norm_keys(self) -> Collection[NormKey]:
        """The keys that there are records of norms of."""
        return self._norm_by_key.keys()

    def best_norm(self, key: NormKey, *, current: bool = True) -> NormRecord | None:
        """The newest record for a key.

        Args:
            key: What is to be computed.
            current: Only records that may be used: of the versions that are installed, and without a `doubt`.
        """
        return _newest(self._norm_by_key.get(key, ()), current)

    @property
    def conv_norm_keys(self) -> Collection[ConvNormKey]:
        """The keys that there are records of convolutions together with norms of."""
        return self._conv_norm_by_key.keys()

    def best_conv_norm(self, key: ConvNormKey, *, current: bool = True) -> ConvNormRecord | None:
        """The newest record for a key.

        Args:
            key: What is to be computed.
            current: Only records that may be used: of the versions that are installed, and without a `doubt`.
        """
        return _newest(self._conv_norm_by_key.get(key, ()), current)

    def __iter__(self) -> Iterator[KernelKey]:
        """The keys that there are records of convolutions of."""
        return iter(self._by_key)

    def best(self, key: KernelKey, *, current: bool = True) -> KernelRecord | None:
        """The fastest record of the newest search for a key.

        Times of different searches are not compared: the machine may have been busy during one of them.

        Args:
            key: What is to be computed.
            current: Only records that may be used: of the versions that are installed, and without a `doubt`.
        """
        found = [one for one in _usable(self._by_key.get(key, ()), current) if one.ms is not None]
        newest = max((one.tuned_at for one in found), default=0.0)
        # Records without a time were left out above, so every one of these has one.
        return min((one for one in found if one.tuned_at == newest), key=lambda one: one.ms or 0.0, default=None)


def _keep(record: _Record, key: _Key, records: list[_Record], by_key: dict[_Key, list[_Record]]) -> None:
    """Take in a record of one operation, unless it is there."""
    known = by_key.setdefault(key, [])
    if record not in known:
        records.append(record)
        known.append(record)


def _usable(records: Sequence[_Measured], current: bool) -> list[_Measured]:
    """The records of one key; with `current`, those that may be used."""
    return [one for one in records if not current or (one.current and not one.doubt)]


def _newest(records: Sequence[_Measured], current: bool) -> _Measured | None:
    return max(_usable(records, current), key=lambda one: one.tuned_at, default=None)


def why_unused(record: AnyRecord, versions: Iterable[tuple[str, str]]) -> str:
    """Why a record of the right key is not used.

    Args:
        record: One that `Database.best` leaves out.
        versions: What is installed.
    """
    if record.current:
        return f"{record.doubt}; tune again"
    return f"its record is not of {', '.join(f'{name} {version}' for name, version in versions)}; tune again"


def parse_records(text: str, name: str = "the database") -> Database:
    """The database in a text; lines that are no records are counted, not an error."""
    records: list[KernelRecord] = []
    norms: list[NormRecord] = []
    conv_norms: list[ConvNormRecord] = []
    damaged, versions, operations = 0, 0, 0
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            data = parse_json(line)
            fields = data if isinstance(data, dict) else {}
            op, version = fields.get("op", _CONVOLUTION), fields.get("version")
            if isinstance(op, str) and op not in _VERSIONS:
                operations += 1
            elif isinstance(version, int) and version != (_VERSIONS[op] if isinstance(op, str) else RECORD_VERSION):
                versions += 1
            elif op == NORM_OP:
                norms.append(NormRecord.model_validate(data))
            elif op == CONV_NORM_OP:
                conv_norms.append(ConvNormRecord.model_validate(data))
            else:
                records.append(KernelRecord.model_validate(data))
        except ValueError:  # pydantic's errors among them
            damaged += 1
    return Database(name, records, damaged, versions, norms, operations, conv_norms)


def read_database(path: str | Path) -> Database:
    """Read a database. What is damaged in it, or of another version, is counted and told in one line.

    Raises:
        UsageError: There is no such file, it cannot be read, or it holds nothing but damage.
    """
    path = Path(path)
    database = parse_records(_read_text(path), str(path))
    if not len(database) and database.damaged:
        raise UsageError(
            f"{path} is not a kernel database: none of its {database.damaged} line(s) is a record",
            "It is a file of JSON lines that `hybridpar tune` writes.",
            "Name such a file, or a new one for `hybridpar tune MODEL -o`.",
        )
    _tell(database)
    return database


def _tell(database: Database) -> None:
    if database.damaged:
        _log.warning("%s: %d line(s) are damaged and were skipped", database.name, database.damaged)
    if database.other_versions:
        _log.warning(
            "%s: %d record(s) are of a version that this hybridpar does not read and were skipped; tune again",
            database.name,
            database.other_versions,
        )
    old = sum(not record.current for record in database.everything)
    if old:
        versions = ", ".join(f"{name} {version}" for name, version in installed_versions())
        _log.warning("%s: %d record(s) are not of %s and are not used; tune again", database.name, old, versions)
    doubtful = [one for one in database.everything if one.current and None not in one.times and one.doubt]
    if doubtful:
        _log.warning(
            "%s: %d record(s) are not used, of %s for instance %s; tune again",
            database.name,
            len(doubtful),
            doubtful[0].key.shape.text,
            doubtful[0].doubt,
        )


def user_database() -> Path:
    """Where `hybridpar tune` writes unless told otherwise, and what `--kernels auto` reads."""
    return cache_directory() / "kernels.jsonl"


def packaged_records() -> list[AnyRecord]:
    """What comes with the package; on other devices, and of other versions, it says where a search may begin."""
    packaged = importlib.resources.files("hybridpar.tvm_kernels").joinpath("kernels.jsonl")
    with contextlib.suppress(FileNotFoundError):
        read = parse_records(packaged.read_text("utf-8"))
        # The packaged times come second to any that were measured here.
        return [one.model_copy(update={"tuned_at": 0.0}) for one in read.everything]
    return []


def default_database() -> Database:
    """What comes with the package and what was tuned on this machine; the latter counts where both know a key.

    A file that is missing or cannot be read is as an empty one: a database can only make things faster.
    """
    found = Database("the packaged and the user's kernel database")
    found.add(packaged_records())
    try:
        if user_database().exists():
            found.add(read_database(user_database()).everything)
    except UsageError as error:
        _log.warning("%s", error.what)
    return found


def append_records(path: str | Path, records: Iterable[AnyRecord]) -> None:
    """Add records at the end of a file, which is made if need be.

    Raises:
        UsageError: It cannot be written.
    """
    _append(Path(path), [record.line() for record in records])


def merge_databases(paths: Sequence[str | Path], into: str | Path) -> int:
    """Put the lines of several databases into one, each once; lines that cannot be read here are kept as they are.

    Args:
        paths: Files to read.
        into: File to append to; may be one of them, or new.

    Returns:
        Number of lines added.

    Raises:
        UsageError: A file cannot be read or written.
    """
    target = Path(into)
    present = set(_read_text(target).splitlines()) if target.exists() else set()
    found = (line for path in paths for line in _read_text(Path(path)).splitlines())
    added = list(dict.fromkeys(line for line in found if line.strip() and line not in present))
    _append(target, added)
    return len(added)


def _read_text(path: Path) -> str:
    # A line in another encoding is a damaged line, and not a damaged file.
    return read_text(
        path,
        "the kernel database",
        UsageError,
        "Make one with `hybridpar tune MODEL -o FILE`, and name a new file there.",
        why="It is a file of JSON lines that `hybridpar tune` writes.",
        most=_MOST_BYTES,
        errors="replace",
    )


def _append(path: Path, lines: Sequence[str]) -> None:
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
            f"cannot write the kernel database {path}: {error.strerror}",
            "Records are appended to it as they are measured.",
            "Name another place with -o.",
        ) from error
