"""Correction factors for later predictions, from how much longer steps of earlier runs took than was predicted.

`hybridpar plan --calibrate RUN_DIR` computes and keeps two factors: one for computing, of a model on a device, and one
for links, of workers that are connected in one way. Later predictions use them, and say so. `--calibrate show` lists
them, `--calibrate clear` removes them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridpar.errors import PlanError, UsageError
from hybridpar.formats.cache import forget_measurement, load_measurement, store_measurement, stored_measurements
from hybridpar.plan import Plan, read_plan
from hybridpar.planner.compare import Comparison, slower_links
from hybridpar.planner.inputs import PlannerInputs, inputs_of_plan

#: What is kept.
KIND = "calibration"

#: Words in the place of run directories.
SHOW, CLEAR = "show", "clear"

#: Factors beyond this say that something else went on in the run, not that the profile is a little off.
MOST = 8.0


@dataclass(frozen=True)
class Factor:
    """By how many times something takes longer than was predicted.

    Attributes:
        key: What it holds for.
        value: The factor.
        runs: How many runs it is from.
    """

    key: dict[str, Any]
    value: float
    runs: int

    def told(self) -> str:
        """In words."""
        takes = f"x {self.value:.3f}  from {self.runs} run{'' if self.runs == 1 else 's'}"
        if self.key["of"] == "compute":
            place = f"{self.key['name']} on {self.key['device']}, {self.key['threads']} thread(s)"
            return f"computing  {takes}  {place}"
        return f"link       {takes}  {self.key['name']}, {self.key['workers']} workers"


def compute_key(inputs: PlannerInputs) -> dict[str, Any]:
    """What a factor of computing holds for.

    Args:
        inputs: Of the search.
    """
    profile = inputs.profile
    return {
        "of": "compute",
        "name": profile.info.name,
        "model": profile.info.fingerprint,
        "device": profile.device,
        "threads": profile.threads,
        **({"compiled": True} if profile.compiled is not None else {}),
    }


def link_key(inputs: PlannerInputs) -> dict[str, Any]:
    """What a factor of links holds for.

    Args:
        inputs: Of the search.
    """
    cluster = inputs.cluster
    return {
        "of": "link",
        "name": cluster.name,
        "workers": cluster.workers,
        "hosts": [[host.count, host.devices, host.kind, host.name] for host in cluster.hosts],
    }


def calibrated(inputs: PlannerInputs) -> PlannerInputs:
    """The same question with what earlier runs corrected; unchanged where there were none, or it was corrected before.

    Args:
        inputs: As measured. Times that were estimated are not corrected by clocks.
    """
    if inputs.calibration:
        return inputs
    keys = [("link", link_key(inputs))]
    if inputs.profile.source == "measured":
        keys.insert(0, ("compute", compute_key(inputs)))
    factors = {name: value for name, key in keys if (value := _factor(load_measurement(KIND, key))) is not None}
    compute, link = factors.get("compute", 1.0), factors.get("link", 1.0)
    variants = tuple(variant.scaled(compute) for variant in inputs.profile.variants)
    return replace(
        inputs,
        profile=replace(inputs.profile, variants=variants) if "compute" in factors else inputs.profile,
        cluster=slower_links(inputs.cluster, link) if "link" in factors else inputs.cluster,
        calibration=factors,
    )


def calibrate(directories: Sequence[Path]) -> list[Factor]:
    """Fold what runs measured back into later predictions; of several runs of one kind the median counts.

    Args:
        directories: Of runs that were planned and have ended.

    Returns:
        The factors that are kept now, of these runs.

    Raises:
        PlanError: A directory has no plan with a prediction and what was measured of it.
        UsageError: A run differs from its prediction by too much to be a matter of calibration.
    """
    found: dict[str, list[float]] = defaultdict(list)
    keys: dict[str, dict[str, Any]] = {}
    for directory in directories:
        for key, value in _factors_of(directory):
            name = repr(sorted(key.items()))
            keys[name] = key
            found[name].append(value)
    factors = []
    for name, values in found.items():
        factor = Factor(keys[name], math.exp(statistics.median(math.log(value) for value in values)), len(values))
        store_measurement(KIND, factor.key, {"factor": factor.value, "runs": factor.runs})
        factors.append(factor)
    return factors


def known_factors() -> list[Factor]:
    """All factors that are kept."""
    return [
        Factor(key, value, runs if isinstance(runs := data.get("runs"), int) else 1)
        for key, data in stored_measurements(KIND)
        if (value := _factor(data)) is not None
    ]


def clear_factors() -> int:
    """Remove all factors; returns how many there were."""
    return sum(forget_measurement(KIND, key) for key, _ in list(stored_measurements(KIND)))


def run_calibrate(words: Sequence[str]) -> int:
    """What `hybridpar plan --calibrate WORDS` does; returns the exit code.

    Args:
        words: Run directories, or `show`, or `clear`.

    Raises:
        PlanError: As for `calibrate`.
        UsageError: Likewise.
    """
    if list(words) == [CLEAR]:
        print(f"{clear_factors()} calibration factor(s) removed; predictions are as measured again")
        return 0
    factors = known_factors() if list(words) == [SHOW] else calibrate([Path(word) for word in words])
    if not factors:
        print("no calibration: predictions are as measured; `hybridpar plan --calibrate RUN_DIR` makes one")
    for factor in factors:
        print(factor.told())
    if factors and list(words) != [SHOW]:
        print(f"later predictions use them; `hybridpar plan --calibrate {CLEAR}` removes them")
    return 0


def _factors_of(directory: Path) -> list[tuple[dict[str, Any], float]]:
    source = directory / "plan.json"
    plan = read_plan(source)
    _require(plan, source)
    assert plan.ran is not None
    inputs, compared = inputs_of_plan(plan, str(source)), Comparison(plan, plan.ran)
    found: list[tuple[str, dict[str, Any], float | None]] = [
        ("compute", compute_key(inputs), compared.compute_ratio),
        ("link", link_key(inputs), compared.link_slowdown),
    ]
    factors = []
    for name, key, ratio in found:
        if ratio is None:
            continue
        value = inputs.calibration.get(name, 1.0) * ratio
        if not 1 / MOST <= value <= MOST:
            raise UsageError(
                f"{source}: {'computing' if name == 'compute' else 'the link'} took {value:,.3g} times as long as "
                "predicted",
                f"A factor is from 1/{MOST:g} to {MOST:g}: more says that something else used the machine, or that a "
                "measurement is wrong.",
                "Train again when nothing else runs; `hybridpar doctor --fresh` measures the machine again.",
            )
        factors.append((key, value))
    return factors


def _require(plan: Plan, source: Path) -> None:
    missing = [
        told
        for told, there in (
            ("what it was made from", plan.inputs),
            ("what was predicted", plan.predicted),
            ("what the run measured", plan.ran),
        )
        if there is None
    ]
    if missing:
        raise PlanError(
            f"{source} does not say {missing[0]}",
            "Only a run that was planned, and has ended, can be held against its prediction.",
            "Name the directory of such a run: `hybridpar train MODEL` plans by itself unless it is very short.",
        )


def _factor(data: object) -> float | None:
    value = data.get("factor") if isinstance(data, dict) else None
    return float(value) if isinstance(value, (int, float)) and 0 < value < math.inf else None
