"""The figures of a run that has ended: measured by all workers, beside what was predicted, for summary and plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.config import TrainConfig
from hybridpar.errors import RunDirectoryError
from hybridpar.machine.devices import machine_load
from hybridpar.observe.files import replace_file
from hybridpar.observe.records import EpochRecord, RunInfo
from hybridpar.observe.summary import step_without_data_ms
from hybridpar.observe.text import format_bytes, format_duration
from hybridpar.plan import Plan, StepFigures
from hybridpar.run.best import MetricRule, best_checkpoint
from hybridpar.run.plan import sync_of
from hybridpar.run.timings import Share, combine
from hybridpar.train.trainer import Trainer

if TYPE_CHECKING:
    from hybridpar.run.batch_search import BatchSelector

#: Figures of a plan, by the keys of the summary.
_KEYS = ("bubble", "exposed_sync_ms", "bytes_sent_per_step", "peak_saved_bytes", "memory_bytes")


@dataclass(frozen=True)
class WorkerFigures:
    """What a worker noted of a run.

    Attributes:
        share: Its times and bytes.
        saved_bytes: The most that its stages kept for backward passes; None without stages.
        memory_bytes: The most memory that training needed; None where the system does not tell.
    """

    share: Share
    saved_bytes: int | None
    memory_bytes: int | None


def measured_fields(
    answers: Sequence[object], replicas: Sequence[Sequence[int]], *, step_ms: float | None, whole: bool
) -> dict[str, Any]:
    """What the summary says over all workers, which the metrics of rank 0 do not."""
    workers = [one for one in answers if isinstance(one, WorkerFigures)]
    places = {
        rank: place for place, rank in enumerate(r for r, one in enumerate(answers) if isinstance(one, WorkerFigures))
    }
    whole_ones = [
        [places[rank] for rank in ranks] for ranks in replicas if places.keys() >= {*ranks}
    ]  # one may be lost
    fields = combine([one.share for one in workers], whole_ones, step_ms)
    for key in ("bytes_sent", "bytes_pulled"):
        if key in fields:
            fields[f"{key}_per_step"] = round(fields.pop(key))
    if not whole:
        fields = {key: fields[key] for key in ("bubble", "overlap") if key in fields}
    for key in ("saved_bytes", "memory_bytes"):
        known = [value for one in workers if (value := getattr(one, key)) is not None]
        if len(known) == len(workers):
            fields["peak_saved_bytes" if key == "saved_bytes" else key] = max(known)
    return fields


def best_fields(directory: Path, tested: Sequence[EpochRecord], rule: MetricRule) -> dict[str, Any]:
    """What the summary says of the best checkpoint."""
    found = best_checkpoint(directory, tested, rule)
    if found is None:
        return {}
    best, path = found
    place = path.relative_to(directory).as_posix()
    fields = {"step": best.step, "test_accuracy": best.test_accuracy, "metric": rule.metric, "checkpoint": place}
    return {"best": fields}


def predicted_fields(predicted: StepFigures | None) -> dict[str, Any]:
    """What the summary says of a prediction; nothing where there was none."""
    if predicted is None or predicted.step_ms is None:
        return {}
    fields: dict[str, Any] = {f"predicted_{key}": getattr(predicted, key) for key in _KEYS}
    fields["predicted_step_ms"] = round(predicted.step_ms, 3)
    fields["predicted_compute_ms"] = round(predicted.step_ms - (predicted.exposed_sync_ms or 0.0), 3)
    return fields


def expected_lines(predicted: StepFigures | None, steps: int, now: datetime | None = None) -> list[str]:
    """When the steps that are left will be done, and the memory of a worker; nothing where nothing was predicted."""
    if predicted is None or predicted.step_ms is None:
        return []
    begins = now or datetime.now()
    seconds = 1e-3 * predicted.step_ms * steps
    end = begins + timedelta(seconds=seconds)
    until = f"{end:%H:%M}" if end.date() == begins.date() else f"{end:%Y-%m-%d %H:%M}"
    memory = "" if predicted.memory_bytes is None else f"; {format_bytes(predicted.memory_bytes)} per worker"
    return [f"expected about {format_duration(seconds)}, until {until}, without data and tests{memory}"]


def ran_of(summary: Mapping[str, Any]) -> StepFigures | None:
    """What a run measured of its plan, without waiting for data, which no plan predicts; None without a step."""
    step_ms = step_without_data_ms(summary)
    if summary["compute_ms"] is None or step_ms is None:
        return None
    return StepFigures(step_ms=round(step_ms, 3), **{key: summary[key] for key in _KEYS})


def close_plan(plan: Plan, summary: dict[str, Any], place: Path) -> list[str]:
    """Add what was measured to the plan of a run, and say where its prediction failed; for the worker that writes."""
    ran = ran_of(summary)
    if plan.predicted is None or ran is None:
        return []
    problems: list[str] = []
    try:
        replace_file(place, [plan.model_copy(update={"ran": ran}).to_json().encode()])
    except RunDirectoryError as error:
        problems.append(f"what was measured is not in the plan: {error.what}")
    from hybridpar.planner.compare import prediction_warnings

    warnings = prediction_warnings(plan, ran, machine_load())
    summary["prediction_warning"] = "; ".join(warnings) or None
    return warnings + problems


def recipe_fields(
    config: TrainConfig, trainer: Trainer, info: RunInfo, selector: BatchSelector | None
) -> dict[str, Any]:
    """What the summary says of recipes."""
    return {
        "recipe": config.recipe,
        "sync": sync_of(config, trainer.plan),
        "double_buffer": config.double_buffer,
        "final_batch_size": info.batch_size if selector is None else selector.pace.batch_size,
    }
