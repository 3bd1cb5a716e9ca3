"""Loads this worker's share of every step.

The shares follow from numbers alone (`hybridpar.data.sampling`), so a loader holds no state: an epoch can be started at
any step, again and again. Images in memory are gathered on the calling thread; image files are decoded ahead of time by
torch's loader processes. Both go to a GPU as bytes, on a lane of their own, beside the step that runs there.
"""

from __future__ import annotations

import gc
import logging
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hybridpar.data import sampling
from hybridpar.data.augment import normalise
from hybridpar.data.images import ImageSource, Loaded, to_device
from hybridpar.data.sampling import AugmentKey, IntArray
from hybridpar.data.sources import ImageData
from hybridpar.errors import DataError, LaunchError, check
from hybridpar.lanes import Lane, Lanes

_log = logging.getLogger(__name__)

#: Loader processes per worker where images are read from files.
DEFAULT_LOADER_WORKERS = 2

#: Files that cannot be read and are named one by one; then their number is logged whenever it has doubled.
_NAMED = 5

LabelledImages = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Batch:
    """What one worker computes in one step.

    Args:
        micro_batches: Images (float32, NCHW) and labels of each micro-batch, in order: int64, or float32 of shape
            (n, classes) of a data set whose images have several labels. None where this worker has no sample.
        samples: Samples of this worker in this step.
        global_samples: Samples of all workers in this step. Sums of losses are divided by it.
    """

    micro_batches: tuple[LabelledImages, ...]
    samples: int
    global_samples: int


#: Numbers of images, and what they are augmented by.
_Job = tuple[IntArray, AugmentKey | None]


@dataclass(eq=False)
class _Batches:
    """Reads a worker's lists of samples, in order, as normalised images on the device."""

    data: ImageData
    _: KW_ONLY
    batch_size: int
    rank: int
    workers: int
    loader_workers: int | None = None
    device: torch.device | str = "cpu"
    channels_last: bool = False
    shares: Sequence[float] | None = None

    def _open(self, source: ImageSource, size: tuple[int, int]) -> None:
        check(0 <= self.rank < self.workers, f"rank {self.rank} of {self.workers} workers")
        self._source = source
        self._size = size
        default = 0 if source.in_memory else DEFAULT_LOADER_WORKERS
        self._loader_workers = default if self.loader_workers is None else self.loader_workers
        self._device = torch.device(self.device)
        self._mean, self._std = (torch.tensor(each, device=self._device) for each in (self.data.mean, self.data.std))
        self._damaged: set[str] = set()
        #: What batches of loader processes are copied and made floats on, and all lanes of the thread that reads.
        self._lane: Lane | None = None
        self._lanes: Lanes | None = None
        #: Torch's processes, which are kept from epoch to epoch, and what they are to load.
        self._loader: DataLoader[Any] | None = None
        self._jobs: list[_Job] = []
        self._reading: object = None

    def _read(self, steps: Sequence[list[IntArray]], key: AugmentKey | None) -> Iterator[tuple[LabelledImages, ...]]:
        """The parts of each step that have images. Others compute with them until the next step is asked for."""
        jobs = [(indices, key) for parts in steps for indices in parts]
        if self._lanes is None or not self._lanes.is_issuer():
            self._lanes = Lanes(self._device if self._device.type == "cuda" else "cpu")
            self._lane = self._lanes.open("data") if self._device.type == "cuda" else self._lanes.caller
        caller, lane = self._lanes.caller, self._lane
        assert lane is not None
        self._lanes.forgive()  # an epoch before may have ended by an error
        lane.wait(caller.record())  # for the mean and the deviation
        ahead = self._loader_workers > 0 and len(jobs) > 0
        loaded: Iterator[_Job | Loaded] = self._load_ahead(jobs) if ahead else iter(jobs)
        for parts in steps:
            read: list[LabelledImages] = []
            for part in islice(loaded, len(parts)):
                damaged: list[str] = []
                uses = [part.images] if isinstance(part, Loaded) else []
                lane.submit(partial(self._move, part, read, damaged), uses=uses)
                caller.wait(lane.record())
                self._warn_of(damaged, "is left out" if key is None else "is replaced by another image")
            try:
                yield tuple(read)
            finally:
                # Their memory belongs to another lane, which may use it again once this one has passed the computation.
                caller.keep(*(tensor for part in read for tensor in part))

    def _move(self, job: _Job | Loaded, read: list[LabelledImages], damaged: list[str]) -> None:
        """Load images, unless a process has, and put them, as floats, and labels on the device."""
        loaded = job if isinstance(job, Loaded) else self._source.load(*job, self._device)
        damaged += loaded.damaged
        if len(loaded.indices) == 0:
            return
        images = loaded.images.to(self._device, non_blocking=True)
        labels = self._source.labels[torch.from_numpy(loaded.indices)]
        if images.dtype == torch.uint8:
            images = normalise(images, self._mean, self._std, size=self._size, channels_last=self.channels_last)
        elif self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        read.append((images, to_device(labels.float() if labels.ndim == 2 else labels, self._device)))

    def _warn_of(self, damaged: Sequence[str], use: str) -> None:
        """Name files that cannot be read, each once; of many only some, and how many there are."""
        for problem in {*damaged} - self._damaged:
            self._damaged.add(problem)
            count = len(self._damaged)
            if count <= _NAMED or count & (count - 1) == 0:
                _log.warning("warning: %s; it %s (unreadable files so far: %d)", problem, use, count)

    def _load_ahead(self, jobs: list[_Job]) -> Iterator[Loaded]:
        self._reading = reading = object()
        self._jobs[:] = jobs
        with _processes_of_torch(), warnings.catch_warnings():
            # Torch counts the cores this worker is pinned to, and advises against more processes than those.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            if self._loader is None:
                self._loader = DataLoader(
                    self._source,
                    batch_size=None,  # A job is a batch already.
                    sampler=self._jobs,
                    num_workers=self._loader_workers,
                    collate_fn=_as_is,
                    pin_memory=self._device.type == "cuda",
                    worker_init_fn=_begin_process,
                    persistent_workers=True,
                    # Without a generator of its own, a loader draws a seed from the global one.
                    generator=torch.Generator(),
                )
            iterator = iter(self._loader)
        for _ in jobs:
            if self._reading is not reading:
                raise RuntimeError("another epoch of these batches was begun: only the last one can be read on")
            with _processes_of_torch():
                loaded = next(iterator)
            if isinstance(loaded, DataError):
                raise loaded
            yield loaded


