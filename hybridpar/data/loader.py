"""Loads this worker's share of every step.

The shares follow from numbers alone (`hybridpar.data.sampling`), so a loader holds no state: an epoch can be started at
any step, again and again. Images in memory are gathered on the calling thread; image files are decoded ahead of time by
torch's loader processes, and then copied to a GPU on a lane of their own, beside the step that runs there.
"""

from __future__ import annotations

import gc
import logging
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hybridpar.data.augment import normalise
from hybridpar.data.sampling import (
    COPY,
    FEWEST_PER_PART,
    AugmentKey,
    IntArray,
    allot,
    cut_epoch,
    divide,
    epoch_order,
    repeated,
)
from hybridpar.data.sources import ImageData, ImageSource, Loaded, to_device
from hybridpar.errors import DataError, LaunchError, check
from hybridpar.lanes import Lane, Lanes

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")

#: Loader processes per worker where images are read from files.
DEFAULT_LOADER_WORKERS = 2

#: Files that cannot be read and are named one by one; then their number is logged whenever it has doubled.
_NAMED = 5

LabelledImages = tuple[Tensor, Tensor]

#: Samples to load, and how they are augmented.
_Job = tuple[IntArray, AugmentKey | None]


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


class TrainBatches:
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
        shares: What each worker gets of a step, in any unit; None for equal parts. See `allot`.
        idle: A worker may get no sample in a step.

    Attributes:
        shares: As given. Other ones count from the next call of `epoch` on, for all workers alike.

    Raises:
        UsageError: The batch or the data set is too small, see `cut_epoch`; or there is no such worker.
    """

    def __init__(
        self,
        data: ImageData,
        *,
        seed: int,
        batch_size: int,
        rank: int,
        workers: int,
        micro_batches: int,
        loader_workers: int | None = None,
        device: torch.device | str | None = None,
        channels_last: bool = False,
        in_pairs: bool = False,
        repeats: int = 1,
        shares: Sequence[float] | None = None,
        idle: bool = True,
    ) -> None:
        check(0 <= rank < workers, f"rank {rank} of {workers} workers")
        self.shares = shares
        self._idle = idle
        self._in_pairs = in_pairs
        self._repeats = repeats
        self.seed = seed
        self.rank = rank
        self.workers = workers
        self.micro_batches = micro_batches
        self._steps = cut_epoch(len(data.train), batch_size, workers * micro_batches)
        self._samples = len(data.train)
        self._reader = _Reader(data, data.train, loader_workers, device, channels_last)

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
        """
        if not 0 <= start_step <= len(self._steps):
            raise ValueError(f"start_step is {start_step}, but an epoch has {len(self._steps)} steps")
        return self._batches(epoch, start_step)

    def _batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
        order = epoch_order(self._samples, self.seed, epoch)
        order = repeated(order, self._steps, self._repeats)
        steps = self._steps[start_step:]
        parts = [self._parts(start, stop) for start, stop in steps]
        jobs = [order[first:last] for step in parts for first, last in step]
        loaded = self._reader.read(jobs, AugmentKey(self.seed, epoch))
        for (start, stop), micro_batches in zip(steps, parts, strict=True):
            read = tuple(islice(loaded, len(micro_batches)))
            with self._reader.lent(*read):
                yield Batch(read, sum(len(labels) for _, labels in read), stop - start)

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where this worker's micro-batches of a step are; none where it has no sample."""
        each = self.micro_batches
        if self.shares is None:
            parts = divide(start, stop, self.workers * each, in_pairs=self._in_pairs)
            return parts[self.rank * each : (self.rank + 1) * each]
        options = {"idle": self._idle, "in_pairs": self._in_pairs}
        ends = [*accumulate(allot(stop - start, self.shares, FEWEST_PER_PART * each, **options), initial=start)]
        first, last = ends[self.rank : self.rank + 2]
        return divide(first, last, each, in_pairs=self._in_pairs) if last > first else []


