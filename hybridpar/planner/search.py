"""Finds the candidate with the least time to the same result, and the simplest of those that are equally fast.

All candidates are simulated. Two plans that are closer than the noise of the profile are equal, whatever the digits
say; of all that are equal to the fastest the simplest is chosen. What saves memory is tried where it is short.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hybridpar.errors import PlanError
from hybridpar.planner.cuts import CutLibrary
from hybridpar.planner.evaluate import Evaluator, Outcome
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.space import Candidate, Space

#: The plan that every search contains, unless something else was decided on.
DATA_PARALLEL = "data parallel"

#: Of two predictions of one simulator, differences below this are rounding.
LEAST_NOISE = 1e-9


@dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        chosen: The plan to use: the simplest of `ties`.
        ties: All plans that the profile's noise cannot tell from the fastest one, the simplest first.
        ranked: All plans that fit into memory, the fastest first.
        baselines: Plain data parallelism and one device, by name, where they are allowed; None where one does not fit
            into memory.
        noise: Relative difference up to which plans are equal.
        considered: Number of plans that were simulated.
        evaluator: What predicted them.
    """

    chosen: Outcome
    ties: tuple[Outcome, ...]
    ranked: tuple[Outcome, ...]
    baselines: dict[str, Outcome | None]
    noise: float
    considered: int
    evaluator: Evaluator

    @property
    def inputs(self) -> PlannerInputs:
        """What the search read."""
        return self.evaluator.inputs


def find_plan(
    inputs: PlannerInputs,
    *,
    library: CutLibrary | None = None,
) -> Answer:
    """Search for the best plan.

    Args:
        inputs: Everything that the search reads.
        library: Cuts of the same model, where another search has made them.

    Returns:
        The chosen plan, those that are as good, and all others.

    Raises:
        PlanError: No plan fits into the memory; the message says what is missing, and the nearest that fits. Or what
            is decided leaves no plan.
    """
    evaluator = Evaluator(Space(inputs, library=library))
    space, noise = evaluator.space, max(inputs.profile.resolution, LEAST_NOISE)
    outcomes: dict[Candidate, Outcome] = {}
    for saving in (False, True):  # only memory makes it worth to compute activations again, or to hand parameters round
        for outcome in _outcomes(evaluator, space.candidates(saving)):
            outcomes[outcome.candidate] = outcome
        if not outcomes:
            raise _nothing_left(space)
        if all(outcome.fits for outcome in outcomes.values()):
            break
    fitting = [outcome for outcome in outcomes.values() if outcome.fits]
    if not fitting:
        raise _too_little_memory(list(outcomes.values()))
    baselines = {}
    for name, count in ((DATA_PARALLEL, space.workers), ("one device", 1)):
        plain = (outcome for candidate, outcome in outcomes.items() if candidate.is_plain and not candidate.sharded)
        baseline = next((outcome for outcome in plain if outcome.candidate.layout.workers == count), None)
        if baseline is not None:
            baselines[name] = baseline if baseline.fits else None
    ranked = sorted(fitting, key=lambda outcome: (outcome.score, outcome.candidate.simplicity))
    equal = [outcome for outcome in ranked if outcome.score <= ranked[0].score * (1 + noise)]
    ties = sorted(equal, key=lambda outcome: outcome.candidate.simplicity)
    return Answer(ties[0], tuple(ties), tuple(ranked), baselines, noise, len(outcomes), evaluator)


def _outcomes(evaluator: Evaluator, candidates: Iterable[Candidate]) -> Iterator[Outcome]:
    """What candidates are predicted to take; where one does not fit also with the cut that needs the least."""
    for candidate in candidates:
        outcome = evaluator.outcome(candidate)
        yield outcome
        if not outcome.fits:
            cut, way = evaluator.space.smallest_cut(candidate.layout), candidate.cut
            if cut is not None and cut.stage_of != way.stage_of:
                cut = replace(cut, recompute=way.recompute, offload=way.offload)
                yield evaluator.outcome(replace(candidate, cut=cut))


def _too_little_memory(outcomes: Sequence[Outcome]) -> PlanError:
    """The error that says how much is missing."""
    nearest = min(
        outcomes, key=lambda outcome: (outcome.memory_bytes - outcome.limit_bytes, outcome.candidate.simplicity)
    )
    need, have, candidate = nearest.memory_bytes, nearest.limit_bytes, nearest.candidate
    layout = candidate.layout
    return PlanError(
        f"no plan fits into {have / 1e6:,.1f} MB per device: the smallest needs {_up(need)} MB, "
        f"{_up(need - have)} MB more",
        f"It has {layout.stages} stage(s) on {layout.workers} worker(s) with {candidate.micro_batches} micro-batch(es)"
        f"{''.join(f', {text}' for text in candidate.saving)}; each worker holds parameters, gradients and "
        "optimizer state of its stages, and activations that wait.",
        f"Use devices of {_up(need)} MB, more of them, or a smaller batch.",
    )


def _nothing_left(space: Space) -> PlanError:
    """The error that says what is decided, as together that leaves nothing."""
    fixed = space.inputs.fixed
    apart = ("codecs", "every_step", "exchanged", "staged", "equal")
    limits = {name: value for name, value in vars(fixed).items() if name not in apart}
    words = [f"{name} {value}" for name, value in limits.items() if value is not None]
    words += ["several replicas"] * fixed.exchanged + ["several stages"] * fixed.staged
    return PlanError(
        f"what is decided leaves no plan for {space.workers} worker(s): {', '.join(words) or 'nothing'}",
        "Stages x replicas use all workers that are asked for, and stages are units of the model.",
        "Leave more of it to the search.",
    )


def _up(size: float) -> str:
    """Megabytes with one decimal, rounded up, so that the number given really works."""
    return f"{-(-size // 1e5) / 10:,.1f}"
