"""Why: a model needs dozens of searches; they share the time, and what one found is on disk before the next begins.

A search is one direction of one convolution. Those that the database has a record of are skipped, so a run that was
stopped goes on where it was. They go by what torch takes for them in a step, the longest first, and each gets as large
a part of the time that is left; a small budget so goes where most is to be had. A search begins from the best that is
known of the same convolution: in the database, and in the one that comes with the package, from other devices too.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridpar.codegen.compile_pool import Builder
from hybridpar.errors import UsageError
from hybridpar.machine.process import available_cores
from hybridpar.machine.steady import MOST_NOISE
from hybridpar.tvm_kernels.cuda_device import is_gpu
from hybridpar.tvm_kernels.database import (
    Database,
    KernelKey,
    KernelRecord,
    append_records,
    packaged_records,
    read_database,
)
from hybridpar.tvm_kernels.device import installed_versions
from hybridpar.tvm_kernels.machine import measure_speed
from hybridpar.tvm_kernels.stake import weigh
from hybridpar.tvm_kernels.standings import Tuned, TuningStopped
from hybridpar.tvm_kernels.tuner import BUILD_TIMEOUT, tune

_log = logging.getLogger(__name__)

#: Candidates of a search that are kept: the fastest, and others to begin the next search with.
KEPT = 3

#: Seconds in which a search can try one candidate; less is not begun.
LEAST_SECONDS = 2.0

#: Part of the time that may be spent on finding out how long torch takes.
_WEIGHING = 0.1


@dataclass(frozen=True)
class Progress:
    """How far tuning has come.

    Attributes:
        done: Searches that are finished, those skipped included.
        total: All searches.
        key: What is being searched for.
        best: The best candidate of this search so far.
    """

    done: int
    total: int
    key: KernelKey
    best: Tuned | None = None


@dataclass
class SearchReport:
    """What became of a tune.

    Attributes:
        skipped: Searches that the database had a record of.
        tuned: Searches that left a record.
        empty: Searches that no kernel came out of.
        left: Searches for which no time was left.
        stopped: Whether the user stopped it.
        unsteady: Searches and measurements whose repetitions did not agree, so that nothing was recorded.
    """

    skipped: int = 0
    tuned: int = 0
    empty: int = 0
    left: int = 0
    stopped: bool = False
    unsteady: int = 0

    def plus(self, other: SearchReport) -> SearchReport:
        """Of both together."""
        return SearchReport(
            self.skipped + other.skipped,
            self.tuned + other.tuned,
            self.empty + other.empty,
            self.left + other.left,
            self.stopped or other.stopped,
            self.unsteady + other.unsteady,
        )


def search_all(
    keys: Mapping[KernelKey, int] | Iterable[KernelKey],
    path: Path,
    seconds: float,
    *,
    again: bool = False,
    seed: int = 0,
    trials: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    tuner: Callable[..., list[Tuned]] = tune,
    weigher: Callable[[Mapping[KernelKey, int], float], Mapping[KernelKey, float]] = weigh,
    **options: Any,
) -> SearchReport:
    """Search for the kernels of some convolutions, and append what is found to a database.

    Args:
        keys: The convolutions; where they are a mapping, with how often each one runs in a step.
        path: The database.
        seconds: Time for all of it.
        again: Search also where there is a record.
        seed: Of data and search.
        trials: At most so many candidates for each.
        on_progress: Called at the start of a search and with each candidate.
        tuner: Searches for one.
        weigher: Says in milliseconds what torch takes for some convolutions, in so many seconds.
        options: Handed to the tuner as they are.

    Raises:
        UsageError: The database cannot be read or written, or the time is too short for a single search.
        KernelsUnavailable: Nothing can be built on this machine.
    """
    counts = dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys, 1)
    keys = list(counts)
    database = read_database(path) if path.exists() else Database(str(path))
    todo = [key for key in keys if again or database.best(key) is None]
    report = SearchReport(skipped=len(keys) - len(todo))
    if todo and seconds < LEAST_SECONDS:
        raise UsageError(
            f"a budget of {seconds:g} s is too short to try one candidate",
            f"A search takes {LEAST_SECONDS:g} s at least, and {len(todo)} are to be done.",
            f"Use --budget {max(1, round(10 * len(todo) / 60))}m, for instance.",
        )
    if not todo:
        return report
    end = time.monotonic() + seconds
    stakes = weigher({key: counts[key] for key in todo}, _WEIGHING * seconds) if len(todo) > 1 else {todo[0]: 1.0}
    todo = sorted(todo, key=lambda key: -stakes[key])
    packaged = [one for one in packaged_records() if isinstance(one, KernelRecord)]
    known = Database("what is known", [*database.records, *packaged])
    with Builder(len(available_cores()), BUILD_TIMEOUT) as builder:
        shared = {"builder": builder, "speed": functools.cache(lambda: measure_speed(builder)), **options}
        for place, key in enumerate(todo):
            left = end - time.monotonic()
            # The first one is always begun: weighing them, too, has taken time.
            if place and left < LEAST_SECONDS:
                report.left = len(todo) - place
                break
            share = left * stakes[key] / (sum(stakes[other] for other in todo[place:]) or 1.0)

            def tell(best: Tuned | None, at: int = report.skipped + place, of: KernelKey = key) -> None:
                if on_progress is not None:
                    on_progress(Progress(at, len(keys), of, best))

            tell(None)
            try:
                found = tuner(
                    key.shape,
                    key.direction,
                    key.layout,
                    key.threads,
                    max(share, LEAST_SECONDS),
                    seed,
                    lambda _, best, tell=tell: tell(best),
                    known=_known(known, key),
                    trials=trials,
                    **shared,
                )
            except TuningStopped as stopped:
                report.stopped, found = True, stopped.results
            finals = [one for one in found if one.final]
            steady = [one for one in finals if one.noise <= MOST_NOISE]
            _keep(path, key, steady)
            report.tuned += bool(steady)
            report.unsteady += bool(finals) and not steady
            report.empty += not found and not report.stopped
            if finals and not steady:
                tell_unsteady(f"{key.direction} {key.shape.text}", min(one.noise for one in finals))
            if report.stopped:
                report.left = len(todo) - place - bool(finals)
                break
    return report


def tell_unsteady(what: str, noise: float) -> None:
    """Say in a log line that a measurement is not recorded, as its repetitions lay so far apart."""
    _log.warning(
        "%s: measurements lay %.0f %% apart, so none is recorded: tune again when nothing else runs", what, 100 * noise
    )


def _known(database: Database, key: KernelKey) -> list[dict[str, int]]:
    """Parameters that did well before, also with other versions, other devices, threads or batches: where to begin."""
    alike = [
        (other != key, other.device != key.device, best.ms / best.stock_ms, best)
        for other in database
        if (other.direction, other.layout) == (key.direction, key.layout)
        and is_gpu(other.device) == is_gpu(key.device)
        and _same_but_batch(other, key)
        if (best := database.best(other, current=False)) is not None and best.ms and best.stock_ms
    ]
    ordered = [best for *_, best in sorted(alike, key=lambda one: one[:3])]
    return [{name: value for name, value in one.parameters.items() if isinstance(value, int)} for one in ordered]


def _same_but_batch(one: KernelKey, other: KernelKey) -> bool:
    first, second = one.shape, other.shape
    return (first.channels, first.height, first.width, first.kernel, first.stride, first.padding, first.dilation) == (
        *(second.channels, second.height, second.width),
        *(second.kernel, second.stride, second.padding, second.dilation),
    )


def _keep(path: Path, key: KernelKey, found: Sequence[Tuned]) -> None:
    now, versions = time.time(), dict(installed_versions())
    append_records(
        path,
        [
            KernelRecord(
                direction=key.direction,
                shape=key.shape.text,
                dtype=key.dtype,
                layout=key.layout,
                device=key.device,
                threads=key.threads,
                versions=versions,
                parameters=dict(one.parameters),
                ms=one.ms,
                stock_ms=one.stock_ms,
                layout_ms=one.layout_ms,
                floor_ms=one.floor_ms,
                error=one.error,
                stock_error=one.stock_error,
                noise=one.noise,
                tuned_at=now,
            )
            for one in found[:KEPT]
        ],
    )
