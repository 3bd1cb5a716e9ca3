"""Which worker reads which sample in which order, and the random seeds of its augmentation.

Everything here is a pure function of numbers that all workers know. So no worker tells another what it read, a run can
resume in the middle of an epoch, and 1, 2 or 3 workers train on the same samples in the same steps.

Randomness is counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a draw is a hash of
what it is for, not the next number of a stream. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014,
"Fast splittable pseudorandom number generators"). No global generator is read or changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridpar.errors import check

IntArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1

#: Copy c of sample i, which is augmented by itself, has the number i + c * COPY; no data set has so many samples.
COPY = 1 << 40

#: Fewest samples in a micro-batch: BatchNorm cannot estimate a variance from one value per channel.
FEWEST_PER_PART = 2


class Draw(IntEnum):
    """What a random number is for; draws for different purposes are independent."""

    ORDER = 0
    ROW = 1
    COLUMN = 2
    FLIP = 3
    TRANSFORM = 4
    SPLIT = 5
    MIX = 6


class AugmentKey(NamedTuple):
    """What the augmentation of a sample depends on, besides its index.

    Attributes:
        seed: Of the run.
        epoch: From 0.
    """

    seed: int
    epoch: int


def counter_hash(seed: int, epoch: int, draw: Draw, indices: IntArray) -> HashArray:
    """One 64-bit random number per index."""
    state: HashArray = np.zeros(1, dtype=np.uint64)
    for word in (seed, epoch, draw):
        state = _mix((state ^ np.uint64(int(word) & _WORD)) + _GAMMA)
    return _mix((state ^ indices.astype(np.uint64)) + _GAMMA)


def _mix(x: HashArray) -> HashArray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def bounded(numbers: HashArray, bound: int) -> IntArray:
    """Map random 64-bit numbers to integers in [0, bound)."""
    return (((numbers >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def epoch_order(samples: int, seed: int, epoch: int) -> IntArray:
    """The order of an epoch: a permutation of range(samples) that depends on nothing but the arguments."""
    return np.argsort(counter_hash(seed, epoch, Draw.ORDER, np.arange(samples)), kind="stable")


def cut_epoch(samples: int, batch_size: int, parts: int) -> list[tuple[int, int]]:
    """Cut an epoch of samples into steps; nothing is dropped and nothing is seen twice.

    Every step has `batch_size` samples but the last, which has what is left. Where that is too little to give every
    part two samples, it is joined to the step before, which then has more than `batch_size`. For the same samples and
    batch size, the cut is therefore the same whatever the number of parts, except that more parts may join the tail.

    Args:
        samples: Training samples of an epoch.
        batch_size: Samples per step, over all parts.
        parts: Workers times micro-batches per worker: what each step is divided into, see `divide`.

    Returns:
        (start, stop) of each step, positions in the order of the epoch.

    Raises:
        UsageError: The batch or the data set is too small for that many parts.
    """
    least = FEWEST_PER_PART * parts
    rule = f"Each of the {parts} parts of a step (workers x micro-batches) needs at least {FEWEST_PER_PART} samples."
    check(batch_size >= least, f"--batch-size is {batch_size}", rule, f"Use --batch-size {least} or more.")
    most = samples // FEWEST_PER_PART
    fix = f"Use at most {most} workers of one micro-batch each." if most else "Use a larger data set."
    check(samples >= least, f"the data set has {samples} training samples", rule, fix)
    steps = max(1, samples // batch_size)
    cut = [(step * batch_size, (step + 1) * batch_size) for step in range(steps)]
    rest = samples - steps * batch_size
    if rest >= least:
        cut.append((steps * batch_size, samples))
    else:
        cut[-1] = (cut[-1][0], samples)
    return cut


def divide(start: int, stop: int, parts: int, *, in_pairs: bool = False) -> list[tuple[int, int]]:
    """Divide [start, stop) into consecutive parts whose sizes differ by at most one, larger ones first.

    Worker r of R with M micro-batches computes parts r*M to (r+1)*M of R*M. So R workers of one micro-batch see the
    very slices that one worker of R micro-batches sees.

    Args:
        start: First position.
        stop: The one behind the last.
        parts: Number of parts.
        in_pairs: Cut an even number of positions behind `start`, for samples that are mixed with their neighbour; then
            sizes differ by at most two, or three where the last part has an odd sample more.

    Returns:
        (first, the one behind the last) of each part.
    """
    unit = 2 if in_pairs else 1
    size, larger = divmod((stop - start) // unit, parts)
    bounds = [start + unit * (part * size + min(part, larger)) for part in range(parts)]
    return list(pairwise([*bounds, stop]))


def allot(samples: int, shares: Sequence[float], least: int, *, idle: bool = True, in_pairs: bool = False) -> list[int]:
    """Divide the samples of a step among workers by their shares: the method of largest remainders.

    A worker whose share is too small for its micro-batches gets no sample in this step, and the others get its samples.
    """
    unit = 2 if in_pairs else 1
    fewest, counts = -(-least // unit), [0] * len(shares)
    free, left = [worker for worker, share in enumerate(shares) if share > 0 or not idle], samples // unit
    while free:
        total = sum(shares[worker] for worker in free) or 1.0
        exact = {worker: left * shares[worker] / total for worker in free}
        counts = [int(exact[worker]) if worker in exact else count for worker, count in enumerate(counts)]
        by_remainder = sorted(free, key=lambda worker: counts[worker] - exact[worker])  # stable: lower ranks first
        for worker in by_remainder[: left - sum(counts[worker] for worker in free)]:
            counts[worker] += 1
        small = min(free, key=lambda worker: (counts[worker], shares[worker]))
        if counts[small] >= fewest or len(free) == 1:
            break
        free.remove(small)
        counts[small] = 0 if idle else fewest
        left -= counts[small]
    counts = [unit * count for count in counts]
    counts[max((worker for worker, count in enumerate(counts) if count), default=0)] += samples % unit
    return counts


def repeated(order: IntArray, steps: Sequence[tuple[int, int]], repeats: int) -> IntArray:
    """The order of an epoch in which every batch has several copies of fewer samples.

    Repeated augmentation (Hoffer et al. 2020, "Augment your batch"): the copies differ in their augmentation. They are
    as far from each other in the batch as they can be, so that mixing does not make pairs of them.
    """
    if repeats == 1:
        return order
    result, used = [], 0
    for start, stop in steps:
        count = -(-(stop - start) // repeats)
        chosen = order[used : used + count]
        used += count
        result.append(np.concatenate([chosen + COPY * copy for copy in range(repeats)])[: stop - start])
    return np.concatenate(result)


def split_by_class(labels: IntArray, train_counts: Sequence[int], seed: int) -> tuple[IntArray, IntArray]:
    """Split samples into a training and a test set with a given number of training samples of each class."""
    train = np.zeros(len(labels), dtype=bool)
    for label, count in enumerate(train_counts):
        members = np.flatnonzero(labels == label)
        chosen = np.argsort(counter_hash(seed, label, Draw.SPLIT, np.arange(len(members))), kind="stable")[:count]
        train[members[chosen]] = True
    return np.flatnonzero(train), np.flatnonzero(~train)
