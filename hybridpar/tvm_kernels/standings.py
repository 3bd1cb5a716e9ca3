"""Why: searches on a CPU and on a GPU keep the same books: what was asked for, what was measured, what is best."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from hybridpar.codegen.cache import KernelsUnavailable

_log = logging.getLogger(__name__)

#: Candidates that may be lost before any was measured; then nothing can be built or loaded here.
_MOST_LOST = 8

Key = tuple[tuple[str, int], ...]
_Kernel = TypeVar("_Kernel")


@dataclass(frozen=True)
class Tuned:
    """A candidate that was measured.

    Attributes:
        parameters: Of the schedule.
        ms: Of one call, median of the pairs.
        stock_ms: Of torch's, in its better layout, in the same pairs.
        floor_ms: What neither arithmetic nor memory can beat.
        error: Largest difference from float64, relative to the largest value.
        speedup: Median of the ratios, pair by pair.
        predicted: What the model said: cycles on a CPU, seconds on a GPU.
        final: Whether it was timed again as a finalist.
        drawn: Whether it was drawn at random, and not chosen.
        layout_ms: Of torch's call in the layout of the kernel, where it is not its better one; of finalists only.
        stock_error: Torch's largest difference from float64, on the same data.
        noise: Of the ratio, see `measure.Timing`; of finalists that of repeated comparisons, see `steady_timing`.
    """

    parameters: Mapping[str, int]
    ms: float
    stock_ms: float
    floor_ms: float
    error: float
    speedup: float = 0.0
    predicted: float = 0.0
    final: bool = False
    drawn: bool = False
    layout_ms: float | None = None
    stock_error: float | None = None
    noise: float = 0.0


class TuningStopped(KeyboardInterrupt):
    """The user stopped the search.

    Args:
        results: What was measured until then, best first.
    """

    def __init__(self, results: list[Tuned]) -> None:
        super().__init__("stopped")
        self.results = results


class Timed(Protocol):
    """What a comparison with torch found."""

    @property
    def ms(self) -> float: ...  # noqa: D102
    @property
    def stock_ms(self) -> float: ...  # noqa: D102
    @property
    def speedup(self) -> float: ...  # noqa: D102
    @property
    def noise(self) -> float: ...  # noqa: D102


def key_of(parameters: Mapping[str, int]) -> Key:
    """What tells candidates apart."""
    return tuple(sorted(parameters.items()))


class Standings(Generic[_Kernel]):
    """What a search knows.

    Args:
        predicted: What the model says of each candidate.
        on_progress: Called with each candidate that was measured and the best so far.

    Attributes:
        results: Candidates that were measured.
        kernels: Of candidates that may be timed again.
        asked: Candidates that were tried.
        drawn: Candidates that were drawn at random.
    """

    def __init__(
        self, predicted: Mapping[Key, float], on_progress: Callable[[Tuned, Tuned], None] | None = None
    ) -> None:
        self.predicted, self.on_progress = predicted, on_progress
        self.results: dict[Key, Tuned] = {}
        self.kernels: dict[Key, _Kernel] = {}
        self.asked: set[Key] = set()
        self.drawn: set[Key] = set()
        self._lost = 0

    def sorted(self) -> list[Tuned]:
        """What was measured, finalists first, and of those the fastest."""
        return sorted(self.results.values(), key=lambda one: (not one.final, one.ms))

    def fastest(self, count: int) -> list[Key]:
        """The candidates with the shortest times, the best first."""
        return sorted(self.results, key=lambda one: self.results[one].ms)[:count]

    def lose(self, what: str, error: Exception) -> None:
        """Take note of a candidate that came to nothing.

        Raises:
            KernelsUnavailable: So have all others.
        """
        self._lost += 1
        _log.info("%s: %s", what, error)
        if self._lost >= _MOST_LOST and not self.results:
            raise KernelsUnavailable(str(error)) from None

    def measured(
        self, parameters: Mapping[str, int], timing: Timed, floor_ms: float, error: float, stock_error: float
    ) -> Tuned:
        """A candidate's result."""
        key = key_of(parameters)
        numbers = (timing.ms, timing.stock_ms, floor_ms, error, timing.speedup, self.predicted[key])
        drawn = key in self.drawn
        return Tuned(dict(parameters), *numbers, drawn=drawn, stock_error=stock_error, noise=timing.noise)

    def finish(self, key: Key, timing: Timed) -> Tuned:
        """The result of a finalist: that of the search with the times of its last comparisons."""
        before = replace(self.results[key], final=True, noise=timing.noise)
        return replace(before, ms=timing.ms, stock_ms=timing.stock_ms, speedup=timing.speedup)

    def note(self, key: Key, result: Tuned) -> None:
        """Take in a result, and tell how it stands."""
        self.results[key] = result
        if self.on_progress is not None:
            self.on_progress(result, self.sorted()[0])
