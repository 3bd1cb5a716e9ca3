"""Run directories as `hybridpar train` leaves them, made without training."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

from hybridpar.config import TrainConfig
from hybridpar.observe.metrics import MetricsWriter, read_metrics
from hybridpar.observe.records import EpochRecord, StepRecord
from hybridpar.observe.summary import summarize, write_summary
from hybridpar.plan import ModelInfo, Partition, Pipeline, Placement, Plan, Stage, StepFigures
from hybridpar.run.directory import RunFolder, claim_folder
from hybridpar.schedule.layout import Layout


def a_plan() -> Plan:
    """Two stages on two workers, with a prediction."""
    return Plan(
        model=ModelInfo(name="net", fingerprint="0", parameters=1000),
        partition=Partition(
            stages=tuple(
                Stage(
                    units=(f"{name}1", f"{name}2"), forward_ms=10, backward_ms=20, cut_bytes=1000, parameter_bytes=2000
                )
                for name in "ab"
            )
        ),
        placement=Placement(layout=Layout.dealt(2, 2)),
        pipeline=Pipeline(schedule="1f1b", micro_batches=4),
        predicted=StepFigures(step_ms=25.0, exposed_sync_ms=5.0, bubble=0.2),
    )


def step_record(step: int, **fields: Any) -> StepRecord:
    """A step of a run whose loss falls from 3 to 1."""
    loss = 1 + 2 * math.exp(-step / 20) + 0.1 * (step % 3)
    given: dict[str, Any] = {"step": step, "epoch": (step - 1) // 10, "loss": loss, "lr": 0.05, "samples": 64}
    given |= {"step_ms": 20.0 + step % 5, "compute_ms": 15.0, "exposed_sync_ms": 3.0, "data_ms": 1.0}
    given |= {"bytes_sent": 1_000_000, "skipped": False, "grad_norm": 5.0}
    if step % 4 == 1:
        given |= {"residual_norm": 2.0, "residual_norms": {"layer13.weight": step / 8}}
    return StepRecord(**{**given, **fields})


def a_run(
    directory: Path,
    steps: int = 40,
    *,
    summary: dict[str, Any] | None = None,
    staged: bool = False,
    codec: str = "none",
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """The files of a run.

    Args:
        directory: Where to make it.
        steps: Steps that are recorded.
        summary: What its summary has in addition; None for a run that has none yet.
        staged: Whether it has a plan with stages.
        codec: What its gradients are sent as.
        options: Of `TrainConfig`.
        fields: Of every step.
    """
    config = TrainConfig(data="digits", run_dir=directory, compress=codec, **(options or {}))
    claim_folder(RunFolder(directory), config, "resnet18")
    with closing(MetricsWriter(directory)) as writer:
        for step in range(1, steps + 1):
            writer.write(step_record(step, **fields))
            if step % 10 == 0:
                accuracy = 1 - math.exp(-step / 20)
                writer.write(EpochRecord(step // 10 - 1, step, accuracy, 0.5, 0.6, 3.0))
    if staged:
        a_plan().save(directory / "plan.json")
    if codec != "none":
        head = "layer,kind,size,codec,bytes_before,bytes_after"
        rows = [f"layer{number}.weight,conv,{1000 + number},{codec},{4000 + number},150" for number in range(14)]
        (directory / "compress.csv").write_text("\n".join([head, *rows, ""]))
    if summary is not None:
        places = {"stages": 2, "schedule": "1f1b"} if staged else {}
        facts = {"model": "resnet18", "data": "digits", "workers": 2, "device": "cpu", "batch_size": 64, **places}
        facts |= {"codec": codec, "seed": 0, "epochs": steps // 10}
        found = summarize(facts, read_metrics(directory), ended="finished")
        write_summary(directory, found | summary)
    return directory
