"""Rows that say how much slower the chosen plan is than the best measured one.

They are separate from prediction errors: wrong predictions can still lead to a good choice, and the reverse.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.pipeline.checks import Check
from benchmarks.planner.common import Drawn, Setting
from benchmarks.rig.rank import link

#: What is promised of the chosen plan: over the best one measured, and over torch's DDP in float32.
REGRET_AT_MOST, DDP_AT_MOST = 1.05, 1.02


def regret_rows(
    setting: Setting,
    drawn: Sequence[Drawn],
    chosen: Mapping[str, str],
    times: Mapping[str, Sequence[float]],
    ddp: Sequence[float],
    load: str,
) -> list[Check]:
    """How much slower the chosen plan is than the best that was measured, and than DDP, for each fidelity.

    A step counts with the steps to the same loss. Ratios are taken between visits of the same round.

    Args:
        setting: What is trained.
        drawn: The plans that were measured.
        chosen: The plan that each fidelity chose, by name.
        times: Milliseconds of a step in every visit of a plan, by name.
        ddp: Those of DDP.
        load: How busy the machine was otherwise, in words.
    """
    rows = []
    by_name = {one.name: one for one in drawn}
    for fidelity, name in chosen.items():
        allowed = [one for one in drawn if fidelity in one.fidelities]
        score = {one.name: one.steps * statistics.median(times[one.name]) for one in allowed}
        best = min(score, key=lambda one: score[one])
        mine = [by_name[name].steps * time for time in times[name]]
        over_best = _ratios(mine, [by_name[best].steps * time for time in times[best]])
        told = f"{name}; best of {len(allowed)}: {best}; {load}"
        rows.append(_check(setting, f"chosen over best, {fidelity}", over_best, REGRET_AT_MOST, told))
        rows.append(
            _check(setting, f"chosen over DDP fp32, {fidelity}", _ratios(mine, ddp), DDP_AT_MOST, f"{name}; {load}")
        )
    return rows


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [mine / theirs for mine, theirs in zip(one, other, strict=True)]


def _check(setting: Setting, what: str, ratios: Sequence[float], at_most: float, extra: str) -> Check:
    return Check(
        setting=str(setting),
        link=link(),
        what=what,
        value=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        at_most=at_most,
        extra=extra,
    )