class TestBatches:
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

    def __init__(
        self,
        data: ImageData,
        *,
        batch_size: int,
        rank: int,
        workers: int,
        loader_workers: int | None = None,
        device: torch.device | str | None = None,
        channels_last: bool = False,
        shares: Sequence[float] | None = None,
    ) -> None:
        check(0 <= rank < workers, f"rank {rank} of {workers} workers")
        check(batch_size >= 1, f"batch_size is {batch_size}", "It must be at least 1.")
        #: Test images of all workers.
        self.total = len(data.test)
        start, stop = [*accumulate(allot(self.total, shares or [1.0] * workers, 1), initial=0)][rank : rank + 2]
        self.samples = stop - start
        firsts = range(start, stop, batch_size)
        self._jobs = [np.arange(first, min(first + batch_size, stop), dtype=np.int64) for first in firsts]
        if data.test_size is not None:
            data = replace(data, sample_shape=(data.sample_shape[0], data.test_size, data.test_size))
        self._reader = _Reader(data, data.test, loader_workers, device, channels_last)

    def __len__(self) -> int:
        """Number of batches of this worker."""
        return len(self._jobs)

    def __iter__(self) -> Iterator[LabelledImages]:
        """Images (float32, NCHW) and labels (int64) of each batch."""
        for part in self._reader.read(self._jobs, None):
            with self._reader.lent(part):
                yield part


class _Reader:
    """Reads lists of samples, in order, as normalised images on the device."""

    def __init__(
        self,
        data: ImageData,
        source: ImageSource,
        loader_workers: int | None,
        device: torch.device | str | None,
        channels_last: bool,
    ) -> None:
        self.source = source
        default = 0 if source.in_memory else DEFAULT_LOADER_WORKERS
        self._loader_workers = default if loader_workers is None else loader_workers
        self._device = torch.device(device or "cpu")
        self._size = data.sample_shape[1:]
        self._channels_last = channels_last
        self._opened: tuple[Lanes, Lane] | None = None
        self._mean = torch.tensor(data.mean, device=self._device)
        self._std = torch.tensor(data.std, device=self._device)
        self._damaged: set[str] = set()
        self._idle: tuple[DataLoader[Any], list[_Job]] | None = None

    def read(self, jobs: list[IntArray], key: AugmentKey | None) -> Iterator[LabelledImages]:
        ahead = self._loader_workers > 0 and len(jobs) > 0
        lanes, lane = self._lanes_of_this_thread()
        lane = lane if ahead else lanes.caller
        lane.wait(lanes.caller.record())  # for the mean and the deviation
        for loaded in self._load_ahead(jobs, key) if ahead else self._load(jobs, key):
            self._warn_of(loaded.damaged, "is left out" if key is None else "is replaced by another image")
            if len(loaded.indices) == 0:
                continue
            results: list[Tensor] = []
            lane.submit(partial(self._move, loaded, results), uses=[loaded.images])
            lanes.caller.wait(lane.record())
            images, labels = results
            yield images, labels

    @contextmanager
    def lent(self, *parts: LabelledImages) -> Iterator[None]:
        """Inside, others compute with what was read.

        Its memory belongs to another lane, which must not use it again before this one has passed the computation.
        """
        try:
            yield
        finally:
            lanes, _ = self._lanes_of_this_thread()
            lanes.caller.keep(*(tensor for part in parts for tensor in part))

    def _lanes_of_this_thread(self) -> tuple[Lanes, Lane]:
        """Lanes, and the one on which batches of loader processes are copied and made floats."""
        if self._opened is None or not self._opened[0].is_issuer():
            lanes = Lanes(self._device if self._device.type == "cuda" else "cpu")
            self._opened = lanes, lanes.open("data") if self._device.type == "cuda" else lanes.caller
        return self._opened

    def _move(self, loaded: Loaded, results: list[Tensor]) -> None:
        """Put images, as floats, and labels on the device."""
        images = loaded.images.to(self._device, non_blocking=True)
        labels = self.source.labels[torch.from_numpy(loaded.indices % COPY)]
        if images.dtype == torch.uint8:
            images = normalise(images, self._mean, self._std, size=self._size, channels_last=self._channels_last)
        elif self._channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        results += [images, to_device(labels.float() if labels.ndim == 2 else labels, self._device)]

    def _warn_of(self, damaged: tuple[str, ...], use: str) -> None:
        """Name files that cannot be read, each once; of many only some, and how many there are."""
        for problem in {*damaged} - self._damaged:
            self._damaged.add(problem)
            count = len(self._damaged)
            if count <= _NAMED or count & (count - 1) == 0:
                _log.warning("warning: %s; it %s (unreadable files so far: %d)", problem, use, count)

    def _load(self, jobs: list[IntArray], key: AugmentKey | None) -> Iterator[Loaded]:
        for indices in jobs:
            yield self.source.load_readable(indices, key, self._device)

    def _load_ahead(self, jobs: list[IntArray], key: AugmentKey | None) -> Iterator[Loaded]:
        loader, queue = self._processes(min(self._loader_workers, len(jobs)))
        queue[:] = [(indices, key) for indices in jobs]
        with _starting_processes():
            iterator = iter(loader)
        try:
            for left in reversed(range(len(jobs))):
                with _watching_processes():
                    loaded = next(iterator)
                if isinstance(loaded, DataError):
                    raise loaded
                if not left:  # before the last batch is handed over: nobody may ask whether there is another one
                    self._idle = loader, queue
                yield loaded
        finally:
            # Ends the processes now, unless all was read: the traceback of an error would keep them as long as somebody
            # looks at it.
            del iterator, loader

    def _processes(self, count: int) -> tuple[DataLoader[Any], list[_Job]]:
        """Loader processes that wait for jobs, and the list to put the jobs on: those of the last epoch, or new ones.

        Processes are kept from epoch to epoch, as starting them takes a tenth of a second.
        """
        idle, self._idle = self._idle, None
        if idle is not None and idle[0].num_workers == count:
            return idle
        queue: list[_Job] = []
        with _starting_processes():
            loader = DataLoader(
                _Jobs(self.source),
                batch_size=None,  # A job is a batch already.
                sampler=queue,
                num_workers=count,
                collate_fn=_as_is,
                pin_memory=self._device.type == "cuda",
                worker_init_fn=_begin_process,
                persistent_workers=True,
                # Without a generator of its own, a loader draws a seed from the global one.
                generator=torch.Generator(),
            )
        return loader, queue


