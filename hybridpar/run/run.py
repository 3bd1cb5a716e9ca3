"""`hybridpar train` on one worker: data, model, plan and trainer, the loop over the epochs, and the final report.

Every worker runs the same program; rank 0 alone writes files (except for its peers' parts of a checkpoint) and prints.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridpar.comm.flight import FLIGHT, noted, outside
from hybridpar.comm.flight import FOLDER as FLIGHT_FOLDER
from hybridpar.comm.replicate import broadcast_state
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.config.data import without_download
from hybridpar.data import Batch, ImageData, TrainBatches, describe_data
from hybridpar.data.image_facts import ImageFacts
from hybridpar.errors import CheckpointError, HybridparError
from hybridpar.machine.launch import StopRequest, in_job, record_failure
from hybridpar.models.deferred import DeferredModel
from hybridpar.observe.live import open_progress
from hybridpar.observe.logger import logger_names
from hybridpar.observe.metrics import MetricsWriter, read_metrics
from hybridpar.observe.progress import Progress
from hybridpar.observe.records import RunInfo, StepRecord
from hybridpar.observe.summary import SUMMARY_FILE, read_summary
from hybridpar.plan import Plan, ResolvedPlan
from hybridpar.planner.fixed import decided_options
from hybridpar.planner.planned_run import plan_run, set_aside
from hybridpar.planner.resolve import join_workers
from hybridpar.run.data import (
    batch_maker,
    check_batch,
    example_batch,
    load_data,
    open_model,
    shares_of,
    start_from_weights,
    steps_of,
    test_batches,
    with_images_of_model,
)
from hybridpar.run.directory import (
    RunPlace,
    before_the_start,
    claim_place,
    find_place,
    recall_options,
    recorded_batch,
    was_restarted,
)
from hybridpar.run.figures import (
    WorkerFigures,
    close_plan,
    expected_lines,
    measured_fields,
    predicted_fields,
    recipe_fields,
)
from hybridpar.run.loop import RunLog
from hybridpar.run.memory import MemoryMeter
from hybridpar.run.plan import as_asked, plan_of_run
from hybridpar.run.profile import StepProfile
from hybridpar.run.save_rule import SaveRule
from hybridpar.run.shares import ShareTuner
from hybridpar.run.sync import sync_fields, wire_format_lines
from hybridpar.run.timeline import StageWatch, check_timeline
from hybridpar.run.timings import StepClock, StepTimes, Timings
from hybridpar.run.worker import device_name, tune_worker
from hybridpar.schedule.spans import StepSpans
from hybridpar.train.checkpoint import usable
from hybridpar.train.checkpoint_files import digest_of, latest_checkpoint, resolve_checkpoint
from hybridpar.train.trainer import StepResult, Trainer, open_trial

if TYPE_CHECKING:
    from hybridpar.run.batch_search import BatchSelector
    from hybridpar.run.kernels import KernelUse
    from hybridpar.run.served_trainer import ServedTrainer
    from hybridpar.server.ledger import StepRow

#: What is shown of a step that did not count.
SKIPPED = "was skipped on all workers: a gradient was not finite"


def run_training(config: TrainConfig, model_name: str, given: Collection[str] | None = None) -> int:
    """Train on this worker until the run is finished or interrupted."""
    config.check()
    asked, problem = config, None
    try:
        config, changes = recall_options(asked, model_name, given)
        config.check()
        if os.environ.get("RANK", "0") == "0":
            logger_names(config.log)
    except HybridparError as error:
        if not in_job():
            raise
        # Raised once the workers have joined, as they were asked to: another host may have no such run.
        config, problem, changes = asked, error, ()
    rule, given = SaveRule.parse(config.checkpoint_every), given or ()
    with contextlib.ExitStack() as job:
        try:
            if config.parameter_servers is not None:
                from hybridpar.run.served_trainer import join_servers

                world: World | None = join_servers(config, job)
            else:
                world = join_workers(config, given)
            if world is None:  # this was a server
                return 0
            job.callback(world.close)

            def decided() -> tuple[TrainConfig, tuple[str, ...]]:
                if problem is not None:
                    raise problem
                return config, tuple(changes)

            config, changes = world.from_main(decided)
            config = with_images_of_model(config, model_name)
            tune_worker(config, world if config.parameter_servers is None else World(device=world.device))
            with open_progress() if world.is_main else Progress() as progress:
                with before_the_start():
                    progress.prepare("loading the data set and the model")
                    data = load_data(config, world)
                    config = replace(config, data=without_download(config.data))  # it is there
                    run = Run(config, model_name, world, data, rule, progress, given, changes)
                with run.trainer:
                    code = run.say_finished() if run.is_over else run.execute()
            FLIGHT.close()  # after an error it stays, for `hybridpar doctor --hang`
            return code
        except BaseException as error:
            record_failure(error, debug=config.debug)  # before the peers notice that this worker is gone
            raise


def place_of_all(config: TrainConfig, model: str, world: World) -> RunPlace:
    """Where a run writes, as worker 0 decides; every worker must see the checkpoint that it goes on
    from. A collective.
    """
    # With a launcher on each host, only that of the worker that died counts the restart.
    restarted = any(world.gather(was_restarted()))

    def find() -> tuple[RunPlace, Path | None, str]:
        place = find_place(config, model, restarted=restarted)
        path = None if place.checkpoint is None else resolve_checkpoint(place.checkpoint)
        return place, path, digest_of(path)

    place, path, digest = world.from_main(find)

    def check() -> None:
        if digest_of(path) != digest:
            raise CheckpointError(
                f"worker {world.rank} on {socket.gethostname()} does not have the checkpoint {path} of worker 0",
                "Every worker reads the checkpoint from the run directory.",
                "Have the run directory on a disk that all machines see, or copy it to that one.",
            )

    world.on_all(check)
    return place


class Run(RunLog):
    """What a worker does in a run.

    With parameter servers `served` is the trainer. Their workers that wait for each other, as under `ps`, train like
    any others. Where each goes at its pace (`independent`), a step is done by whichever workers, and each goes through
    the data for itself; worker 0 alone tests and saves.
    """

    def __init__(
        self,
        config: TrainConfig,
        model_name: str,
        world: World,
        data: ImageData,
        rule: SaveRule,
        progress: Progress,
        given: Collection[str] = (),
        changes: Sequence[str] = (),
    ) -> None:
        super().__init__(config, model_name, rule, progress, world.is_main, changes)
        self.world = world
        self.memory = MemoryMeter(world.device)
        opened, told = open_model(config, model_name, data, world)
        deferred = opened if isinstance(opened, DeferredModel) else None
        model = opened.module if isinstance(opened, DeferredModel) else opened
        self.data_line = world.from_main(lambda: describe_data(data))
        self.place = place_of_all(config, model_name, world)
        if config.batch_size == "auto":
            config = self.config = self._with_batch(config, model, data, given)
        check_batch(config, len(data.train), world.size)
        self.weights_lines: list[str] = [] if told is None else [told]
        if self.place.checkpoint is None and config.weights is not None:
            if deferred is not None:  # each worker reads what it will hold
                self.weights_lines += world.on_all(lambda: start_from_weights(config, model_name, deferred))
            else:
                with world.patient():
                    self.weights_lines += world.from_main(lambda: start_from_weights(config, model_name, model))
                if world.size > 1 and config.parameter_servers is None:  # else servers hand them out
                    broadcast_state(model, 0, world)
        asked, decided = config, None
        if config.parameter_servers is not None:  # no plan is searched for, and one worker has something to send, too
            asked, decided = replace(config, plan="none"), decided_options(config, given)
        self.planned = plan_run(
            model,
            asked,
            world,
            sample_shape=data.sample_shape,
            steps=steps_of(config, len(data.train)),
            name=model_name,
            given=given,
            stored=self.place.directory / "plan.json" if self.place.continues else None,
            decided=decided,
            announce=progress.prepare,
            open_trial=open_trial if deferred is None else None,
        )
        plan = self.planned.plan
        # What planning left behind is not for training; the model is, and is there already.
        held = (one for one in chain(model.parameters(), model.buffers()) if not one.is_meta)
        self.memory.restart(sum(one.nbytes for one in held))
        alone_on_gpus = world.device.type == "cuda" and world.size == 1
        world.from_main(lambda: check_timeline(config, torch.cuda.device_count() if alone_on_gpus else 1))
        self.data, self.given = data, given
        self._own_only = deferred is not None
        batches_of = self._divide(plan)
        per_epoch = self.batches.steps_per_epoch
        self.total = config.steps if config.steps is not None else config.epochs * per_epoch
        self.epochs = math.ceil(self.total / per_epoch)
        options: dict[str, Any] = {
            "config": config,
            "total_steps": self.total,
            "steps_per_epoch": per_epoch,
            "world": world,
            "plan": self.planned,
            "name": model_name,
            "classes": data.classes,
            "several_labels": data.multi_label,
        }
        self.served: ServedTrainer | None = None
        if config.parameter_servers is not None:
            from hybridpar.run.served_trainer import ServedTrainer

            self.trainer = self.served = ServedTrainer(model, **options)
        else:
            self.trainer = Trainer(deferred or model, example=self._example(plan), **options)
        self.independent = self.served is not None and self.served.independent
        try:
            self._begin(plan, batches_of)
        except BaseException:
            self.trainer.close()
            raise

    # ------------------------------------------------------------------- start

    def _begin(self, plan: ResolvedPlan, batches_of: Callable[[int], TrainBatches]) -> None:
        """What follows once the trainer is open: kernels, the checkpoint, the run's directory, and what measures."""
        config, world = self.config, self.world
        self.selector: BatchSelector | None = None
        if config.select_batch > 0:
            from hybridpar.run.batch_search import BatchSelector

            self.selector = BatchSelector(self.trainer, config, batches_of, len(self.data.train))
        self.shares: ShareTuner | None = None
        if config.shares.strip() == "auto" and self.replicas > 1:
            self.shares = ShareTuner(
                *(
                    world,
                    plan.layout.ranks,
                    config.samples_per_step,
                    config.parts_per_step(plan.pipeline.micro_batches),
                ),
                idle=plan.sync.batch_norm != "sync",
                in_pairs=config.mixing.is_on,
                wait=self.trainer.wait,
            )
        self.kernels = self._prepare_kernels(plan)
        # From here on the workers' generators (dropout) differ.
        torch.manual_seed(config.seed * 1000 + 1 + world.rank)
        if self.served is None or not self.served.joins:
            self.at.resumed_from = self._resume()
        self.is_over = world.from_main(self._was_finished)
        if self.is_over:
            if self.served is not None and self.is_main:
                self.served.servers.dismiss()
            return
        # Only now is it sure that the run can start; what stood in its directory before may go.
        self._claim(plan)
        self.at.directory = self.place.directory
        if self.served is None:
            FLIGHT.open(self.place.directory / FLIGHT_FOLDER, world.rank, world.size)
        else:
            self._enter(self.served)
            if self.is_over:
                return
        self.plan, self.info = self._describe()
        self.watch = StageWatch(self.trainer, self.config, self.plan, self.total)
        self.profile: StepProfile | None = None
        if config.profile:
            trace = self.place.directory / "profile" / f"rank-{world.rank}.json.gz"
            settle = self.trainer.engine.wait
            self.profile = StepProfile(trace, self.trainer.steps_done, self.total, settle)
        self.timings = Timings()
        self.clock = StepClock()
        self._stopping = False
        self._latest: StepRecord | None = None  # of this worker's last push, where there are servers
        self._batches_ahead = self._endless_batches()
        self._last_saved = self.at.resumed_from or 0
        self._last_save = time.monotonic()
        self._saved = self._progress_made() if self.at.resumed_from is not None else None

    def _with_batch(
        self, config: TrainConfig, model: nn.Module, data: ImageData, given: Collection[str]
    ) -> TrainConfig:
        """The options with a number for `--batch-size auto`: that of the run that goes on, or a new choice."""
        batch = self.world.from_main(lambda: recorded_batch(self.place))
        if batch is None:
            from hybridpar.planner.batch import measure_batch

            shape, announce = data.sample_shape, self.progress.prepare
            choice = measure_batch(
                model, config, self.world, given, shape, len(data.train), open_trial=open_trial, announce=announce
            )
            batch, self.batch_line = choice.batch, choice.why
        return replace(config, batch_size=batch)

    def _divide(self, plan: ResolvedPlan) -> Callable[[int], TrainBatches]:
        """Divide batches and the test set as a plan says; returns what makes batches of another size."""
        config, world = self.config, self.world
        # The workers of one replica are given the same samples.
        self.replicas = plan.layout.replicas
        shares = shares_of(config, plan)
        batches_of = batch_maker(self.data, config, plan, world.device, plan.layout.replica_of(world.rank), shares)
        self.batches = batches_of(config.samples_per_step)
        divided = world.size, world.rank, world.size
        if self._own_only and plan.layout.positions > 1:  # the workers of a replica evaluate together
            divided = self.replicas, plan.layout.replica_of(world.rank), self.replicas
        if config.parameter_servers is not None and not config.parameter_servers.waits_for_all:
            divided = world.size, 0, 1  # worker 0 tests alone
        self._make_test = partial(test_batches, self.data, config, plan, world.device, *divided)
        self.test = self._make_test(shares)
        return batches_of

    def _example(self, plan: ResolvedPlan) -> Tensor | None:
        return example_batch(self.data, self.config, plan) if plan.is_staged else None

    def _prepare_kernels(self, plan: ResolvedPlan) -> KernelUse | None:
        if plan.kernels is None:
            return None
        from hybridpar.run.kernels import prepare_kernels

        # A run that is resumed goes on with the same kernels, bit for bit.
        confirm = self.place.checkpoint is None
        return prepare_kernels(self.trainer.model, self.config, plan, self.world, self.data.sample_shape, confirm)

    def _claim(self, plan: ResolvedPlan) -> None:
        """Make the run's directory its own, and write how to repeat it."""
        asked = as_asked(self.config, plan)
        versions, images = {"torch": torch.__version__}, ImageFacts.of(self.data).plain()
        recorded: dict[str, Any] = {"follows_plan": plan.inputs is not None, "images": images}
        name, given = self.model_name, self.given
        self.place = self.world.from_main(lambda: claim_place(self.place, asked, name, versions, given, **recorded))

    def _enter(self, served: ServedTrainer) -> None:
        """Come to the servers; in the stead of a worker that died, go on from where the others are."""
        checkpoint = None
        if served.joins:
            checkpoint = latest_checkpoint(self.place.checkpoints) or self.place.checkpoint
            if self.is_main:
                metrics = read_metrics(self.place.directory)
                self.at.tested, steps = list(metrics.epochs), metrics.steps["step"]
                self.at.resumed_from = int(steps[-1]) if len(steps) else 0
        self.is_over = not served.enter(self.at.resumed_from or 0, checkpoint, self._start_instead)
        if served.joins:
            self._find_position(0, 0)

    def _start_instead(self) -> int:
        """Load what worker 0 died before it brought to the servers; the step that is then done."""
        self.at.resumed_from = self._resume()
        if self.place.checkpoint is None:
            self.weights_lines += start_from_weights(self.config, self.model_name, self.trainer.model)
        return self.at.resumed_from or 0

    def _resume(self) -> int | None:
        """Go on from the checkpoint of the run, if there is any; the step that is then done."""
        if self.place.checkpoint is None:
            return None
        extra = self.trainer.load(self.place.checkpoint)
        with usable(self.place.checkpoint):
            self.at.go_on_from(extra, self.config, self.place.checkpoint)
            if self.selector is not None:
                self.selector.restore(extra.get("batch_sizes"))
                self.batches, self.total = self.selector.batches, self.selector.pace.total_steps()
            if self.shares is not None:
                self.shares.restore(extra.get("shares"))
                self._divide_by(self.shares.shares)
            # An epoch of another number of workers may be a step shorter, see `cut_epoch`.
            self.at.epoch_step = min(self.at.epoch_step, self.batches.steps_per_epoch)
        return self.trainer.steps_done

    def _was_finished(self) -> bool:
        """Whether the run that is resumed has nothing left to train, and its result is there."""
        result = read_summary(self.place.directory) if self.place.continues else None
        return (
            result is not None
            and result["exit"] == "finished"
            and self.at.resumed_from == result["steps"]
            and (result["steps"] >= self.total or self._stops_early() is not None)
        )

    def say_finished(self) -> int:
        """Show the result that a finished run has; what it left behind stays as it is."""
        if self.world.is_main and (result := read_summary(self.place.directory)) is not None:
            longer = "--steps" if self.config.steps is not None else "--epochs"
            done = f"has done all of its {self.total:,} steps"
            if result["steps"] < self.total:
                longer, done = "--stop-early", str(self._stops_early())
            self.progress.message(
                f"nothing left to train: the run in {self.place.directory} {done}; a larger {longer} goes on"
            )
            from hybridpar.observe.report import print_report

            print_report(result, [self.place.directory / SUMMARY_FILE, self.place.checkpoints])
        return 0

    def _describe(self) -> tuple[Plan, RunInfo]:
        device = device_name(self.world.device)
        notes = [*self._opening_notes(), *self.weights_lines, *self.planned.lines]
        if (shares := self.batches.shares) is not None:
            notes.append(f"shares   {' : '.join(f'{share:g}' for share in shares)} of every batch")
        if self.place.restarted:
            since = f"step {self.at.resumed_from}" if self.at.resumed_from else "the start"
            notes.append(f"a worker died; all workers were restarted and go on from {since}")
        wire_format = self.trainer.engine.wire_format()
        notes += wire_format_lines(wire_format, self.place.directory if self.world.is_main else None)
        facts: dict[str, Any] = {"workers": self.world.size, "codec": str(wire_format.applied)}
        if self.served is not None:
            facts |= self.served.facts
            notes.append(self.served.where_gradients_go)
        plan: Plan = plan_of_run(self.trainer, device, wire_format)
        if self.kernels is not None:
            notes += self.kernels.notes()
            plan = plan.model_copy(update={"kernels": self.kernels.section()})
        notes += expected_lines(plan.predicted, self.total - self.trainer.steps_done)
        if self.is_main and plan.checksum is None and self.place.continues:
            set_aside(self.place.directory / "plan.json")
        return plan, self._begin_with(
            plan,
            device,
            epochs=self.epochs,
            steps_per_epoch=self.batches.steps_per_epoch,
            notes=tuple(notes),
            replicas=self.replicas,
            **facts,
        )

    # -------------------------------------------------------------------- loop

    def execute(self) -> int:
        """Train to the end, or until a signal; show the run, and report."""
        stop = StopRequest(says=self.is_main)
        try:
            with contextlib.ExitStack() as stack:
                if self.is_main:
                    self._writer = stack.enter_context(MetricsWriter(self.at.directory, self.at.resumed_from))
                    self._loggers = self._open_loggers()
                    stack.callback(self._close_loggers, self._loggers)
                self.progress.start(self.info, self.at.resumed_from or 0)
                self._steps(stop)
                self._ending = "interrupted" if self._stopping else "finished"
            self.progress.close()
            self._finish(self._stopping)
        finally:
            stop.release()
        # A launcher has received the signal too, and would take another code than 0 for a failure.
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        return 128 + stop.signal if self._stopping and stop.signal is not None and not launched else 0

    def _steps(self, stop: StopRequest) -> None:
        """Run all epochs, until the end or a signal."""
        at, progress = self.at, self.progress
        for epoch in range(at.epoch, self.epochs):
            if epoch < at.epoch:  # others have done it meanwhile
                continue
            if (news := self._stops_early()) is not None:
                progress.message(news)
                break
            self._begin_epoch()
            first = at.epoch_step if epoch == at.epoch else 0
            if self.selector is not None and self.selector.is_due(epoch, first):
                with self.clock.away(), progress.pause("trying batch sizes"):
                    progress.message(self.selector.choose(epoch))
                self.batches, self.total = self.selector.batches, self.selector.pace.total_steps()
                progress.figures.steps_total = self.total
            before = self.trainer.steps_done
            for result, data_ms in self._steps_of(epoch, first, stop):
                record, spans = self._record(result, epoch, data_ms)
                if self.served is None:
                    self._note_step(record, SKIPPED)
                else:
                    self._latest = record
                    for text in self.served.answer.news:
                        progress.warn(text)
                    self._note_rows(self.served, self.served.answer.rows)
                with self.clock.away(), progress.pause():
                    self.watch.take(result.step, spans, progress.message)
                self._tune_shares(result, record)
                due = self.rule.steps and result.step // self.rule.steps > before // self.rule.steps
                before = result.step
                self._stopping |= result.outcome.stop
                if (result.outcome.save or due) and not self._stopping:
                    self._save()
            if self._stopping:
                break
            # An answer may tell of the end of the run in an epoch before the last.
            if (self.is_main or not self.independent) and self._test(epoch):
                break
        if self._stopping:
            self._save()
        with self.clock.away():
            self.watch.finish(progress.message)
            if self.profile is not None:
                self.profile.finish(progress.message)

    def _note_rows(self, served: ServedTrainer, rows: Sequence[StepRow]) -> None:
        """Note what steps did, as servers say."""
        text = "did not count a gradient that was not finite" if self.independent else SKIPPED
        if self._latest is not None:
            for row in rows:
                self._note_step(served.record(self._latest, row), text)

    def _test(self, epoch: int) -> bool:
        """Test at the end of an epoch, or of the run within it; whether that was the last test."""
        at, per_epoch = self.at, self.batches.steps_per_epoch
        with self.clock.away(), outside("testing"):
            evaluation = self.trainer.evaluate(self.test)
            averaged = self._evaluate_average()
        last = epoch == self.epochs - 1
        if self.independent:  # the answer to a push may tell of steps past the end of an epoch
            last = self.trainer.steps_done >= self.total
            epoch, ended = (self.epochs if last else at.epoch) - 1, at.epoch > epoch
        elif ended := at.epoch_step >= per_epoch:  # --steps may end within an epoch
            at.epoch, at.epoch_step = epoch + 1, 0
        if ended:
            self.trainer.note_metric(evaluation.accuracy)
        if self._note_epoch(epoch, self.trainer.steps_done, evaluation, averaged, last=last):
            self._save()
        return last

    def _tune_shares(self, result: StepResult, record: StepRecord) -> None:
        """Change the shares of the steps to come, where it was measured that other ones are faster."""
        if self.shares is None:
            return
        busy_ms = record.compute_ms + record.data_ms
        if self.world.device.type == "cuda" and (spans := result.outcome.spans).spans:
            busy_ms = spans.step_ms - spans.exposed_sync_ms
        with self.clock.away(), self.progress.pause():
            if (news := self.shares.note(busy_ms, record.samples)) is not None:
                self._divide_by(self.shares.shares)
                self.progress.message(news)

    def _divide_by(self, shares: Sequence[int] | None) -> None:
        """Divide the steps to come, and the test set, by other shares."""
        self.batches.shares = shares
        self.test = self._make_test(shares)

    def _steps_of(self, epoch: int, first: int, stop: StopRequest) -> Iterator[tuple[StepResult, float]]:
        """The steps of an epoch, with the time each waited for its data.

        On a GPU, and in a pipeline, a step is handed on when the next one has been queued: reading its figures
        must not keep the device waiting. A request to stop or to save then takes effect a step later, on all workers.
        """
        held: tuple[StepResult, float] | None = None
        done, divided, batches = first, None, self._batches_ahead
        while self.trainer.steps_done < self.total and not self._stopping and self.at.epoch <= epoch:
            behind = (self.world.device.type == "cuda" and self.served is None) or self.trainer.engine.late
            if not self.independent and divided != (self.batches, self.batches.shares):
                batches, divided = iter(self.batches.epoch(epoch, done)), (self.batches, self.batches.shares)
            asked = time.perf_counter()
            with outside("waiting for the next batch"):
                batch: Batch | None = next(batches, None)
            if batch is None:
                break
            data_ms = (time.perf_counter() - asked) * 1e3
            if self.profile is not None:
                with self.clock.away(), self.progress.pause():
                    self.profile.take(self.trainer.steps_done, self.progress.message)
            with noted(f"step {self.trainer.steps_done + 1}"):
                current = self.trainer.step(batch, stop=stop.wanted, save=self._is_save_due()), data_ms
            done += 1
            self._find_position(epoch, done)
            ready, held = (held, current) if behind else (current, None)
            if ready is not None:
                yield ready
        if held is not None:
            yield held

    def _find_position(self, epoch: int, done: int) -> None:
        """Note where in the data the run is, after so many steps of an epoch here."""
        if self.independent:
            epoch, done = divmod(self.trainer.steps_done, self.batches.steps_per_epoch)
        self.at.epoch, self.at.epoch_step = epoch, done

    def _endless_batches(self) -> Iterator[Batch]:
        """This worker's shares of all steps to come, where it goes through the data for itself."""
        epoch, first = self.at.epoch, self.at.epoch_step
        while True:
            yield from self.batches.epoch(epoch, first)
            epoch, first = epoch + 1, 0

    def _record(self, result: StepResult, epoch: int, data_ms: float) -> tuple[StepRecord, StepSpans]:
        """A step in figures, and what ran in it."""
        spans, exposed = result.outcome.spans, result.outcome.exposed_sync_ms
        recorded = spans
        sync = result.outcome.sync
        if result.staged and spans.spans:
            times, recorded = self.clock.divide(spans, data_ms, max(0.0, exposed - spans.exposed_sync_ms))
            spans = recorded
        else:
            spans = StepSpans(0.0, ())
            times = StepTimes(result.host_ms - exposed, exposed, data_ms)
        self.timings.add(times, result.outcome.bytes_sent, spans, sync, result.outcome.bytes_pulled)
        record = StepRecord(
            step=result.step,
            epoch=epoch,
            loss=result.loss,
            lr=result.lr,
            samples=result.outcome.samples,
            step_ms=times.step_ms,
            compute_ms=times.compute_ms,
            exposed_sync_ms=times.exposed_sync_ms,
            data_ms=times.data_ms,
            bytes_sent=result.outcome.bytes_sent,
            skipped=result.skipped,
            grad_norm=result.grad_norm,
            staleness=result.staleness,
            bytes_pulled=result.outcome.bytes_pulled,
            **sync_fields(sync, exposed),
        )
        return record, recorded

    def _save(self) -> None:
        """Write a checkpoint, if there is something new: all workers, or worker 0 alone where each goes at its pace."""
        if (self.independent and not self.is_main) or not self._may_save(self.trainer.steps_done):
            return
        if self.served is not None:
            self._note_rows(self.served, self.served.fetch())
        if self.independent:
            self._find_position(self.at.epoch, self.at.epoch_step)
            tested, step = self.at.tested, self.trainer.steps_done
            if tested and tested[-1].step > self._last_saved and tested[-1] in self.keep_rule.best(tested):
                tested[-1] = replace(tested[-1], step=step)  # the servers have gone on since the test
        extra = self.at.to_extra(self.config)
        if self.selector is not None:
            extra["batch_sizes"] = self.selector.state()
        if self.shares is not None:
            extra["shares"] = self.shares.state()
        with self.clock.away(), outside("saving a checkpoint"):
            self.trainer.save(self.place.checkpoints, extra)
        self._last_saved = self.trainer.steps_done
        self._note_saved(self.trainer.steps_done)

    # --------------------------------------------------------------------- end

    def _finish(self, stopped: bool) -> None:
        plan, trained_plan = self.plan, self.trainer.plan
        saved = self.trainer.engine.pipeline.peak_saved_bytes if trained_plan.is_staged else None
        noted = WorkerFigures(self.timings.share(self.watch.ahead), saved, self.memory.peak_bytes())
        answers = self.world.gather(noted) if self.served is None else self.served.gather_in_the_end(noted)
        kernels = self.kernels.summary(self.world) if self.kernels is not None else None
        if not self.world.is_main:
            return
        summary = self._summary(stopped)
        whole = self.at.resumed_from is None  # else what all workers noted covers a part only
        ranks = trained_plan.layout.ranks
        summary |= measured_fields(answers, ranks, step_ms=summary["step_ms_median"], whole=whole)
        summary["kernels"] = kernels
        summary |= recipe_fields(self.config, self.trainer, self.info, self.selector)
        if trained_plan.sync.outer is not None and (rate := self.timings.steps_per_second()) is not None:
            summary["images_per_second"] = round(rate * self.config.samples_per_step, 3)  # few steps exchange anything
            summary |= self.timings.mean_step()
        shares = self.batches.shares if self.shares is None else self.shares.counts
        if shares is not None:
            summary["shares"] = "auto:" * (self.shares is not None) + ",".join(f"{share:g}" for share in shares)
        if self.selector is not None:  # steps of an epoch were not always the same number
            summary["epochs"] = self.at.epoch
        summary |= predicted_fields(plan.predicted)
        warnings = close_plan(plan, summary, self.place.directory / "plan.json")
        timeline = self.config.timeline
        problems = [self.watch.problem, None if self.profile is None else self.profile.problem]
        shown = timeline is not None and self.watch.problem is None and timeline.exists()
        pictures = []
        if self.served is not None:
            summary["staleness"], picture = self.served.staleness(self.at.directory)
            pictures.append(picture)
        self._report(
            summary,
            self.trainer.steps_done if stopped else None,
            pictures=pictures,
            files=[timeline] if timeline is not None and shown else [],
            warnings=[*warnings, *(one for one in problems if one is not None)],
        )
