"""Writes the timeline: some steps as all workers ran them, with stages beside the step of the plan.

Nothing here can end a run: what cannot be written is said at its end.
"""

from __future__ import annotations

from typing import Any

import torch

from hybridpar.errors import RunDirectoryError, check
from hybridpar.formats.output_files import check_writable
from hybridpar.run.part import Part, Run
from hybridpar.run.timings import Step, steps_to_show
from hybridpar.schedule.spans import StepSpans


class StepTimeline(Part):
    """Records the steps of a timeline, where one is asked for; with stages, workers compare clocks at the start."""

    def __init__(self, run: Run) -> None:
        run.world.from_main(lambda: self._check(run))
        self._path = run.config.timeline
        self._shown = range(0)
        self._recorded: dict[int, StepSpans] = {}

    def _check(self, run: Run) -> None:
        """Refuse a timeline that could not be written, before anything has been trained."""
        path, world = run.config.timeline, run.world
        devices = torch.cuda.device_count() if world.device.type == "cuda" and world.size == 1 else 1
        check(
            path is None or devices == 1,
            f"--timeline {path} with {devices} GPUs under one worker",
            "The times of events on different GPUs cannot be compared.",
            f"Use --nproc {devices}, one for each, or look at them with --profile or Nsight Systems.",
        )
        if path is not None:
            check_writable("--timeline", path)

    def start(self, run: Run) -> None:
        """Decide which steps to show."""
        self._shown = steps_to_show(run.trainer.steps_done, run.total)
        if run.plan.is_staged:
            from hybridpar.comm.clocks import gather_spans  # most runs have neither stages nor a timeline

            run.clock.ahead = gather_spans(run.world, {}).ahead

    def step(self, run: Run, step: Step) -> None:
        """Take note of a step."""
        if self._path is None:
            return
        number = step.result.step
        if number <= self._shown.start:
            self._recorded.clear()  # the step is shown where the run ends with it
        self._recorded[number] = step.spans
        if number >= self._shown[-1]:
            with run.clock.away(), run.progress.pause():
                self.finish(run)

    def finish(self, run: Run) -> None:
        """Write the timeline of what was recorded; a run that ended early shows what it has."""
        path, self._path = self._path, None
        if path is None or not self._recorded:
            return
        if not any(spans.spans for spans in self._recorded.values()):
            run.warnings.append("there is no timeline: in this way to train the passes of a step are not recorded")
            return
        from hybridpar.comm.clocks import gather_spans

        recording = gather_spans(run.world, self._recorded)
        if not run.world.is_main:
            return
        from hybridpar.observe.timeline import Timeline, add_prediction, write_timeline
        from hybridpar.run.plan_step import step_of_plan

        plan, layout = run.plan, run.plan.layout
        facts: dict[str, Any] = {"model": plan.model.name}
        facts |= {"micro_batches": plan.pipeline.micro_batches, "schedule": plan.pipeline.schedule}
        aligned = f"{recording.clocks}, aligned to about the time of a message"
        facts["clocks"] = "one for all workers" if recording.clocks == 1 else aligned
        planned = None
        if plan.is_staged:
            planned = step_of_plan(plan) if layout.is_equal else None
            facts["prediction"] = "the search of the plan" if plan.inputs else "times of the stages alone"
        rows = add_prediction(recording.steps, () if planned is None else planned[0].timeline, layout)
        try:
            write_timeline(path, Timeline(rows, layout, facts))
        except RunDirectoryError as error:
            run.warnings.append(f"there is no timeline: {error.what}")
            return
        run.written.append(path)
        run.progress.message(f"timeline written to {path}; `hybridpar show {path}` prints it")
