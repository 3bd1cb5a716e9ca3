"""Why: what a run with servers leaves behind has the same files and keys as that of any other run, and a few more."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from hybridpar.compress import Policy
from hybridpar.config import TrainConfig
from hybridpar.machine.launch import note_orderly_end
from hybridpar.machine.process import TUNED_VARIABLE
from hybridpar.machine.process import describe as describe_process
from hybridpar.models import parameter_count
from hybridpar.observe import (
    RunInfo,
    StepRecord,
    draw_loss,
    draw_staleness,
    print_report,
    read_metrics,
    summarize,
    write_summary,
)
from hybridpar.observe.files import replace_file
from hybridpar.observe.summary import divided_step, step_shares
from hybridpar.plan import ModelInfo, Pipeline, trivial_plan
from hybridpar.run.figures import best_fields
from hybridpar.run.served_state import Standing
from hybridpar.run.worker import device_name
from hybridpar.server.learner import Exchanged
from hybridpar.server.place import Place
from hybridpar.server.rules import Rules
from hybridpar.server.staleness import StalenessHistogram


@dataclass(frozen=True)
class ServedFacts:
    """What does not change in a run.

    Attributes:
        config: Options.
        model_name: What the user calls the model.
        model: It.
        fingerprint: Its fingerprint.
        place: What this process is.
        rules: What servers do with gradients.
        policy: What gradients travel as.
        total: Steps that the run is to have.
        per_epoch: Steps of an epoch.
        sample_shape: Of an image.
        device: Of this worker.
        data_line: What to say of the data.
    """

    config: TrainConfig
    model_name: str
    model: nn.Module
    fingerprint: str
    place: Place
    rules: Rules
    policy: Policy
    total: int
    per_epoch: int
    sample_shape: tuple[int, ...]
    device: torch.device
    data_line: str


@dataclass
class ServedTimes:
    """What the pushes of a worker took, one value for each."""

    times: list[tuple[float, float, float]] = field(default_factory=list)
    bytes_sent: list[float] = field(default_factory=list)
    bytes_pulled: list[float] = field(default_factory=list)

    def add(self, result: Exchanged, data_ms: float) -> None:
        """Take in a push."""
        self.times.append((result.compute_ms, result.exposed_ms, data_ms))
        self.bytes_sent.append(result.pushed)
        self.bytes_pulled.append(result.pulled)

    def share(self, warmup: int = 3) -> dict[str, Any]:
        """Medians of bytes, and `parts`, the shares of its time; without the first ones, where there are others."""
        known = {name: values[warmup:] or values for name, values in vars(self).items() if values}
        told: dict[str, Any] = {name: statistics.median(values) for name, values in known.items() if name != "times"}
        return told | {"parts": step_shares(known.get("times", []))}


def step_record(row: dict[str, Any], result: Exchanged, data_ms: float, per_epoch: int, peak: float) -> StepRecord:
    """A step as shard 0 saw it; the parts of its time are those of worker 0's own push.

    Args:
        row: What the shard says, see `hybridpar.server.ledger.StepRow`.
        result: Worker 0's latest push.
        data_ms: How long it waited for its data.
        per_epoch: Steps of an epoch.
        peak: The peak learning rate.
    """
    return StepRecord(
        step=row["step"],
        epoch=(row["step"] - 1) // per_epoch,
        loss=row["loss"],
        lr=row["rate"] * peak,
        samples=row["samples"],
        step_ms=row["seconds"] * 1e3,
        compute_ms=result.compute_ms,
        exposed_sync_ms=result.exposed_ms,
        data_ms=data_ms,
        bytes_sent=result.pushed,
        skipped=row["skipped"] > 0,
        grad_norm=None,
        staleness=row["staleness"],
        most_stale=row["most_stale"],
        queued=row["queued"],
        bytes_pulled=result.pulled,
    )


def describe_run(run: ServedFacts, at: Standing, changes: Sequence[str] = ()) -> RunInfo:
    """What is known before the first step; writes the plan."""
    config, place = run.config, run.place
    device = device_name(run.device)
    notes = [describe_process()] if os.environ.get(TUNED_VARIABLE) == "1" else []
    if place.servers:
        where = f"{place.servers} server{'' if place.servers == 1 else 's'}"
    else:
        where = "the workers themselves, each of which masters a stripe"
    notes += changes
    notes.append(f"gradients meet at {where}: --sync {config.sync}")
    parameters = parameter_count(run.model)
    model = ModelInfo(name=run.model_name, fingerprint=run.fingerprint, parameters=parameters, input=run.sample_shape)
    plan = trivial_plan(
        model,
        replicas=place.workers,
        device=run.device.type,
        pipeline=Pipeline(schedule="accumulate", micro_batches=config.micro_batches),
    )
    replace_file(at.directory / "plan.json", [plan.to_json().encode()])
    return RunInfo(
        model=run.model_name,
        data=config.data,
        data_line=run.data_line,
        workers=place.workers,
        device=device,
        epochs=-(-run.total // run.per_epoch),
        steps_total=run.total,
        steps_per_epoch=run.per_epoch,
        parameters=parameters,
        batch_size=config.batch_size,
        run_dir=at.directory,
        notes=tuple(notes),
        replicas=place.workers,
        micro_batches=config.micro_batches,
        codec=str(run.policy),
        sync=config.sync,
        servers=place.servers,
    )


def report_run(
    run: ServedFacts,
    info: RunInfo,
    at: Standing,
    states: Sequence[dict[str, Any]],
    shares: Sequence[Any],
    stopped: bool,
) -> None:
    """Write summary and pictures, and print what they say.

    Args:
        run: The run.
        info: The same for displays.
        at: Where it ended.
        states: Of the shards.
        shares: Each worker's `ServedTimes.share`.
        stopped: Whether a signal ended it.
    """
    ended: Literal["finished", "interrupted"] = "interrupted" if stopped else "finished"
    versions = {"cuda": torch.version.cuda} if torch.cuda.is_available() and torch.version.cuda else {}
    summary = summarize(
        info,
        read_metrics(at.directory),
        seed=run.config.seed,
        ended=ended,
        resumed_from=at.resumed_from,
        versions=versions,
    )
    if at.resumed_from is None:
        summary |= divided_step(summary["step_ms_median"], [share.get("parts") for share in shares])
        for key in ("bytes_sent", "bytes_pulled"):
            if known := [share[key] for share in shares if key in share]:
                summary[f"{key}_per_step"] = round(statistics.mean(known))
    ages = StalenessHistogram.of_dict(states[0]["histogram"])  # as the steps in metrics.jsonl, which shard 0 tells, too
    mean = ages.mean
    summary["staleness"] = {
        "mean": None if mean is None else round(mean, 4),
        "most": ages.most,
        "histogram": ages.to_dict(),
    }
    summary |= best_fields(at.directory, at.best)
    files = [write_summary(at.directory, summary)]
    rules = run.rules
    expected = 0.0 if rules.barrier else (rules.learners - 1) / rules.collect
    for picture in (draw_loss(at.directory, info), draw_staleness(at.directory, ages.counts, expected)):
        if picture is not None:
            files.append(picture)
    print_report(summary, [*files, at.directory / "checkpoints"])
    note_orderly_end()
    if stopped:
        print(f"stopped after step {at.step}; the same command with --resume goes on from there")
