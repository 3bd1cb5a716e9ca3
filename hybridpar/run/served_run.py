"""`hybridpar train` on one worker of a run with parameter servers.

Every worker computes gradients until the servers have taken in as many as the run is to have; a *step* is as many as
there are workers, from whichever workers they came. Worker 0 tests, shows and writes, and hears from shard 0 what each
step did. Another process can take its place: what it must know is in the run directory and at shard 0.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.world import World, default_device
from hybridpar.compress import check_optimizer, read_policy
from hybridpar.config import TrainConfig
from hybridpar.data import Batch, ImageData, describe_data, load_dataset
from hybridpar.data.image_facts import ImageFacts
from hybridpar.data.mix import mix_step
from hybridpar.errors import SyncError, TrainingError
from hybridpar.machine.launch import StopRequest, record_failure
from hybridpar.models import autocast, learning_rate_scales, parameter_count
from hybridpar.models.modes import same_modes
from hybridpar.models.outputs import OutputLoss
from hybridpar.observe.live import open_progress
from hybridpar.observe.plots import draw_staleness
from hybridpar.observe.progress import Progress
from hybridpar.observe.records import EpochRecord, RunInfo, StepRecord
from hybridpar.optim.build import build_optimizer, expand
from hybridpar.optim.loss_scale import FALLS
from hybridpar.optim.losses import make_loss
from hybridpar.optim.schedule import rate_factor
from hybridpar.plan import ModelInfo, Pipeline, Plan, trivial_plan
from hybridpar.planner.resolve import resolve
from hybridpar.run.data import batch_maker, check_batch, make_model, shares_of, test_batches
from hybridpar.run.directory import before_the_start
from hybridpar.run.figures import WorkerFigures, measured_fields
from hybridpar.run.loop import RunLoop
from hybridpar.run.save_rule import SaveRule
from hybridpar.run.served_state import ServedState
from hybridpar.run.timings import StepTimes, Timings
from hybridpar.run.worker import device_name, tune_worker
from hybridpar.server.clipping import Clipping
from hybridpar.server.encoding import check_for_servers
from hybridpar.server.learner import Exchanged, Learner
from hybridpar.server.ledger import StepRow
from hybridpar.server.place import Place, find_own_place
from hybridpar.server.process import own_shard, serve_shard
from hybridpar.server.rules import Rules
from hybridpar.server.serve import save_occasion
from hybridpar.server.staleness import StalenessHistogram
from hybridpar.server.stripe_optimizer import described_parameters, needs_whole_parameters
from hybridpar.server.stripes import cut_model, trained_parameters
from hybridpar.train.checkpoint_files import step_of
from hybridpar.train.evaluation import Evaluation, evaluate
from hybridpar.train.step_result import MAX_BAD_STEPS


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


def step_record(row: StepRow, result: Exchanged, data_ms: float, per_epoch: int, peak: float) -> StepRecord:
    """A step as shard 0 saw it; the parts of its time are those of worker 0's own push."""
    return StepRecord(
        step=row.step,
        epoch=(row.step - 1) // per_epoch,
        loss=row.loss,
        lr=row.rate * peak,
        samples=row.samples,
        step_ms=row.seconds * 1e3,
        compute_ms=result.compute_ms,
        exposed_sync_ms=result.exposed_ms,
        data_ms=data_ms,
        bytes_sent=result.pushed,
        skipped=row.skipped > 0,
        grad_norm=result.norm,
        staleness=row.staleness,
        most_stale=row.most_stale,
        queued=row.queued,
        bytes_pulled=result.pulled,
    )


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
        data = self._load_data()
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
        self.policy = read_policy(config.compress)
        self.policy.check(list(trained_parameters(self.model)))
        check_for_servers(self.policy)
        optimizer = build_optimizer(self.model, config)
        for entry in self.policy.rules:
            check_optimizer(entry.codec, optimizer)
        self.clipping = Clipping.of(config, self.model, optimizer)
        self.loss = OutputLoss(make_loss(config, several_labels=data.multi_label, mixed=config.mixes))
        scales = None
        if config.scales_rates:
            scales = learning_rate_scales(self.model, config.layer_decay, config.head_lr_scale)
        self.stripes = cut_model(
            described_parameters(self.model, config.no_decay),
            place.shards,
            scales,
            whole=needs_whole_parameters(config),
        )
        # From here on the workers' generators (dropout) differ.
        torch.manual_seed(config.seed * 1000 + 1 + place.rank)
        self.timings = Timings()
        self._save_asked = False
        self._bad, self._seen = 0, 0
        self.learner: Learner
        self._latest: Exchanged | None = None
        self._test_saved: EpochRecord | None = None

    def _load_data(self) -> ImageData:
        """Load the data set; where it may be downloaded, worker 0 goes first."""
        if not self.config.download or self.place.workers == 1:
            return load_dataset(self.config)
        if not self.is_main:
            self.place.wait_for("data", 24 * 3600.0)
            return load_dataset(self.config)
        data = load_dataset(self.config)
        self.place.store.set("data", "there")
        return data

    def _describe(self) -> RunInfo:
        """What is known before the first step; worker 0 writes the plan."""
        config, place = self.config, self.place
        where = f"{place.servers} server{'' if place.servers == 1 else 's'}"
        if not place.servers:
            where = "the workers themselves, each of which hosts one shard"
        info = ModelInfo(
            name=self.model_name,
            fingerprint=self.state.fingerprint,
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
                *self.state.weights_lines,
                f"gradients are added at {where}: --sync {config.sync}",
            ),
            replicas=place.workers,
            codec=str(self.policy),
            sync=config.sync,
            servers=place.servers,
        )

    # -------------------------------------------------------------------- loop

    def _train(self, stop: StopRequest) -> bool:
        self.state = ServedState(
            *(self.config, self.model_name, self.model, self.stripes, self.place, self.policy),
            self.rules.barrier,
            self.clipping,
            self.at,
        )
        graceful = False
        try:
            if not self._join():
                graceful = True
                return False
            self._saved = self._progress_made() if self.at.resumed_from is not None else None
            self._test_saved = self._last_test
            self.info = self._describe()
            self.learner = self._open_learner()
            with contextlib.closing(self.learner):
                stopped = super()._train(stop)
            graceful = True
            return stopped
        except BaseException as error:
            record_failure(error, debug=self.config.debug)  # before the peers notice that this worker is gone
            raise
        finally:
            self.state.links.close(graceful=graceful)

    def _join(self) -> bool:
        """Come to the shards; False where a worker that takes the place of one that died finds that all have left."""
        try:
            with before_the_start():
                self.state.begin(self.total, self._images)
        except SyncError:
            # Worker 0 writes the results, so a run that has ended without it is to be resumed.
            if self.place.rank == 0 or not (self.place.joins and self.place.is_over()):
                raise
            print(f"worker {self.place.rank} came back when the run was over; it has nothing to do", file=sys.stderr)
            return False
        return True

    def _open_learner(self) -> Learner:
        config = self.config
        return Learner(
            self.model,
            self.loss,
            self.state.links,
            barrier=self.rules.barrier,
            context=self._autocast,
            loss_scale=self.state.loss_scale,
            guard=config.guard,
            compiled=config.compile,
            clipping=self.clipping,
            took=self.state.take_weights,
        )

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.config.amp, self.device)

    def _learn(self, batch: Batch, data_ms: float, stop: bool) -> Exchanged:
        """One step of this worker; what the servers answered."""
        rate = rate_factor(min(self.at.step, self.total - 1), self.total, self.per_epoch, self.config)
        rate *= self.state.lowered
        wanted: dict[str, Any] = {"stop": stop, "save": self._is_save_due() or self._save_asked}
        wanted["lowered"] = self.state.tells
        micro_batches = self._mixed(batch.micro_batches)
        result = self.learner.step(micro_batches, batch.samples, batch.global_samples, rate=rate, **wanted)
        times = StepTimes(result.compute_ms, result.exposed_ms, data_ms)
        self.timings.add(times, result.pushed, bytes_pulled=result.pulled)
        return result

    def _steps(self, stop: StopRequest) -> bool:
        """Push gradients until there are enough; True when a signal ended it early."""
        if self.at.step >= self.total:
            return False
        self._seen = self.at.step
        for batch, data_ms in self._endless():
            result = self._learn(batch, data_ms, stop.wanted)
            self.at.own_steps += 1
            self.state.hear(result.lowered)
            self._save_asked = False
            before, self._seen, self.at.step = self._seen, result.step, result.step
            self._latest = result
            self._record(result, data_ms)
            self._watch(result)
            self.state.follow(result.step, applied=result.applied)
            if result.save:
                self._save(save_occasion(result.save))
            if result.stop:
                return True
            self._end_of_step(before, result)
            if result.done:
                return False
        raise AssertionError("batches never end")

    def _watch(self, result: Exchanged) -> None:
        """End a training in which nothing but bad gradients comes, as `hybridpar.train.step_result.BadSteps` does."""
        self._bad = 0 if result.applied or result.done or not self.config.guard else self._bad + 1
        if self._bad >= MAX_BAD_STEPS + (FALLS if self.state.loss_scale is not None else 0):
            raise TrainingError(
                f"loss or gradients were not finite in {self._bad} steps in a row, up to step {result.step}",
                "After so many training stops.",
                "Lower --lr, or lengthen --warmup-epochs; --resume goes on from a checkpoint.",
            )

    def _mixed(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> Sequence[tuple[Tensor, Tensor]]:
        """Mixup and cutmix, where they are asked for; without a barrier by this worker's own number of steps."""
        config, done = self.config, self.at.own_steps
        if not config.mixes:
            return micro_batches
        place = config.seed, done, done / self.per_epoch
        return mix_step(micro_batches, config, *place, classes=self.classes, smoothing=config.label_smoothing)

    def _endless(self) -> Iterator[tuple[Batch, float]]:
        """This worker's share of all epochs to come, with the time that each batch was waited for."""
        while True:
            epoch, first = divmod(self.at.own_steps, self.per_epoch)
            batches = iter(self.batches.epoch(epoch, first))
            for _ in range(first, self.per_epoch):
                asked = time.perf_counter()
                batch = next(batches)
                yield batch, (time.perf_counter() - asked) * 1e3

    def _record(self, result: Exchanged, data_ms: float) -> None:
        """Worker 0: write down what the steps since the last push did."""
        for text in result.news:
            self.progress.warn(text)
        for row in result.rows:
            record = step_record(row, result, data_ms, self.per_epoch, self.config.peak_lr)
            self._note_step(record, "did not count a gradient that was not finite")

    def _end_of_step(self, before: int, result: Exchanged) -> None:
        """Test and save where an epoch, or the run, has ended between two answers."""
        step, barrier = result.step, self.rules.barrier
        ended = step // self.per_epoch > before // self.per_epoch
        if (ended or result.done) and (barrier or self.is_main):
            # Without a barrier an answer may come some steps after the end of the epoch that it tells of.
            epoch = (step - 1 if result.done else step - self.per_epoch) // self.per_epoch
            tested, averaged = self._evaluate(f"test-{step}"), self._evaluate_average(f"test-average-{step}")
            if ended:  # --steps may end within an epoch
                self.state.note_metric(tested.accuracy, self.total, self.per_epoch)
            wanted = self._note_epoch(epoch, step, tested, averaged, last=result.done)
            if barrier and not result.done and wanted:
                self._save(f"epoch-{step}")
            elif not result.done:
                self._save_asked |= wanted
        every = self.rule.steps
        if result.done or not every or step // every == before // every:
            return
        if barrier:
            self._save(f"step-{step}")
        else:
            self._save_asked |= self.is_main

    def _evaluate(self, occasion: str) -> Evaluation:
        """Accuracy and loss over the test set: with a barrier each worker tests its share, else worker 0 all of it."""
        own = Evaluation(0.0, 0.0, 0)
        with same_modes(self.model), self._autocast():
            self.model.eval()
            if len(self.test):
                own = evaluate(self.learner.forward, self.loss.of_scores, self.test, World(device=self.device))
        if not self.rules.barrier:
            return own
        sums: Any = [own.accuracy * own.samples, own.loss * own.samples, own.samples]
        items = self.state.links.gather(f"{occasion}/0", sums)
        right, loss, samples = (sum(values) for values in zip(*items.values(), strict=True))
        return Evaluation(right / samples, loss / samples, samples)

    def _evaluate_average(self, occasion: str) -> Evaluation | None:
        """The result of the moving average (`--model-ema`), if one is kept."""
        if self.state.average is None:
            return None
        with self.state.average.applied():
            return self._evaluate(occasion)

    def _save(self, occasion: str, *, wanted: bool = True) -> None:
        """Write a checkpoint if worker 0 has something to save; all workers come here on the same occasion."""
        states = None
        if self.is_main and wanted and self._may_save(self.at.step):
            states, rows = self.state.snapshot()
            self._write_late(rows)
            # Without a barrier the best result is saved some steps after its test.
            test = self._last_test
            if test is not None and test != self._test_saved and test in self.keep_rule.best(self.at.tested):
                self.at.tested[-1] = replace(test, step=int(states[0]["taken"]) // self.place.workers)
        self._last_save = time.monotonic()
        try:
            path = self.state.save(occasion, states, self.per_epoch)
        except SyncError as error:
            if self.rules.barrier:
                raise
            self.progress.warn(f"no checkpoint: {error.what}")
            return
        if path is not None:
            self._test_saved = self._last_test
            self._note_saved(step_of(path))

    def _write_late(self, rows: list[StepRow]) -> None:
        """Steps that ended since the last answer."""
        if rows and self._latest is not None:
            self.at.step = rows[-1].step
            self.state.follow(self.at.step)
            self._record(replace(self._latest, rows=rows, news=()), self.timings.times[-1].data_ms)

    def _progress_made(self) -> tuple[object, ...]:
        return self.at.step, len(self.at.tested)

    @property
    def _last_test(self) -> EpochRecord | None:
        return self.at.tested[-1] if self.at.tested else None

    # --------------------------------------------------------------------- end

    def _finish(self, stopped: bool) -> None:
        # One occasion for all ways to end: without a barrier some workers stop while others have just finished.
        self._save("last", wanted=stopped or self.rule != SaveRule())
        noted = WorkerFigures(self.timings.share(), None, None)
        answers = list(self.state.links.gather("finish/0", noted).values())
        if not self.is_main:
            return
        states, _ = self.state.snapshot()
        summary = self._summary(stopped)
        whole = self.at.resumed_from is None
        summary |= measured_fields(
            answers,
            [[one] for one in range(self.place.workers)],
            step_ms=summary["step_ms_median"],
            whole=whole,
        )
        ages = StalenessHistogram.of_dict(states[0]["histogram"])  # of all steps, as in metrics.jsonl
        mean = ages.mean
        summary["staleness"] = {
            "mean": None if mean is None else round(mean, 4),
            "most": ages.most,
            "histogram": ages.to_dict(),
        }
        rules = self.rules
        expected = 0.0 if rules.barrier else (rules.learners - 1) / rules.collect
        picture = draw_staleness(self.at.directory, ages.counts, expected)
        self._report(summary, self.at.step if stopped else None, pictures=[picture])