class _Jobs(Dataset[Loaded | DataError]):
    """What runs in the loader processes. It must survive pickling, for platforms that cannot fork.

    An error is handed over as a value: torch would bury an exception's message in the traceback of the process.
    """

    def __init__(self, source: ImageSource) -> None:
        self._source = source

    def __getitem__(self, job: _Job) -> Loaded | DataError:
        try:
            return self._source.load_readable(*job, _CPU)
        except DataError as error:
            return error


@contextmanager
def _watching_processes() -> Iterator[None]:
    """Inside, a loader process that died is an error after which the workers start again.

    Torch's handler of SIGCHLD would raise one anywhere else, so it is taken back.
    """
    before = signal.getsignal(signal.SIGCHLD)
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
        if signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before)


@contextmanager
def _starting_processes() -> Iterator[None]:
    """Inside, the garbage collector does not run, here and in processes that are forked, until `_begin_process`."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings(), _watching_processes():
            # Torch counts the cores this worker is pinned to, and advises against more processes than those.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            yield
    finally:
        if enabled:
            gc.enable()


def _as_is(loaded: Any) -> Any:
    return loaded


def _begin_process(_: int) -> None:
    # Ctrl-C reaches every process of the terminal; the worker decides what becomes of its loader processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Garbage of the parent stays: to free its CUDA streams and events would end a forked process.
    gc.freeze()
    gc.enable()
