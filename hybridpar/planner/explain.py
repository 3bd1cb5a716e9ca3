"""Explains the result of a search in words: why each other plan is slower, in milliseconds, and what would help.

Differences are those of the parts of a step, so they add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.errors import PlanError
from hybridpar.machine.cluster_file import Hosts
from hybridpar.planner.codecs import left_out, planned_codecs
from hybridpar.planner.evaluate import Outcome, Parts
from hybridpar.planner.inputs import Fidelity, PlannerInputs
from hybridpar.planner.scaling import Point
from hybridpar.planner.search import Answer, find_plan, least_workers
from hybridpar.planner.space import Candidate
from hybridpar.planner.speeds import replica_speeds, stage_speeds
from hybridpar.schedule.layout import Layout

#: Parts of a step, as they are told.
PARTS = {
    "compute": "computing",
    "bubble": "bubble",
    "sync": "exposed sync",
    "codec": "codec",
    "update": "update",
}
_LOOSER: tuple[Fidelity, ...] = ("exact", "close", "lossy")
#: Noise above which a profile is hardly worth planning with.
NOISY = 0.1
#: Why no codec is compared.
_NO_CODEC = "no codec was timed: in shared memory gradients are added where they lie, and a single worker sends nothing"
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


@dataclass(frozen=True)
class WhatIf:
    """What another option or machine would gain.

    Attributes:
        name: What is changed.
        before_ms: Time to the same result of a step, as it is.
        after_ms: With the change; None where that cannot be said, and `why` says why.
        plan: What would be chosen.
        why: Why nothing can be said.
    """

    name: str
    before_ms: float
    after_ms: float | None = None
    plan: str = ""
    why: str = ""

    def told(self) -> str:
        """In words."""
        if self.after_ms is None:
            return f"{self.name}: {self.why}"
        gain = self.before_ms - self.after_ms
        if abs(gain) < _SMALL_MS:
            return f"{self.name}: gains nothing"
        verb = "gains" if gain > 0 else "loses"
        return f"{self.name}: {verb} {abs(gain):,.1f} ms a step ({self.after_ms:,.1f} ms, {self.plan})"


def describe(candidate: Candidate, answer: Answer) -> str:
    """A candidate in words."""
    layout, count = candidate.layout, candidate.micro_batches
    devices = "device" if layout.workers == 1 else "devices"
    if layout.stages == 1:
        parts = ["one device" if layout.workers == 1 else f"data parallel over {layout.replicas} devices"]
        parts += [f"{count} micro-batches"] if count > 1 else []
    elif not layout.is_equal:
        parts = [f"{layout.stages} stages on {_sizes(layout)} devices"]
        parts += [f"{count} micro-batches", candidate.schedule, candidate.cut.name]
    else:
        parts = [f"{layout.stages} stages on {layout.positions} {devices if layout.positions > 1 else 'device'}"]
        parts += [f"x {layout.replicas} replicas"] if layout.replicas > 1 else []
        parts += [f"{count} micro-batches", candidate.schedule]
        parts += [layout.kind] if layout.kind not in ("linear", None) else []
        parts.append(candidate.cut.name)
    return ", ".join(parts + _codec_and_saving(candidate, answer))


def brief(candidate: Candidate, answer: Answer) -> str:
    """A candidate in a few words, without its schedule and its cut."""
    layout, count = candidate.layout, candidate.micro_batches
    if layout.stages == 1:
        name = "one worker" if layout.workers == 1 else f"data parallel on {layout.workers} workers"
    elif not layout.is_equal:
        name = f"{layout.stages} stages on {_sizes(layout)} workers"
    else:
        name = f"{layout.stages}-stage pipeline" + (f" x {layout.replicas} replicas" if layout.replicas > 1 else "")
    parts = [name] + ([f"{count} micro-batches"] if count > 1 else [])
    return ", ".join(parts + _codec_and_saving(candidate, answer))


def _sizes(layout: Layout) -> str:
    """How many workers the replicas have: `1 + 2`, and `2 x 1 + 2` where two of them have one each."""
    sizes = Counter(map(len, layout.ranks))
    return " + ".join(f"{count} x {size}" if count > 1 else f"{size}" for size, count in sizes.items())


def _codec_and_saving(candidate: Candidate, answer: Answer) -> list[str]:
    """Parts of a batch, what gradients are sent as, and what saves memory, where they are not the usual ones."""
    shares = answer.evaluator.shares(candidate.layout, candidate.micro_batches)
    parts = [] if shares is None else [f"shares {max(shares) / sum(shares):.0%} to {min(shares) / sum(shares):.0%}"]
    saved = [candidate.cut.saving] * bool(candidate.cut.saving) + ["optimizer divided"] * candidate.sharded
    sent = [candidate.codec.name] * (candidate.codec.order > 0)
    return parts + sent + saved


def rows(answer: Answer, most: int = 5) -> list[Row]:
    """The table: the chosen plan, the runners-up, and the baselines."""
    chosen, evaluator = answer.chosen, answer.evaluator
    own = evaluator.parts(chosen.candidate)
    table = [Row(describe(chosen.candidate, answer), chosen, own, _chosen_verdict(answer))]
    others = [outcome for outcome in answer.ranked if outcome != chosen]
    baselines = list(answer.baselines.values())
    for outcome in others[:most] + [outcome for outcome in others[most:] if outcome in baselines]:
        parts = evaluator.parts(outcome.candidate)
        verdict = why_lost(own, parts, chosen.candidate.codec.steps, outcome.candidate.codec.steps)
        if outcome in answer.ties:
            verdict = f"a tie within the noise of {100 * answer.noise:.1f} %, and less simple"
        table.append(Row(describe(outcome.candidate, answer), outcome, parts, verdict))
    missing = [name for name, baseline in answer.baselines.items() if baseline is None]
    return table + [Row(name, None, None, "does not fit into memory") for name in missing]


def why_lost(chosen: Parts, other: Parts, chosen_steps: float = 1.0, other_steps: float = 1.0) -> str:
    """By how much a plan lost and to what: `+12.3 ms: exposed sync +15.0, bubble -2.7`."""
    gap = other.step * other_steps - chosen.step * chosen_steps
    differences = {told: getattr(other, name) - getattr(chosen, name) for name, told in PARTS.items()}
    more_steps = gap - (other.step - chosen.step)
    if abs(more_steps) >= _SMALL_MS:
        differences["more steps to the target"] = more_steps
    told = sorted(differences.items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{name} {ms:+,.1f}" for name, ms in told if abs(ms) >= _SMALL_MS)
    gap_text = f"{gap:+,.1f} ms" + " to the same loss" * (chosen_steps != other_steps)
    return f"{gap_text}: {reasons}" if reasons else gap_text


def what_ifs(inputs: PlannerInputs, answer: Answer) -> list[WhatIf]:
    """What a looser fidelity, a faster link, another device, and leaving out hosts of one speed would gain.

    Each is a search of its own.
    """
    now, cluster = answer.fastest.score, inputs.cluster

    def asked(name: str, changed: PlannerInputs | None, why: str = "") -> WhatIf:
        """The answer for changed inputs; `why` says why there are none."""
        if changed is None:
            return WhatIf(name, now, why=why)
        try:
            other = find_plan(changed, library=answer.evaluator.space.library, advise=False)
        except PlanError as error:
            return WhatIf(name, now, why=error.what)
        return WhatIf(name, now, other.fastest.score, describe(other.fastest.candidate, other))

    gains = []
    for fidelity in _LOOSER[_LOOSER.index(inputs.fidelity) + 1 :]:
        timed = any(codec in inputs.rates for codec in planned_codecs(fidelity))
        looser = inputs.with_fidelity(fidelity) if timed else None
        gains.append(asked(f"--fidelity {fidelity}", looser, "no codec was timed"))
    faster = inputs.on(cluster.faster_links(10)) if cluster.workers > 1 else None
    gains.append(asked("a link 10 times as fast", faster, "there is no link"))
    for host in cluster.hosts if cluster.is_unequal else ():
        if (left := cluster.without(host)) is not None:
            gains.append(asked(f"without {_name_of(host)}", inputs.on(left)))
    more = cluster.with_another()
    larger = inputs.same_result().on(more) if more is not None else None
    name = "another host" if cluster.between is not None else "another device"
    return [*gains, asked(name, larger, "nothing says what would lie between devices")]


def notes(inputs: PlannerInputs, answer: Answer) -> list[str]:
    """What the reader must know of the figures."""
    unfit = answer.considered - len(answer.ranked)
    lines = [f"{answer.considered:,} plans simulated, of which {unfit:,} do not fit into memory"]
    if inputs.profile.noise > NOISY:
        lines.append(
            f"the profile's noise is {100 * inputs.profile.noise:.0f} %, so its times are doubtful, though plans only "
            f"{100 * answer.noise:.0f} % apart count as equal: measure again when nothing else runs, with --passes 9"
        )
    if inputs.cluster.workers > inputs.workers:
        lines.append(f"a batch of {inputs.batch} feeds {inputs.workers} of {inputs.cluster.workers} workers")
    if inputs.profile.source != "measured":
        lines.append("times are estimated from FLOPs and bytes, not measured: they rank plans, and promise nothing")
    if inputs.profile.batch_norm:
        lines.append("BatchNorm: only plans with the micro-batches of plain data parallelism give the same result")
    lines += holding(answer)
    lines += offloading(answer)
    lines += contributions(inputs, answer)
    lines += outer_loops(answer)
    lines += caveats(inputs)
    if missing := left_out(inputs.fidelity):
        lines.append(f"left out, as their steps to a target were not measured: {', '.join(missing)}")
    return lines


def holding(answer: Answer) -> list[str]:
    """How many workers the model needs at least, where the memory of devices is known."""
    sizes = [host.memory for host in answer.evaluator.space.inputs.cluster.hosts if host.memory is not None]
    if not sizes or (least := least_workers(answer.evaluator)) is None:
        return []
    workers, one = least
    told = f"{one.layout.stages} stages" if one.layout.stages > 1 else "whole"
    told += (one.cut.saving and f", {one.cut.saving}") + ", the optimizer divided" * one.sharded
    size = f"{min(sizes) / 1e9:,.2f} GB"
    return [f"least workers of {size} that it can be trained on with this batch: {workers} ({told})"]


def offloading(answer: Answer) -> list[str]:
    """What moves to the host's memory in a step of the chosen plan, and what that costs."""
    one, evaluator = answer.chosen.candidate, answer.evaluator
    if not one.cut.offload:
        return []
    size, longer = evaluator.moved(one)
    used = evaluator.space.inputs.by_worker[: one.layout.workers]
    speed = min(host.host_link for _, host in used if host.host_link is not None)
    return [
        f"activations in the host's memory: a device moves up to {size / 1e6:,.1f} MB a step there and back, at "
        f"{speed / 1e9:,.1f} GB/s; its passes take {longer:,.1f} ms longer"
    ]


