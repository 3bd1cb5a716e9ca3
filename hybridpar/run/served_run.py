"""`hybridpar train` on one worker of a run with parameter servers.

Every worker computes gradients until the servers have taken in as many as the run is to have; a *step* is as many as
there are workers, from whichever workers they came. Worker 0 tests, shows and writes, and hears from shard 0 what each
step did. Another process can take its place: what it must know is in the run directory and at shard 0.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from hybridpar.comm.world import World, default_device
from hybridpar.config import TrainConfig
from hybridpar.data import Batch, describe_data, load_dataset
from hybridpar.data.image_facts import ImageFacts
from hybridpar.errors import SyncError
from hybridpar.machine.launch import StopRequest, record_failure
from hybridpar.models import parameter_count
from hybridpar.observe.live import open_progress
from hybridpar.observe.plots import draw_staleness
from hybridpar.observe.progress import Progress
from hybridpar.observe.records import EpochRecord, RunInfo, StepRecord
from hybridpar.optim.build import expand
from hybridpar.plan import ModelInfo, Pipeline, Plan, trivial_plan
from hybridpar.planner.resolve import resolve
from hybridpar.run.data import batch_maker, check_batch, make_model, shares_of, test_batches
from hybridpar.run.directory import before_the_start
from hybridpar.run.figures import WorkerFigures, measured_fields
from hybridpar.run.loop import RunLoop
from hybridpar.run.save_rule import SaveRule
from hybridpar.run.served_trainer import ServedTrainer
from hybridpar.run.timings import StepTimes, Timings
from hybridpar.run.worker import device_name, tune_worker
from hybridpar.server.ledger import StepRow
from hybridpar.server.place import Place, find_own_place
from hybridpar.server.process import own_shard, serve_shard
from hybridpar.server.rules import Rules
from hybridpar.server.serve import save_occasion
from hybridpar.server.staleness import StalenessHistogram
from hybridpar.server.wire import Weights
from hybridpar.train.checkpoint_files import step_of
from hybridpar.train.step_result import StepResult


def run_served(config: TrainConfig, model_name: str, changes: Sequence[str] = ()) -> int:
    """Train on this worker, or serve on this server, until the run is finished or interrupted."""
    try:
        rule = SaveRule.parse(config.checkpoint_every)
        config = expand(config, total_steps=None, replicas=1)  # learning rates per sample; recipes are refused
        place = find_own_place(config, config.timeout)
        with contextlib.ExitStack() as stack:
            assert config.parameter_servers is not None
            config.parameter_servers.split_count(place.workers)
            if not place.is_worker:
                # Signals are for workers: until they have left, they need the servers to save.
                stack.callback(StopRequest().release)
                serve_shard(config, place)
                return 0
            progress = stack.enter_context(open_progress() if place.rank == 0 else Progress())
            with before_the_start():
                run = ServedRun(config, model_name, place, rule, progress, changes)
            if place.servers == 0:
                stack.enter_context(own_shard(config, place))
            return run.execute()
    except BaseException as error:
        record_failure(error, debug=config.debug)  # before the peers notice that this process is gone
        raise


class ServedRun(RunLoop):
    """One worker's part of a run with servers."""

    def __init__(
        self,
        config: TrainConfig,
        model_name: str,
        place: Place,
        rule: SaveRule,
        progress: Progress,
        changes: Sequence[str] = (),
    ) -> None:
        super().__init__(config, model_name, rule, progress, place.rank == 0, changes)
        self.place = place
        self.rules = Rules.of(config, place.workers)
        self.device = default_device()
        tune_worker(config, World(device=self.device))
        if config.download and not self.is_main:
            place.wait_for("data", 24 * 3600.0)
        data = load_dataset(config)
        if self.is_main:
            place.store.set("data", "there")
        check_batch(config, len(data.train), place.workers)
        plan = resolve(config, place.workers)
        shares = shares_of(config, plan)
        self.batches = batch_maker(data, config, plan, self.device, place.rank, shares)(config.batch_size)
        # Without a barrier worker 0 tests alone while the others go on.
        share = (place.rank, place.workers) if self.rules.barrier else (0, 1)
        self.test = test_batches(data, config, plan, self.device, place.workers, *share, None)
        self.per_epoch = self.batches.steps_per_epoch
        self.total = config.steps if config.steps is not None else config.epochs * self.per_epoch
        self.sample_shape, self.classes = data.sample_shape, data.classes
        self._images = ImageFacts.of(data).plain()
        torch.manual_seed(config.seed)
        self.model = make_model(config, model_name, data, self.device)
        self.data_line = describe_data(data) if self.is_main else ""
        if plan.channels_last:
            self.model.to(memory_format=torch.channels_last)
        # From here on the workers' generators (dropout) differ.
        torch.manual_seed(config.seed * 1000 + 1 + place.rank)
        self.several_labels = data.multi_label
        self.timings = Timings()
        self.trainer: ServedTrainer
        self._traffic = 0, 0
        self._save_asked = False
        self._test_saved: EpochRecord | None = None

    def _describe(self) -> RunInfo:
        """What is known before the first step; worker 0 writes the plan."""
        config, place = self.config, self.place
        where = f"{place.servers} server{'' if place.servers == 1 else 's'}"
        if not place.servers:
            where = "the workers themselves, each of which hosts one shard"
        info = ModelInfo(
            name=self.model_name,
            fingerprint=self.trainer.fingerprint,
            parameters=parameter_count(self.model),
            input=self.sample_shape,
        )
        plan: Plan = trivial_plan(
            info,
            replicas=place.workers,
            device=self.device.type,
            pipeline=Pipeline(schedule="accumulate", micro_batches=config.micro_batches),
        )
        return self._begin_with(
            plan,
            device_name(self.device),
            workers=place.workers,
            epochs=-(-self.total // self.per_epoch),
            steps_per_epoch=self.per_epoch,
            notes=(
                *self._opening_notes(),
                *self.trainer.weights_lines,
                f"gradients are added at {where}: --sync {config.sync}",
            ),
            replicas=place.workers,
            codec=str(self.trainer.policy),
            sync=config.sync,
            servers=place.servers,
        )

    # -------------------------------------------------------------------- loop

    def _train(self, stop: StopRequest) -> bool:
        with before_the_start():
            self.trainer = self._open_trainer()
        graceful = False
        try:
            with self.trainer:
                stopped = self._join() and self._train_on(stop)
            graceful = True
            return stopped
        except BaseException as error:
            record_failure(error, debug=self.config.debug)  # before the peers notice that this worker is gone
            raise
        finally:
            self.trainer.links.close(graceful=graceful)

    def _open_trainer(self) -> ServedTrainer:
        return ServedTrainer(
            *(self.model, self.config, self.place, self.at, self.model_name),
            total_steps=self.total,
            steps_per_epoch=self.per_epoch,
            classes=self.classes,
            several_labels=self.several_labels,
        )

    def _train_on(self, stop: StopRequest) -> bool:
        self._saved = self._progress_made() if self.at.resumed_from is not None else None
        self._test_saved = self._last_test
        self._traffic = self.trainer.links.traffic
        self.info = self._describe()
        return super()._train(stop)

    def _join(self) -> bool:
        """Come to the shards; False where a worker that takes the place of one that died finds that all have left."""
        try:
            with before_the_start():
                self.trainer.begin(self.total, self._images)
        except SyncError:
            # Worker 0 writes the results, so a run that has ended without it is to be resumed.
            if self.place.rank == 0 or not (self.place.joins and self.place.is_over()):
                raise
            print(f"worker {self.place.rank} came back when the run was over; it has nothing to do", file=sys.stderr)
            return False
        return True

    def _steps(self, stop: StopRequest) -> bool:
        """Push gradients until there are enough; True when a signal ended it early."""
        if self.trainer.steps_done >= self.total:
            return False
        for batch, data_ms in self._endless():
            before, save = self.trainer.steps_done, self._is_save_due() or self._save_asked
            result = self.trainer.step(batch, stop=stop.wanted, save=save)
            self._save_asked = False
            answer = self.trainer.engine.gradients.answer
            self._record(result, data_ms)
            if answer.save:
                self._save(save_occasion(answer.save))
            if answer.stop:
                return True
            self._end_of_step(before, answer)
            if answer.done:
                return False
        raise AssertionError("batches never end")

    def _endless(self) -> Iterator[tuple[Batch, float]]:
        """This worker's share of all epochs to come, with the time that each batch was waited for."""
        while True:
            epoch, first = divmod(self.trainer.engine.own_steps, self.per_epoch)
            batches = iter(self.batches.epoch(epoch, first))
            for _ in range(first, self.per_epoch):
                asked = time.perf_counter()
                batch = next(batches)
                yield batch, (time.perf_counter() - asked) * 1e3

    def _record(self, result: StepResult, data_ms: float) -> None:
        """Note what a push cost; worker 0 writes down what the steps since the last push did."""
        gradients, before = self.trainer.engine.gradients, self._traffic
        self._traffic = self.trainer.links.traffic
        sent, received = self._traffic[0] - before[0], self._traffic[1] - before[1]
        times = StepTimes(result.host_ms - gradients.exposed_ms, gradients.exposed_ms, data_ms)
        self.timings.add(times, sent, bytes_pulled=received)
        for text in gradients.answer.news:
            self.progress.warn(text)
        self._write_rows(gradients.answer.rows)

    def _write_rows(self, rows: Sequence[StepRow]) -> None:
        """Worker 0: write down steps, with the parts of the time of its last push."""
        squares, timings = self.trainer.links.squares, self.timings
        for row in rows:
            record = StepRecord(
                step=row.step,
                epoch=(row.step - 1) // self.per_epoch,
                loss=row.loss,
                lr=row.rate * self.trainer.peak_rate,
                samples=row.samples,
                step_ms=row.seconds * 1e3,
                compute_ms=timings.times[-1].compute_ms,
                exposed_sync_ms=timings.times[-1].exposed_sync_ms,
                data_ms=timings.times[-1].data_ms,
                bytes_sent=int(timings.bytes_sent[-1]),
                skipped=row.skipped > 0,
                grad_norm=None if squares is None else math.sqrt(squares),
                staleness=row.staleness,
                most_stale=row.most_stale,
                queued=row.queued,
                bytes_pulled=int(timings.bytes_pulled[-1]),
            )
            self._note_step(record, "did not count a gradient that was not finite")

    def _end_of_step(self, before: int, answer: Weights) -> None:
        """Test and save where an epoch, or the run, has ended between two answers."""
        step, barrier = answer.step, self.rules.barrier
        ended = step // self.per_epoch > before // self.per_epoch
        if (ended or answer.done) and (barrier or self.is_main):
            # Without a barrier an answer may come some steps after the end of the epoch that it tells of.
            epoch = (step - 1 if answer.done else step - self.per_epoch) // self.per_epoch
            tested, averaged = self.trainer.evaluate(self.test), self._evaluate_average()
            if ended:  # --steps may end within an epoch
                self.trainer.note_metric(tested.accuracy)
            wanted = self._note_epoch(epoch, step, tested, averaged, last=answer.done)
            if barrier and not answer.done and wanted:
                self._save(f"epoch-{step}")
            elif not answer.done:
                self._save_asked |= wanted
        every = self.rule.steps
        if answer.done or not every or step // every == before // every:
            return
        if barrier:
            self._save(f"step-{step}")
        else:
            self._save_asked |= self.is_main

    def _save(self, occasion: str, *, wanted: bool = True) -> None:
        """Write a checkpoint if worker 0 has something to save; all workers come here on the same occasion."""
        states = None
        if self.is_main and wanted and self._may_save(self.trainer.steps_done):
            answers = self.trainer.links.states()
            states = [answer.state for answer in answers]
            if answers[0].rows:  # steps that ended since the last answer
                self.trainer.steps_done = answers[0].rows[-1].step
                self.trainer.engine.follow(self.trainer.steps_done)
                self._write_rows(answers[0].rows)
            # Without a barrier the best result is saved some steps after its test.
            test = self._last_test
            if test is not None and test != self._test_saved and test in self.keep_rule.best(self.at.tested):
                self.at.tested[-1] = replace(test, step=int(states[0]["taken"]) // self.place.workers)
        self._last_save = time.monotonic()
        try:
            path = self.trainer.save_together(occasion, states, self.per_epoch)
        except SyncError as error:
            if self.rules.barrier:
                raise
            self.progress.warn(f"no checkpoint: {error.what}")
            return
        if path is not None:
            self._test_saved = self._last_test
            self._note_saved(step_of(path))

    def _progress_made(self) -> tuple[object, ...]:
        return self.trainer.steps_done, len(self.at.tested)

    @property
    def _last_test(self) -> EpochRecord | None:
        return self.at.tested[-1] if self.at.tested else None

    # --------------------------------------------------------------------- end

    def _finish(self, stopped: bool) -> None:
        # One occasion for all ways to end: without a barrier some workers stop while others have just finished.
        self._save("last", wanted=stopped or self.rule != SaveRule())
        noted = WorkerFigures(self.timings.share(), None, None)
        answers = list(self.trainer.links.gather("finish/0", noted).values())
        if not self.is_main:
            return
        summary = self._summary(stopped)
        whole = self.at.resumed_from is None
        summary |= measured_fields(
            answers,
            [[one] for one in range(self.place.workers)],
            step_ms=summary["step_ms_median"],
            whole=whole,
        )
        state = self.trainer.links.states()[0].state
        ages = StalenessHistogram.of_dict(state["histogram"])  # of all steps, as in metrics.jsonl
        mean = ages.mean
        summary["staleness"] = {
            "mean": None if mean is None else round(mean, 4),
            "most": ages.most,
            "histogram": ages.to_dict(),
        }
        rules = self.rules
        expected = 0.0 if rules.barrier else (rules.learners - 1) / rules.collect
        picture = draw_staleness(self.at.directory, ages.counts, expected)
        self._report(summary, self.trainer.steps_done if stopped else None, pictures=[picture])
