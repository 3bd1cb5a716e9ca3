"""Writes the timeline: some steps as all workers ran them, with stages beside the step of the plan.

The first steps are left out: they meet cold caches, and cut their buckets by guesswork. Nothing here can end a run:
what cannot be written is said at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hybridpar.config import TrainConfig
from hybridpar.errors import RunDirectoryError, UsageError
from hybridpar.formats.output_files import check_writable
from hybridpar.observe.running import WARM_UP_STEPS
from hybridpar.observe.timeline import Timeline, add_prediction
from hybridpar.plan import Plan
from hybridpar.schedule.spans import StepSpans
from hybridpar.train.trainer import Trainer

if TYPE_CHECKING:
    from hybridpar.comm.clocks import Recording

#: Steps that a timeline shows, where the run has so many after the first ones.
TIMELINE_STEPS = 3


def check_timeline(config: TrainConfig, devices: int = 1) -> None:
    """Refuse a timeline that could not be written, before anything has been trained; for the worker that writes it."""
    path = config.timeline
    if path is None:
        return
    if devices > 1:
        raise UsageError(
            f"--timeline {path} with {devices} GPUs under one worker",
            "The times of events on different GPUs cannot be compared.",
            f"Use --nproc {devices}, one for each, or look at them with --profile or Nsight Systems.",
        )
    check_writable("--timeline", path)


class StageWatch:
    """Watches the steps of a run; does nothing where it has no stages and no timeline is asked for.

    All methods are collectives: every worker calls them after the same steps.
    """

    def __init__(self, trainer: Trainer, config: TrainConfig, plan: Plan, total: int) -> None:
        self._world = trainer.world
        self._layout = trainer.plan.layout
        self._is_staged = trainer.plan.is_staged
        self._plan = plan
        self._path = config.timeline
        done = trainer.steps_done
        #: Steps after this are shown; one at least, where there is more than one.
        self._show_from = min(done + WARM_UP_STEPS, max(done + 1, total - 1))
        self._show_after = min(self._show_from + TIMELINE_STEPS, total)
        self._recorded: dict[int, StepSpans] = {}
        #: How far this worker's clock is ahead of rank 0's, in seconds.
        self.ahead = self._gather({}).ahead if self._is_staged else 0.0
        #: What could not be written, for the end of the run.
        self.problem: str | None = None

    def take(self, step: int, spans: StepSpans, say: Callable[[str], object]) -> None:
        """Take note of a step that is over."""
        if self._path is None:
            return
        if step > self._show_from:
            self._recorded[step] = spans
        else:
            self._recorded = {step: spans}  # for a run that ends with it
        if step >= self._show_after:
            self.finish(say)

    def finish(self, say: Callable[[str], object]) -> None:
        """Write the timeline of what was recorded; a run that ended early shows what it has."""
        path, self._path = self._path, None
        if path is None or not self._recorded:
            return
        if not any(spans.spans for spans in self._recorded.values()):
            self.problem = "there is no timeline: in this way to train the passes of a step are not recorded"
            return
        shown = {step: spans for step, spans in self._recorded.items() if step > self._show_from}
        recording = self._gather(shown or self._recorded)
        if not self._world.is_main:
            return
        from hybridpar.run.plan_step import step_of_plan

        layout = self._layout
        planned = step_of_plan(self._plan) if self._is_staged and layout.is_equal else None
        spans = () if planned is None else planned[0].timeline
        timeline = Timeline(add_prediction(recording.steps, spans, layout), layout, self._facts(recording.clocks))
        try:
            from hybridpar.observe.timeline_file import write_timeline

            write_timeline(path, timeline)
        except RunDirectoryError as error:
            self.problem = f"there is no timeline: {error.what}"
        else:
            steps = timeline.steps
            shown_steps = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            say(f"timeline of {shown_steps} written to {path}; `hybridpar show {path}` prints it")

    def _gather(self, recorded: dict[int, StepSpans]) -> Recording:
        from hybridpar.comm.clocks import gather_spans  # most runs have neither stages nor a timeline

        return gather_spans(self._world, recorded)

    def _facts(self, clocks: int) -> dict[str, object]:
        pipeline = self._plan.pipeline
        assert pipeline is not None
        facts: dict[str, object] = {
            "model": self._plan.model.name,
            "stages": len(self._plan.partition.stages),
            "micro_batches": pipeline.micro_batches,
            "schedule": pipeline.schedule,
            "clocks": "one for all workers"
            if clocks == 1
            else f"{clocks}, aligned by the end of exchanges of all workers; good to about the time of a message",
        }
        if self._is_staged:
            facts["prediction"] = "the search of the plan" if self._plan.inputs else "times of the stages alone"
        return facts
