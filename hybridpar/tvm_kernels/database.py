"""Records of measured kernels, the one rule by which a record may be used, and the database that holds them.

A record says what was computed, where and with which versions it was measured, the parameters of the kernel, and its
time beside that of torch. A kernel runs only where its record says that its result is right, that a second measurement
confirmed its time, and that it was faster. Right means: no further from float64 than a limit, or than some times what
PyTorch itself is.

The database is a file of JSON lines, one record each, that is only ever appended to. Each line is appended with one
write under a lock, so two writers mix whole lines and a writer that dies leaves at most one broken line, which readers
count and skip. Two files are merged by taking the lines of both. Nothing in a record is executed: parameters are whole
numbers, which are checked before they become code.

`python scripts/package_kernels.py FILE...` picks the records that come with the package.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import importlib.resources
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator

from hybridpar.errors import UsageError, cannot_write
from hybridpar.formats.cache import cache_directory, locked
from hybridpar.formats.file_reader import parse_json, read_text
from hybridpar.machine.steady import MOST_NOISE
from hybridpar.tvm_kernels.machine import is_gpu
from hybridpar.tvm_kernels.measure import is_clear, is_gain
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, KernelKey, Layout, Parameters, ShapeError

#: Versions of the schedules for CPUs and GPUs; raised where the same parameters come to mean other code.
_SCHEDULES = {False: "2", True: "3"}

#: How many times as fast as its rival a kernel must have been to be used: less is within what a measurement errs by.
LEAST_GAIN = 1.02

#: The largest error in float32, as sums over taps and over whole images have it, and that of the last rounding.
_LIMITS = {Direction.FORWARD: 1e-5, Direction.INPUT_GRADIENT: 1e-5, Direction.WEIGHT_GRADIENT: 1e-4}
_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
#: Where PyTorch is further off itself, a kernel may be off by so many times that; and never by more than this.
_TIMES_STOCK, _MOST_ERROR = 4.0, 1e-2

#: Bytes of a database: some 400,000 records.
_MOST_BYTES = 256 << 20
_WHAT = "It is a file of JSON lines that `hybridpar tune` writes."

_log = logging.getLogger(__name__)


@functools.cache
def versions(device: str) -> dict[str, str]:
    """Versions that times of kernels and of their rivals on a device depend on, by name."""
    installed = {"schedules": _SCHEDULES[is_gpu(device)]}
    for name, distribution in (("torch", "torch"), ("tvm", "apache-tvm")):
        try:
            installed[name] = importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "none"
    return installed


def most_error(direction: Direction, dtype: str = "float32", stock_error: float | None = None) -> float:
    """The largest error that a kernel may have."""
    return min(_MOST_ERROR, max(_LIMITS[direction] + _ROUNDING[dtype], _TIMES_STOCK * (stock_error or 0.0)))


class KernelRecord(BaseModel):
    """A measurement of a kernel against its rival, and where it was taken. Times are milliseconds of one call.

    The rival's is the median of interleaved pairs, the kernel's is that over the median of the pairs' ratios. With one
    thread they are time of the CPU, without what other processes took; with more they are time of the clock.

    Attributes:
        device: Fingerprint of the CPU or GPU.
        threads: Threads that computed it.
        versions: By name, versions that the times depend on.
        error: Largest difference from float64, relative to the largest value; None where it was not measured.
        stock_error: The same of torch, on the same data.
        noise: Relative distance between measurements of the ratio of both times, the worst of them.
        tuned_at: Seconds since the epoch; records of one search share it.
        dtype: Of all tensors.
        layout: Of activations.
        ms: Of the kernel.
        stock_ms: Of its rival, torch in the layout of the record.
        quick: True where one candidate was timed, at the start of a run; see `hybridpar.tvm_kernels.confirm`.
        direction: What was computed.
        shape: As `ConvShape.text` has it.
        parameters: Of the schedule.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    device: str
    threads: int = Field(ge=1)
    versions: dict[str, str]
    error: float | None = Field(None, ge=0)
    stock_error: float | None = Field(None, ge=0)
    noise: float | None = Field(None, ge=0)
    tuned_at: float = Field(0.0, ge=0)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    layout: Layout
    ms: float = Field(gt=0)
    stock_ms: float = Field(gt=0)
    quick: bool | None = None
    direction: Direction
    shape: str
    parameters: dict[str, StrictInt]

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, text: str) -> str:
        try:
            return ConvShape.parse(text).text
        except ShapeError as error:
            raise ValueError(error.what) from error

    @classmethod
    def of(cls, key: KernelKey, parameters: Parameters, **measured: Any) -> KernelRecord:
        """What was measured of a kernel with the versions that are installed."""
        where: dict[str, Any] = {**vars(key), "shape": key.shape.text, "versions": versions(key.device)}
        return cls(**where, parameters=dict(parameters), **measured)

    @property
    def key(self) -> KernelKey:
        """What it is a record of."""
        shape = ConvShape.parse(self.shape)
        return KernelKey(self.direction, shape, self.layout, self.threads, self.device, self.dtype)

    @property
    def current(self) -> bool:
        """Whether it was measured with the versions that are installed."""
        return self.versions == versions(self.device)

    @property
    def clear(self) -> bool:
        """Whether its times are worth a record, see `measure.is_clear`."""
        return is_clear(self.gain, self.noise or 0.0)

    @property
    def doubt(self) -> str:
        """Why nothing may run on it, whatever its times; empty where it may."""
        most = most_error(self.direction, self.dtype, self.stock_error)
        if self.error is None or not self.error <= most:  # NaN is no small error
            error = "unknown" if self.error is None else f"{self.error:.1e}"
            return f"its error is {error}, and at most {most:.1e} is let through"
        if not self.clear:
            apart = f"its measurements lay {100 * (self.noise or 0.0):.0f} % apart"
            within = f"within which lies its gain of {self.gain:.2f}x"
            return f"{apart}, {within if self.gain > 1 else f'and at most {100 * MOST_NOISE:.0f} % is used'}"
        return ""

    @property
    def gain(self) -> float:
        """Times as fast as its rival that the kernel was."""
        return self.stock_ms / self.ms

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the kernel saves for certain, by the lower end of its gain; 0 where it is not used.

        A rival that was timed beside other programs may have taken many times as long as it does alone, which noise
        tells: its median is no promise.
        """
        return max(0.0, self.stock_ms / (1 + (self.noise or 0.0)) - self.ms) if self.wins else 0.0

    @property
    def wins(self) -> bool:
        """Whether it may be used, and was measured to be faster than its rival, by `LEAST_GAIN`."""
        return self.gain > LEAST_GAIN and is_gain(self.gain, self.noise or 0.0) and not self.doubt

    def line(self) -> str:
        """The record as a line of a database."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True))


