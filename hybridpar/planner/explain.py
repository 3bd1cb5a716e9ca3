"""Explains the result of a search in words: why each other plan is slower, in milliseconds, and what would help.

Differences are those of the parts of a step, so they add up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import get_args

from hybridpar.errors import PlanError
from hybridpar.machine.cluster_file import Hosts
from hybridpar.planner.codecs import FIDELITIES
from hybridpar.planner.evaluate import Outcome, Parts
from hybridpar.planner.inputs import Fidelity, PlannerInputs
from hybridpar.planner.search import Answer, find_plan, least_workers
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
        details = [candidate.schedule, None if layout.kind == "linear" else layout.kind, candidate.cut.name]
    batches = f"{count} micro-batches" if count > 1 else None
    shares = answer.evaluator.shares(layout, count)
    unequal = f"shares {max(shares) / sum(shares):.0%} to {min(shares) / sum(shares):.0%}" if shares else None
    codec = candidate.codec.name if candidate.codec.order else None
    parts = [name, batches, *details, unequal, codec, *candidate.saving]
    return ", ".join(part for part in parts if part is not None)


def rows(answer: Answer, most: int = 5) -> list[Row]:
    """The table: the chosen plan, the runners-up, and the baselines."""
    chosen, evaluator = answer.chosen, answer.evaluator
    chosen_parts = evaluator.parts(chosen.candidate)
    among = f"simplest of {len(answer.ties)} within the noise of {100 * answer.noise:.1f} %"
    verdict = f"chosen: the {among if len(answer.ties) > 1 else 'fastest'}"
    table = [Row(describe(chosen.candidate, answer), chosen, chosen_parts, verdict)]
    others = [outcome for outcome in answer.ranked if outcome != chosen]
    baselines = list(answer.baselines.values())
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


def what_ifs(inputs: PlannerInputs, answer: Answer) -> list[str]:
    """What a looser fidelity, a faster link, another device, and leaving out hosts of one speed would gain.

    Each is a search of its own.
    """
    cluster, fidelities = inputs.cluster, get_args(Fidelity)
    changes: list[tuple[str, PlannerInputs | str]] = []  # or why nothing can be said
    for fidelity in fidelities[fidelities.index(inputs.fidelity) + 1 :]:
        added = set(FIDELITIES[fidelity]) - set(FIDELITIES[inputs.fidelity])
        untimed = "its codecs were not timed, which planning with it does"
        change = inputs.with_fidelity(fidelity) if added & inputs.rates.keys() else untimed
        changes.append((f"--fidelity {fidelity}", change))
    faster = inputs.on(cluster.faster_links(10)) if cluster.workers > 1 else "there is no link"
    changes.append(("a link 10 times as fast", faster))
    for host in cluster.hosts if cluster.is_unequal else ():
        if (rest := cluster.without(host)) is not None:
            changes.append((f"without {_name_of(host)}", inputs.on(rest)))
    more = cluster.with_another()
    larger = inputs.same_result().on(more) if more is not None else "nothing says what would lie between devices"
    changes.append(("another host" if cluster.between is not None else "another device", larger))
    return [f"{name}: {_gain_of(change, answer)}" for name, change in changes]


def _gain_of(changed: PlannerInputs | str, answer: Answer) -> str:
    """What is gained with changed inputs; `changed` says why there are none."""
    if isinstance(changed, str):
        return changed
    try:
        other = find_plan(changed, library=answer.evaluator.space.library, advise=False)
    except PlanError as error:
        return error.what
    gain = answer.fastest.score - other.fastest.score
    if abs(gain) < _SMALL_MS:
        return "gains nothing"
    plan = describe(other.fastest.candidate, other)
    return f"{'gains' if gain > 0 else 'loses'} {abs(gain):,.1f} ms a step ({other.fastest.score:,.1f} ms, {plan})"


def notes(inputs: PlannerInputs, answer: Answer) -> list[str]:
    """What the reader must know of the figures."""
    unfit = answer.considered - len(answer.ranked)
    lines = [f"{answer.considered:,} plans simulated, of which {unfit:,} do not fit into memory"]
    if inputs.profile.noise > NOISY:
        lines.append(
            f"the profile's noise is {100 * inputs.profile.noise:.0f} %, so its times are doubtful, though plans only "
            f"{100 * answer.noise:.0f} % apart count as equal: measure again when nothing else runs"
        )
    if inputs.cluster.workers > inputs.workers:
        lines.append(f"a batch of {inputs.batch} feeds {inputs.workers} of {inputs.cluster.workers} workers")
    if inputs.profile.source != "measured":
        lines.append("times are estimated from FLOPs and bytes, not measured: they rank plans, and promise nothing")
    if inputs.profile.batch_norm:
        lines.append("BatchNorm: only plans with the micro-batches of plain data parallelism give the same result")
    sizes = [host.memory for host in inputs.cluster.hosts if host.memory is not None]
    if sizes and (least := least_workers(answer.evaluator)):
        workers, candidate = least
        stages = f"{candidate.layout.stages} stages" if candidate.layout.stages > 1 else "whole"
        lines.append(
            f"least workers of {min(sizes) / 1e9:,.2f} GB that it can be trained on with this batch: {workers} "
            f"({', '.join([stages, *candidate.saving])})"
        )
    if inputs.cluster.is_unequal:
        lines += _of_unlike_hosts(inputs, answer)
    loops = [choice for choice in answer.evaluator.space.codec_choices if choice.outer is not None]
    if loops:
        texts = ", ".join(f"{choice.name}: {choice.outer}" for choice in loops)
        lines.append(f"outer loops, as ResNet-18 on digits showed: {texts}")
    return lines + caveats(inputs)


def _of_unlike_hosts(inputs: PlannerInputs, answer: Answer) -> list[str]:
    """Which hosts the chosen plan leaves out, and what stays equal though they differ in speed."""
    layout, lines = answer.chosen.candidate.layout, []
    used = [host for _, host in inputs.by_worker[: layout.workers]]
    for host in inputs.cluster.hosts:
        if host not in used:
            lines.append(f"{_name_of(host)} is left out, as a step with it would take no less time")
    speeds = [min(answer.evaluator.throughput(layout, replica)) for replica in range(layout.replicas)]
    if inputs.profile.batch_norm and min(speeds) < max(speeds):
        gain = sum(speeds) / len(speeds) / min(speeds)
        lines.append(
            "BatchNorm: parts of a batch stay equal, as others would be normalised by other samples; `--shares auto` "
            f"divides them by speed, and computing then takes up to {gain:.2f} times less"
        )
    return lines


def _name_of(host: Hosts) -> str:
    """A kind of host in words."""
    devices, speed = host.count * host.devices, f", {host.throughput:g} times as fast" * (host.throughput != 1)
    return f"{host.name or host.kind} ({devices} device{'s' * (devices > 1)}{speed})"


def caveats(inputs: PlannerInputs) -> list[str]:
    """What a training run says of its figures as well: its fidelity changes nothing."""
    allowed = FIDELITIES[inputs.fidelity]
    if not allowed or inputs.fixed.codecs is not None or any(text in inputs.rates for text in allowed):
        return []
    return [
        f"--fidelity {inputs.fidelity} changes nothing: no codec was timed: in shared memory gradients are added where "
        "they lie, and a single worker sends nothing"
    ]