@dataclass(eq=False, kw_only=True)
class TrainBatches(_Batches):
    """One worker's view of the training images.

    Args:
        data: The data set.
        seed: Seed of order and augmentation.
        batch_size: Samples per step over all workers and micro-batches.
        rank: This worker, from 0.
        workers: Number of workers.
        micro_batches: Micro-batches per worker and step.
        loader_workers: Loader processes; None for 0 where the images lie in memory, else 2. With 0, files are decoded
            on the calling thread, and transforms borrow the generators of torch's CPU, numpy and Python meanwhile:
            another thread must not draw from them then.
        device: Where batches are wanted.
        channels_last: Give images in the channels-last memory format.
        in_pairs: Cut a step at even positions, for `hybridpar.data.mix`.
        repeats: Copies of a sample in a step, each augmented by itself; an epoch has that many times fewer samples.
        shares: What each worker gets of a step, in any unit; None for equal parts. See `allot`. Other ones count from
            the next call of `epoch` on, for all workers alike.
        idle: A worker may get no sample in a step.

    Raises:
        UsageError: The batch or the data set is too small, see `cut_epoch`; or there is no such worker.
    """

    seed: int
    micro_batches: int
    in_pairs: bool = False
    repeats: int = 1
    idle: bool = True

    def __post_init__(self) -> None:
        self._open(self.data.train, self.data.sample_shape[1:])
        self._steps = sampling.cut_epoch(len(self.data.train), self.batch_size, self.workers * self.micro_batches)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every epoch."""
        return len(self._steps)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch.

        Args:
            epoch: Epoch, from 0; order and augmentation follow from it and the seed.
            start_step: Steps to leave out; their images are not read. The batches after them are what they would be
                without.

        Raises:
            ValueError: The epoch does not have so many steps.
            DataError: Many images cannot be read. A single one is replaced by another, with a warning.
            LaunchError: A loader process died.
            RuntimeError: Another epoch was begun meanwhile, and loader processes read for that one.
        """
        if not 0 <= start_step <= len(self._steps):
            raise ValueError(f"start_step is {start_step}, but an epoch has {len(self._steps)} steps")
        return self._batches(epoch, start_step)

    def _batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
        order = sampling.epoch_order(len(self.data.train), self.seed, epoch)
        order = sampling.repeated(order, self._steps, self.repeats)
        steps = self._steps[start_step:]
        jobs = [[order[first:last] for first, last in self._parts(start, stop, self.rank)] for start, stop in steps]
        for (start, stop), read in zip(steps, self._read(jobs, AugmentKey(self.seed, epoch)), strict=True):
            yield Batch(read, sum(len(labels) for _, labels in read), stop - start)

    @property
    def counts(self) -> list[int]:
        """Samples of each worker in a step."""
        return [sum(b - a for a, b in self._parts(0, self.batch_size, rank)) for rank in range(self.workers)]

    def _parts(self, start: int, stop: int, rank: int) -> list[tuple[int, int]]:
        """Where the micro-batches of a worker are in a step; none where it has no sample."""
        each = self.micro_batches
        if self.shares is None:
            parts = sampling.divide(start, stop, self.workers * each, in_pairs=self.in_pairs)
            return parts[rank * each : (rank + 1) * each]
        least = sampling.FEWEST_PER_PART * each
        counts = sampling.allot(stop - start, self.shares, least, idle=self.idle, in_pairs=self.in_pairs)
        first, count = start + sum(counts[:rank]), counts[rank]
        return sampling.divide(first, first + count, each, in_pairs=self.in_pairs) if count else []


