"""Times plans and peers in turns, each alone in its processes for some steps, as it is in a training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybridpar.comm.world import World
from hybridpar.models.state import give_back_memory
from hybridpar.planner.trials import FIRST_STEPS

#: Visits of each, and seconds of one after its first steps.
LEAST_VISITS, MOST_VISITS, VISIT_SECONDS = 2, 4, 2.5


@dataclass(frozen=True)
class Running:
    """Something that takes steps.

    Attributes:
        step: Takes one, to its end.
        close: Ends it.
        interval: Steps that are taken and timed together: from one exchange of an outer loop to the next.
    """

    step: Callable[[], object]
    close: Callable[[], object] = lambda: None
    interval: int = 1


def in_turns(
    made: Mapping[str, Callable[[], Running]],
    world: World,
    rounds: int,
    seconds: float,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Steps of several that take turns; a collective.

    Each is visited as often as there is time for, at least twice, in changing order; nothing else lives in the
    processes meanwhile.

    Args:
        made: Makes each, by name.
        world: All workers of the job.
        rounds: Steps of a visit that count, at most; at least three do.
        seconds: No new round of visits begins later than this.
        after: Called with the name after every visit.

    Returns:
        The milliseconds of a step in every visit by name: of a worker the median over steps, and of these the most.
    """
    times: dict[str, list[float]] = {name: [] for name in made}
    begin = time.perf_counter()
    for number in range(MOST_VISITS):
        late: list[bool] = world.gather(time.perf_counter() - begin > seconds)  # type: ignore[assignment]
        if number >= LEAST_VISITS and any(late):
            break
        for name in made if number % 2 == 0 else [*reversed([*made])]:
            give_back_memory()  # a training begins with an empty heap
            running = made[name]()
            try:
                times[name].append(_visit(running, world, rounds))
            finally:
                running.close()
            del running
            after(name)
    return times


def _visit(running: Running, world: World, rounds: int) -> float:
    """Milliseconds of a step, of the slowest worker; a collective.

    As in a training, workers wait for what they need of each other and for nothing else between steps.
    """

    def timed() -> float:
        began = time.perf_counter()
        for _ in range(running.interval):
            running.step()
        return 1e3 * (time.perf_counter() - began) / running.interval

    world.barrier()
    first: list[float] = world.gather([timed() for _ in range(FIRST_STEPS)][-1])  # type: ignore[assignment]
    count = max(3, min(rounds, int(1e3 * VISIT_SECONDS / max(first) / running.interval)))
    medians: list[float] = world.gather(statistics.median(timed() for _ in range(count)))  # type: ignore[assignment]
    return max(medians)