def contributions(inputs: PlannerInputs, answer: Answer) -> list[str]:
    """What each kind of host adds to the chosen plan, where they differ in speed."""
    cluster, evaluator, chosen = inputs.cluster, answer.evaluator, answer.chosen.candidate
    layout = chosen.layout
    if not cluster.is_unequal:
        return []
    shares = evaluator.shares(layout, chosen.micro_batches) or (1.0,) * layout.replicas
    lines = []
    for host in sorted(cluster.hosts, key=lambda one: -one.throughput):
        ranks = [rank for rank, (_, own) in enumerate(cluster.by_worker[: layout.workers]) if own == host]
        told = f"{_name_of(host)}, throughput {host.throughput:g}"
        if not ranks:
            lines.append(f"{told}: left out, as a step with it would take no less time")
            continue
        part = sum(_part_of(answer, shares, rank) for rank in ranks)
        lines.append(f"{told}: rank{'s' * (len(ranks) > 1)} {_span(ranks)}, {100 * part:.0f} % of the work of a step")
    planned = stage_speeds(inputs, layout)
    if len(set(planned)) > 1:
        told = ", ".join(
            f"stage {stage} at {speed:.3g} on rank {layout.rows[0][stage][0]}" for stage, speed in enumerate(planned)
        )
        lines.append(f"stages are cut by the speeds of their devices, over that of the fastest: {told}")
    speeds = replica_speeds(inputs, layout)
    if inputs.profile.batch_norm and min(speeds) < max(speeds):
        gain = sum(speeds) / len(speeds) / min(speeds)
        lines.append(
            "BatchNorm: parts of a batch stay equal, as others would be normalised by other samples; `--shares auto` "
            f"divides them by speed, and computing then takes up to {gain:.2f} times less"
        )
    return lines