@dataclass(eq=False, kw_only=True)
class TestBatches(_Batches):
    """One worker's share of the test images: together, the workers test every image exactly once.

    Shares are consecutive. Equal ones differ by at most one image, and are empty where there are more workers than
    images. Images that cannot be read are left out, with a warning.

    Args:
        data: The data set.
        batch_size: Images per batch of this worker.
        rank: This worker, from 0.
        workers: Number of workers.
        loader_workers: As in `TrainBatches`.
        device: Where batches are wanted.
        channels_last: Give images in the channels-last memory format.
        shares: What each worker gets, in any unit; None for equal parts.
    """

    __test__ = False  # Not a test case, whatever pytest makes of its name.

    def __post_init__(self) -> None:
        check(self.batch_size >= 1, f"batch_size is {self.batch_size}", "It must be at least 1.")
        self._open(self.data.test, (self.data.test_size,) * 2)
        #: Test images of all workers.
        self.total = len(self.data.test)
        counts = sampling.allot(self.total, self.shares or [1.0] * self.workers, 1)
        start, self.samples = sum(counts[: self.rank]), counts[self.rank]
        mine = np.arange(start, start + self.samples)
        self._lists = [mine[first : first + self.batch_size] for first in range(0, self.samples, self.batch_size)]

    def __len__(self) -> int:
        """Number of batches of this worker."""
        return len(self._lists)

    def __iter__(self) -> Iterator[LabelledImages]:
        """Images (float32, NCHW) and labels (int64) of each batch."""
        for read in self._read([[indices] for indices in self._lists], None):
            yield from read


@contextmanager
def _processes_of_torch() -> Iterator[None]:
    """Inside, a loader process that died is an error after which the workers start again.

    Torch's handler of SIGCHLD would raise one anywhere else, so it is taken back. The garbage collector does not run,
    here and in processes that are forked, until `_begin_process`.
    """
    handler, collects = signal.getsignal(signal.SIGCHLD), gc.isenabled()
    gc.disable()
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise  # The transforms' own.
        raise LaunchError(
            f"a loader process died: {error}",
            fix="Free memory (shared memory too, /dev/shm), or use fewer --loader-workers; 0 needs none. "
            "A run that ended goes on from its last checkpoint with --resume.",
        ) from error
    finally:
        if collects:
            gc.enable()
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)


def _as_is(loaded: Any) -> Any:
    return loaded


def _begin_process(_: int) -> None:
    # Ctrl-C reaches every process of the terminal; the worker decides what becomes of its loader processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Garbage of the parent stays: to free its CUDA streams and events would end a forked process.
    gc.freeze()
    gc.enable()
