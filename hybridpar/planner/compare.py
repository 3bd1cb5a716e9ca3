"""Compares what a run measured with what its plan predicted, and names the likely cause of a difference.

Where step times differ by more than `APART`, the part of the step that differs most names the likely cause. For the
exchange of gradients that is a link with another speed than the planned one; which speed it would have to be is found
by predicting the same plan on slower and faster links.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import cached_property

from hybridpar.errors import HybridparError
from hybridpar.machine.cluster_file import ClusterSpec, LinkLevel
from hybridpar.plan import Plan, Ran, StepFigures
from hybridpar.planner.evaluate import Evaluator, Outcome
from hybridpar.planner.inputs import PlannerInputs, inputs_of_plan
from hybridpar.planner.record import candidate_of
from hybridpar.planner.space import Candidate, Space

#: Relative difference above which a prediction has failed.
APART = 0.15

#: Bytes that a process may grow by for other things than the model, such as code that is loaded when it first runs.
LIBRARIES = 256 << 20

#: Load of other programs, per core, above which the machine counts as busy.
BUSY = 0.5

#: Links are tried up to so many times as slow, and as fast.
_MOST_SLOWER = 256.0
_HALVINGS = 24
#: Differences of an exposed exchange below this are noise: milliseconds, and part of a step.
_SMALL_MS, _SMALL_PART = 0.2, 0.05


def slower_links(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The same cluster, on all of whose links everything takes so many times as long.

    Args:
        cluster: The cluster.
        factor: 2 halves the bandwidth and doubles the latency; what a byte takes of a core stays.
    """

    def slow(level: LinkLevel | None) -> LinkLevel | None:
        if level is None:
            return None
        return level.faster(1 / factor).model_copy(update={"latency_ms": level.latency_ms * factor})

    return cluster.model_copy(update={"inside": slow(cluster.inside), "between": slow(cluster.between)})


