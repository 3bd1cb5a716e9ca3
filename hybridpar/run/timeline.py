"""Records the first steps of a run, predicts a step of a pipeline from them, and writes the timeline.

After the first steps all workers bring together what they recorded; rank 0 predicts a step from it and completes
`plan.json`. The steps that follow are what the prediction is held against: with `--timeline` they are written, beside
it, as a trace. Nothing here can end a run: what cannot be written is told at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybridpar.comm.clocks import gather_spans
from hybridpar.config import TrainConfig
from hybridpar.errors import RunDirectoryError, UsageError
from hybridpar.formats.output_files import check_writable
from hybridpar.observe.files import replace_file
from hybridpar.observe.running import WARM_UP_STEPS
from hybridpar.observe.timeline import Timeline, add_prediction
from hybridpar.plan import Plan
from hybridpar.run.plan import Forecast, forecast_step, with_forecast
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.spans import StepSpans
from hybridpar.train.engine import Engine
from hybridpar.train.trainer import Trainer

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
            f"Use --workers {devices}, one for each, or look at them with --profile or Nsight Systems.",
        )
    check_writable("--timeline", path)


class StageWatch:
    """Watches the steps of a run; does nothing where it has no stages and no timeline is asked for.

    All methods are collectives: every worker calls them after the same steps.
    """

    def __init__(self, trainer: Trainer, config: TrainConfig, plan: Plan, total: int, plan_file: Path) -> None:
        is_staged = trainer.plan.is_staged
        self._engine = trainer.engine if is_staged or config.timeline is not None else None
        self._world = trainer.world
        self._config = config
        #: The plan of the run, with its prediction as soon as there is one.
        self.plan = plan
        self._plan_file = plan_file
        done = trainer.steps_done
        #: After this step is predicted; a step that can be compared is left, where there is more than one.
        self._predict_after = min(done + WARM_UP_STEPS, max(done + 1, total - 1))
        self._show_after = min(self._predict_after + TIMELINE_STEPS, total)
        self._recorded: dict[int, StepSpans] = {}
        self._predicted = not is_staged
        self._shown = config.timeline is None
        #: What a step was predicted to take; None until then, or where nothing can be predicted.
        self.forecast: Forecast | None = None
        #: How far this worker's clock is ahead of rank 0's, in seconds.
        self.ahead = 0.0
        #: What could not be written, for the end of the run.
        self.problem: str | None = None

    def take(self, step: int, spans: StepSpans, say: Callable[[str], object]) -> None:
        """Take note of a step that is over."""
        if self._engine is None or (self._predicted and self._shown):
            return
        self._recorded[step] = spans
        if step >= self._predict_after and not self._predicted:
            self._predict(self._engine)
        if step >= self._show_after and not self._shown:
            self._show(say)

    def finish(self, say: Callable[[str], object]) -> None:
        """Do what a run that ended early has left undone."""
        if self._engine is None or not self._recorded:
            return
        if not self._predicted:
            self._predict(self._engine)
        if not self._shown:
            self._show(say)

    def _predict(self, engine: Engine) -> None:
        self._predicted = True
        first = min(self._recorded)
        # The first step of all also meets cold caches and cuts its buckets by guesswork.
        chosen = {step: spans for step, spans in self._recorded.items() if step > first} or dict(self._recorded)
        last = max(self._recorded)
        recording = gather_spans(self._world, {step: spans for step, spans in chosen.items() if spans.spans})
        self.ahead = recording.ahead
        self.forecast = forecast_step(engine, self._config, self.plan, list(recording.steps.values()))
        self._recorded = {step: spans for step, spans in self._recorded.items() if step == last}
        # What was predicted before the run began is what the run is held against.
        if self.forecast is None or self.plan.predicted is not None:
            return
        self.plan = with_forecast(self.plan, self.forecast)
        if not self._world.is_main:
            return
        try:
            replace_file(self._plan_file, [self.plan.to_json().encode()])
        except RunDirectoryError as error:
            self.problem = f"the prediction is not in the plan: {error.what}"

    def _show(self, say: Callable[[str], object]) -> None:
        self._shown = True
        path = self._config.timeline
        assert path is not None
        if not any(spans.spans for spans in self._recorded.values()):
            self.problem = "there is no timeline: in this way to train the passes of a step are not recorded"
            return
        shown = {step: spans for step, spans in self._recorded.items() if step > self._predict_after}
        recording = gather_spans(self._world, shown or self._recorded)
        if not self._world.is_main:
            return
        layout = self._engine.plan.layout if self._engine is not None else Layout.repeated([(0, 0)], self._world.size)
        spans = self.forecast.simulation.timeline if self.forecast is not None else ()
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

    def _facts(self, clocks: int) -> dict[str, object]:
        pipeline = self.plan.pipeline
        assert pipeline is not None
        facts: dict[str, object] = {
            "model": self.plan.model.name,
            "stages": len(self.plan.partition.stages),
            "micro_batches": pipeline.micro_batches,
            "schedule": pipeline.schedule,
            "clocks": "one for all workers"
            if clocks == 1
            else f"{clocks}, aligned by the end of exchanges of all workers; good to about the time of a message",
        }
        if self.forecast is not None:
            facts["prediction"] = self.forecast.source
        return facts