def _part_of(answer: Answer, shares: Sequence[float], rank: int) -> float:
    """A worker's part of a step's work: of the samples of its replica, what its stages compute."""
    candidate, evaluator = answer.chosen.candidate, answer.evaluator
    replica = candidate.layout.replica_of(rank)
    row, figures = candidate.layout.rows[replica], evaluator.figures(candidate, replica)
    times = [ahead + back for ahead, back in zip(figures.forward_ms, figures.backward_ms, strict=True)]
    mine = sum(time for stage, time in enumerate(times) if row[stage][0] == rank)
    return shares[replica] / sum(shares) * mine / sum(times)


def outer_loops(answer: Answer) -> list[str]:
    """What is expected of the outer loops that were compared, with the measurements that this rests on."""
    rests = ", ".join(
        f"{one.name}: {one.outer.told()}" for one in answer.evaluator.space.codec_choices if one.outer is not None
    )
    return [f"outer loops, as ResNet-18 on digits showed: {rests}"] if rests else []


def _name_of(host: Hosts) -> str:
    """A kind of host in words."""
    devices = host.count * host.devices
    return f"{host.name or host.kind} ({devices} device{'s' * (devices > 1)})"


def _span(ranks: Sequence[int]) -> str:
    """Ranks that follow each other."""
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"