@dataclass(frozen=True)
class Comparison:
    """What was predicted of a plan, and what a run of it measured.

    Attributes:
        plan: The plan, with `predicted` and the inputs that it was made from.
        ran: What was measured.
        load: Load of other programs, per core.
    """

    plan: Plan
    ran: Ran
    load: float = 0.0

    @cached_property
    def _inputs(self) -> PlannerInputs:
        return inputs_of_plan(self.plan)

    @property
    def apart(self) -> float | None:
        """By how much of the prediction the step missed it: 0.1 for 10 % more; None where either is not known."""
        predicted = self.plan.predicted.step_ms if self.plan.predicted is not None else None
        return self.ran.step_ms / predicted - 1 if predicted and self.ran.step_ms is not None else None

    @property
    def compute_ratio(self) -> float | None:
        """Time of everything but the exposed exchange, over what was predicted of it."""
        predicted, ran = _computing(self.plan.predicted), _computing(self.ran)
        return ran / predicted if predicted and ran else None

    @cached_property
    def link_slowdown(self) -> float | None:
        """How many times as slow as planned links would make the exchange as exposed as it was.

        1 where they differ by little of a step: then workers waited for the slowest of them, and no link explains it.
        None where there is one worker, or nothing about it is known.
        """
        exposed = self.ran.exposed_sync_ms
        if self.plan.inputs is None or self._inputs.cluster.workers < 2 or exposed is None:
            return None

        def exposed_at(factor: float) -> float:
            return self._outcome_at(factor).exposed_sync_ms

        now = exposed_at(1.0)
        if abs(exposed - now) <= max(_SMALL_MS, 0.02 * now, _SMALL_PART * (self.ran.step_ms or 0.0)):
            return 1.0
        low, high = (1.0, _MOST_SLOWER) if exposed > now else (1 / _MOST_SLOWER, 1.0)
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            if exposed_at(middle) < exposed:
                low = middle
            else:
                high = middle
        return math.sqrt(low * high)

    @cached_property
    def _space(self) -> Space:
        return Space(self._inputs)

    @cached_property
    def _candidate(self) -> Candidate:
        return candidate_of(self.plan, Evaluator(self._space))

    def _outcome_at(self, factor: float) -> Outcome:
        """The prediction for links that are so many times as slow."""
        inputs = self._inputs.on(slower_links(self._inputs.cluster, factor))
        return Evaluator(Space(inputs, library=self._space.library)).outcome(self._candidate)

    def warnings(self) -> list[str]:
        """What missed its prediction by more than `APART`, each with the likely cause; empty where nothing did."""
        told = []
        if self.apart is not None and abs(self.apart) > APART:
            assert self.plan.predicted is not None
            told.append(
                f"a step took {self.ran.step_ms:,.1f} ms, {100 * self.apart:+.0f} % off the "
                f"{self.plan.predicted.step_ms:,.1f} ms that were predicted: {self._cause()}"
            )
        for name, what in (("bytes_sent_per_step", "a worker sent"), ("memory_bytes", "a worker needed")):
            predicted, ran = getattr(self.plan.predicted, name, None), getattr(self.ran, name)
            if not predicted or ran is None:
                continue
            missed, of_memory = ran / predicted - 1, name == "memory_bytes"
            if of_memory and ran - predicted < LIBRARIES:
                continue  # nor is it a failure where less was needed than was feared
            if abs(missed) > APART:
                told.append(
                    f"{what} {ran / 1e6:,.1f} MB, {100 * missed:+.0f} % off the {predicted / 1e6:,.1f} MB that were "
                    f"predicted: {_SIZE_CAUSES[name]}"
                )
        return told

    def _cause(self) -> str:
        predicted = self.plan.predicted
        more_computing = (_computing(self.ran) or 0.0) - (_computing(predicted) or 0.0)
        more_sync = (self.ran.exposed_sync_ms or 0.0) - ((predicted.exposed_sync_ms or 0.0) if predicted else 0.0)
        if abs(more_sync) > abs(more_computing) or self._is_the_link():
            return f"the exchange of gradients was exposed for {more_sync:+,.1f} ms, {self._link()}"
        part = f"all but the exposed exchange differs by {more_computing:+,.1f} ms, "
        if more_computing < 0:
            return f"{part}so the machine was busier when it was profiled than it is now"
        if self.load > BUSY:
            return f"{part}and other programs keep this machine busy (load {self.load:.1f} per core)"
        return f"{part}so the machine is busy or throttled now, or steps do more than the model that was profiled"

    def _is_the_link(self) -> bool:
        """Whether most of what missed is gone with links as slow as the exchange says.

        They slow down more than the exchange: workers agree over them on every step, and what they take of the cores
        is missing where a worker computes.
        """
        slowdown, ran, predicted = self._slowdown(), self.ran.step_ms, self.plan.predicted
        if slowdown in (None, 1.0) or ran is None or predicted is None or predicted.step_ms is None:
            return False
        return abs(ran - self._outcome_at(slowdown).step_ms) < 0.5 * abs(ran - predicted.step_ms)

    def _slowdown(self) -> float | None:
        with contextlib.suppress(HybridparError):  # a plan that was edited has a cause of its own
            return self.link_slowdown
        return None

    def _link(self) -> str:
        level, slowdown = self._level(), self._slowdown()
        if level is None or slowdown is None:
            return "so the link is not as it was when this was predicted"
        if not 1.01 / _MOST_SLOWER < slowdown < 0.99 * _MOST_SLOWER or abs(slowdown - 1) < 0.01:
            return "which no speed of the link explains"
        planned, seen = level.bandwidth / 1e6, level.bandwidth / slowdown / 1e6
        verb = "slower" if slowdown > 1 else "faster"
        return (
            f"so the link is {verb} than measured: planned with {planned:,.4g} MB/s, steps are as with {seen:,.4g} MB/s"
        )

    def _level(self) -> LinkLevel | None:
        """The links between the workers that are furthest from each other."""
        if self.plan.inputs is None:
            return None
        return self._inputs.cluster.outer


_SIZE_CAUSES = {
    "bytes_sent_per_step": "gradients were not sent with the codec of the plan",
    "memory_bytes": (
        "steps keep more than parameters, gradients, optimizer state and activations, or the allocator has not given "
        "back what it freed"
    ),
}


def _computing(figures: StepFigures | None) -> float | None:
    if figures is None or figures.step_ms is None:
        return None
    return figures.step_ms - (figures.exposed_sync_ms or 0.0)