def _wanted(device: str) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions(device).items())


def why_unused(record: KernelRecord) -> str:
    """Why a record of the right key is not used."""
    return f"{record.doubt if record.current else f'its record is not of {_wanted(record.device)}'}; tune again"


class Database:
    """Records, by what they are of; none is in it twice.

    Args:
        name: What to call it in messages.
        records: Records.

    Attributes:
        records: All of them, in the order in which they came.
        damaged: Lines that are no records.
    """

    def __init__(self, name: str = "the database", records: Iterable[KernelRecord] = ()) -> None:
        self.name = name
        self.records: list[KernelRecord] = []
        self.damaged = 0
        self._by_key: dict[KernelKey, list[KernelRecord]] = {}
        self.add(records)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[KernelKey]:
        return iter(self._by_key)

    def add(self, records: Iterable[KernelRecord]) -> None:
        """Take in more records; nothing is written.

        Args:
            records: Records.
        """
        for record in records:
            alike = self._by_key.setdefault(record.key, [])
            if record not in alike:
                alike.append(record)
                self.records.append(record)

    def best(self, key: KernelKey, *, current: bool = True) -> KernelRecord | None:
        """The fastest record of the newest search for a key.

        Times of different searches are not compared: the machine may have been busy during one of them.

        Args:
            key: What is to be computed.
            current: Only records that may be used: of the versions that are installed, and without a `doubt`.

        Returns:
            The record; None where there is none.
        """
        records = self._by_key.get(key, ())
        usable = [record for record in records if not current or (record.current and not record.doubt)]
        return min(usable, key=lambda record: (-record.tuned_at, record.ms), default=None)


def parse_records(text: str, name: str = "the database") -> Database:
    """Read the lines of a database; lines that are no records are counted and skipped."""
    database = Database(name)
    for line in filter(str.strip, text.splitlines()):
        try:
            database.add([KernelRecord.model_validate(parse_json(line))])
        except ValueError:  # pydantic's errors among them
            database.damaged += 1
    return database


def read_database(path: str | Path) -> Database:
    """Read a database file. Log lines say what of it is not used.

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
            f"{path} is not a kernel database: none of its {database.damaged} line(s) is a record that is read here",
            _WHAT,
            "Name such a file, or a new one for `hybridpar tune MODEL -o`.",
        )
    if database.damaged:
        _log.warning("%s: %d line(s) are no records and were skipped", path, database.damaged)
    old = [record for record in database.records if not record.current]
    if old:
        wanted = _wanted(old[0].device)
        _log.warning("%s: %d record(s) are not of %s and are not used; tune again", path, len(old), wanted)
    # Quick ones say what need not be tried again.
    doubtful = [record for record in database.records if record.current and record.doubt and not record.quick]
    if doubtful:
        of, why = doubtful[0].shape, doubtful[0].doubt
        _log.warning("%s: %d record(s) are not used, of %s for instance %s; tune again", path, len(doubtful), of, why)
    return database


def user_database() -> Path:
    """Where `hybridpar tune` writes by default, and what `--kernels auto` reads."""
    return cache_directory() / "kernels.jsonl"


def packaged_records() -> list[KernelRecord]:
    """What comes with the package; on other devices, and of other versions, it says where a search may begin."""
    packaged = importlib.resources.files("hybridpar.tvm_kernels").joinpath("kernels.jsonl")
    with contextlib.suppress(FileNotFoundError):
        read = parse_records(packaged.read_text("utf-8"))
        # The packaged times come second to any that were measured here.
        return [record.model_copy(update={"tuned_at": 0.0}) for record in read.records]
    return []


def default_database() -> Database:
    """What comes with the package and what was tuned on this machine; the latter counts where both know a key.

    A file that is missing or cannot be read is as an empty one: a database can only make things faster.
    """
    database = Database("the packaged and the user's kernel database", packaged_records())
    try:
        if user_database().exists():
            database.add(read_database(user_database()).records)
    except UsageError as error:
        _log.warning("%s", error.what)
    return database


def append_records(path: str | Path, records: Iterable[KernelRecord]) -> None:
    """Add records at the end of a file, which is made if need be.

    Args:
        path: The file.
        records: Records.

    Raises:
        UsageError: It cannot be written.
    """
    path, lines = Path(path), [record.line() for record in records]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path), path.open("ab+", buffering=0) as file:  # without locks a line is still one write
            size = os.fstat(file.fileno()).st_size
            # A writer may have died within a line; the next record must not be lost with it.
            if lines and size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                file.write(b"\n")
            for line in lines:
                data = line.encode() + b"\n"
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise UsageError(
            cannot_write(path, error),
            "Records of kernels are appended to it as they are measured.",
            "Name another place with -o.",
        ) from error
