"""Explains the result of a search in words: why each other plan is slower, in milliseconds.

Differences are those of the parts of a step, so they add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.planner.codecs import FIDELITIES
from hybridpar.planner.evaluate import Outcome, Parts
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.search import Answer
from hybridpar.planner.space import Candidate

#: Parts of a step, with what they are called.
PARTS = {
    "compute": "computing",
    "bubble": "bubble",
    "sync": "exposed sync",
    "codec": "codec",
    "update": "update",
}
#: Noise above which a profile is hardly worth planning with.
NOISY = 0.1
#: Differences below this are not named.
_SMALL_MS = 0.05


@dataclass(frozen=True)
class Row:
    """One plan of the table.

    Attributes:
        name: What it is.
        outcome: What is predicted; None where it does not fit into memory.
        parts: Where the time goes.
        verdict: Why it was chosen, or lost.
    """

    name: str
    outcome: Outcome | None
    parts: Parts | None
    verdict: str


def describe(candidate: Candidate, answer: Answer) -> str:
    """A candidate in words."""
    layout, count = candidate.layout, candidate.micro_batches
    details: list[str | None] = []
    if layout.workers == 1 and layout.stages == 1:
        name = "one device"
    elif layout.stages == 1:
        name = f"data parallel over {layout.replicas} devices"
    else:
        sizes = Counter(map(len, layout.ranks))
        devices = " + ".join(f"{many} x {size}" if many > 1 else f"{size}" for size, many in sizes.items())
        name = f"{layout.stages} stages on {devices} device{'s' * (layout.workers > 1)}"
        placement = None if layout.kind == "linear" else f"placement {layout.kind}"
        details = [candidate.schedule, placement, f"cut {candidate.cut.name}"]
    batches = f"{count} micro-batches" if count > 1 else None
    shares = answer.evaluator.shares(layout, count)
    unequal = f"shares {max(shares) / sum(shares):.0%} to {min(shares) / sum(shares):.0%}" if shares else None
    codec = candidate.codec.name if candidate.codec.order else None
    parts = [name, batches, *details, unequal, codec, *candidate.saving]
    return ", ".join(part for part in parts if part is not None)


def rows(answer: Answer, most: int = 5, ran: Sequence[Outcome] = ()) -> list[Row]:
    """The table: the chosen plan, the runners-up, the baselines, and what was run."""
    chosen, evaluator = answer.chosen, answer.evaluator
    chosen_parts = evaluator.parts(chosen.candidate)
    among = f"simplest of {len(answer.ties)} within the noise of {100 * answer.noise:.1f} %"
    verdict = f"chosen: the {among if len(answer.ties) > 1 else 'fastest'}"
    table = [Row(describe(chosen.candidate, answer), chosen, chosen_parts, verdict)]
    others = [outcome for outcome in answer.ranked if outcome != chosen]
    baselines = [*answer.baselines.values(), *ran]
    for outcome in others[:most] + [outcome for outcome in others[most:] if outcome in baselines]:
        parts = evaluator.parts(outcome.candidate)
        if outcome in answer.ties:
            verdict = f"a tie within the noise of {100 * answer.noise:.1f} %, and less simple"
        else:
            verdict = _why_lost(chosen, chosen_parts, outcome, parts)
        table.append(Row(describe(outcome.candidate, answer), outcome, parts, verdict))
    missing = [name for name, baseline in answer.baselines.items() if baseline is None]
    return table + [Row(name, None, None, "does not fit into memory") for name in missing]


def _why_lost(chosen: Outcome, chosen_parts: Parts, other: Outcome, parts: Parts) -> str:
    """By how much a plan lost and to what: `+12.3 ms: exposed sync +15.0, bubble -2.7`."""
    gap = other.score - chosen.score
    differences = {text: getattr(parts, name) - getattr(chosen_parts, name) for name, text in PARTS.items()}
    differences["more steps to the target"] = gap - (other.step_ms - chosen.step_ms)
    largest = sorted(differences.items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{name} {ms:+,.1f}" for name, ms in largest if abs(ms) >= _SMALL_MS)
    text = f"{gap:+,.1f} ms" + " to the same loss" * (chosen.candidate.codec.steps != other.candidate.codec.steps)
    return f"{text}: {reasons}" if reasons else text


def notes(answer: Answer) -> list[str]:
    """What the reader must know of the figures."""
    inputs, unfit = answer.inputs, answer.considered - len(answer.ranked)
    lines = [f"{answer.considered:,} plans simulated, of which {unfit:,} do not fit into memory"]
    if inputs.profile.noise > NOISY:
        lines.append(
            f"the times of layers differed by {100 * inputs.profile.noise:.0f} % from one measurement to the next: "
            "measure again when nothing else runs"
        )
    if inputs.cluster.workers > inputs.workers:
        lines.append(f"a batch of {inputs.batch} feeds {inputs.workers} of {inputs.cluster.workers} workers")
    if inputs.profile.source != "measured":
        lines.append("times are estimated from FLOPs and bytes, not measured: they rank plans, and promise nothing")
    if inputs.profile.batch_norm:
        lines.append("BatchNorm: only plans with the micro-batches of plain data parallelism give the same result")
    loops = [choice for choice in answer.evaluator.space.codec_choices if choice.outer is not None]
    if loops:
        texts = ", ".join(f"{choice.name}: {choice.outer}" for choice in loops)
        lines.append(f"outer loops, as ResNet-18 on digits showed: {texts}")
    return lines


def caveats(inputs: PlannerInputs) -> list[str]:
    """Why no codec was considered, where the fidelity allows some."""
    allowed = FIDELITIES[inputs.fidelity]
    if not allowed or inputs.fixed.codecs is not None or any(text in inputs.rates for text in allowed):
        return []
    return [
        f"--fidelity {inputs.fidelity} chooses no codec here: in shared memory gradients are added where they lie, and "
        "a single worker sends nothing"
    ]