def caveats(inputs: PlannerInputs) -> list[str]:
    """What a training run says of its figures as well: its fidelity changes nothing."""
    lines = []
    allowed = planned_codecs(inputs.fidelity)
    if allowed and inputs.fixed.codecs is None and not any(text in inputs.rates for text in allowed):
        lines.append(f"--fidelity {inputs.fidelity} changes nothing: {_NO_CODEC}")
    return lines


def curve_lines(points: Sequence[Point]) -> list[str]:
    """The scaling curve as a table."""
    lines = [f"{'workers':>8} {'best ms':>10} {'plain ms':>10} {'speed-up':>9}  plan"]
    first = next((point.step_ms for point in points if point.step_ms is not None), None)
    for point in points:
        if point.answer is None or point.step_ms is None:
            lines.append(f"{point.workers:>8} {'-':>10} {'-':>10} {'-':>9}  {point.why}")
            continue
        plain = "-" if point.plain_ms is None else f"{point.plain_ms:,.1f}"
        gain = "-" if first is None else f"{first / point.step_ms:,.2f}"
        name = describe(point.answer.fastest.candidate, point.answer)
        lines.append(f"{point.workers:>8} {point.step_ms:>10,.1f} {plain:>10} {gain:>9}  {name}")
    return lines + _same_result(points)


def _same_result(points: Sequence[Point]) -> list[str]:
    """A line where layers normalise over the micro-batch, so that some numbers of workers can be used in part only."""
    parts = max((one.answer.evaluator.space.inputs.fixed.parts or 1 for one in points if one.answer), default=1)
    if parts == 1:
        return []
    return [
        f"BatchNorm: all of these normalise over 1/{parts} of the batch at a time, so that they give the same result; "
        f"replicas are numbers that divide {parts}"
    ]


def _chosen_verdict(answer: Answer) -> str:
    if len(answer.ties) > 1:
        return f"chosen: the simplest of {len(answer.ties)} within the noise of {100 * answer.noise:.1f} %"
    return "chosen: the fastest"
