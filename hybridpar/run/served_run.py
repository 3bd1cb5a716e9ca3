"""Why: with servers nobody waits for everybody, so the loop of a run is another one, though what it leaves is the same.

Every worker computes gradients until the servers have taken in as many as the run is to have; a *step* is as many as
there are workers, whoever they came from. Worker 0 tests, draws and writes, and learns from shard 0 what each step did.
Its own place can be taken by another process: what it must know is in the run directory and at shard 0.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybridpar.comm.world import World, default_device
from hybridpar.compress import check_optimizer, read_policy
from hybridpar.config import TrainConfig
from hybridpar.data import Batch, ImageData, TestBatches, TrainBatches, describe_data, load_dataset
from hybridpar.errors import SyncError, TrainingError
from hybridpar.machine.launch import StopRequest, record_failure
from hybridpar.observe import EpochRecord, MetricsWriter, Progress, open_progress
from hybridpar.optim.build import build_optimizer, rate_factor
from hybridpar.optim.recipe import expand
from hybridpar.run.data import check_batch, make_model, untested
from hybridpar.run.directory import before_the_start
from hybridpar.run.save_rule import SaveRule
from hybridpar.run.served_report import ServedFacts, ServedTimes, describe_run, report_run, step_record
from hybridpar.run.served_state import ServedState, Standing
from hybridpar.run.timings import RunningMean
from hybridpar.run.worker import tune_worker
from hybridpar.server.encoding import check_for_servers
from hybridpar.server.learner import Exchanged, Learner
from hybridpar.server.place import Place, find_own_place
from hybridpar.server.present import exchange
from hybridpar.server.process import OwnShards, serve_shards, tell_parts
from hybridpar.server.rules import Rules
from hybridpar.server.stripe_optimizer import described_parameters
from hybridpar.server.stripes import cut_model, parts_of_a_host, trained_parameters
from hybridpar.train.checkpoint_files import prune_checkpoints
from hybridpar.train.evaluation import Evaluation, evaluate
from hybridpar.train.step_result import MAX_BAD_STEPS


def run_served(config: TrainConfig, model_name: str, changes: Sequence[str] = ()) -> int:
    """Train on this worker, or serve on this server, until the run is finished or interrupted.

    Args:
        config: Options.
        model_name: As on the command line.
        changes: Lines on options that a resumed run began with otherwise.

    Returns:
        0, or 130 or 143 where a signal stopped the run and no launcher reports it.

    Raises:
        HybridparError: Whatever ends the run before its time.
    """
    try:
        rule = SaveRule.parse(config.checkpoint_every)
        config = expand(config, total_steps=None, replicas=1)  # learning rates per sample; recipes are refused
        place = find_own_place(config, config.timeout)
        config.split_count(place.workers)
        with contextlib.ExitStack() as stack:
            if not place.is_worker:
                # Signals are for workers: until they have left, they need the servers to save.
                stack.callback(StopRequest().release)
                serve_shards(config, place)
                return 0
            with before_the_start():
                run = ServedRun(config, model_name, place, rule, changes)
            if place.servers == 0:
                stack.enter_context(OwnShards(config, place, run.parts))
            return run.execute()
    except BaseException as error:
        record_failure(error, debug=config.debug)  # before the peers notice that this process is gone
        raise


class ServedRun:
    """One worker's part of a run with servers.

    Args:
        config: Options.
        model_name: What the user calls the model.
        place: What this process is.
        rule: When to save.
        changes: Lines on options that a resumed run began with otherwise.
    """

    def __init__(
        self, config: TrainConfig, model_name: str, place: Place, rule: SaveRule, changes: Sequence[str] = ()
    ) -> None:
        self.changes = changes
        self.config, self.model_name, self.place, self.rule = config, model_name, place, rule
        self.is_main = place.rank == 0
        self.rules = Rules.of(config, place.workers)
        self.device = default_device()
        tune_worker(config, World(device=self.device))
        data = self._load_data()
        check_batch(config, len(data.train), place.workers)
        self._open_data(data)
        torch.manual_seed(config.seed)
        self.model = make_model(config, model_name, data, self.device)
        self.data_line = describe_data(data) if self.is_main else ""
        if config.uses_channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.policy = read_policy(config.compress)
        self.policy.check(list(trained_parameters(self.model)))
        check_for_servers(self.policy)
        for entry in self.policy.rules:
            check_optimizer(entry.codec, build_optimizer(self.model, config))
        described = described_parameters(self.model)
        self.parts = parts_of_a_host(described, place.hosts)
        self.stripes = cut_model(described, place.hosts * self.parts)
        if self.is_main:
            tell_parts(place, self.parts)
        self.loss = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
        # From here on the workers' generators (dropout) differ.
        torch.manual_seed(config.seed * 1000 + 1 + place.rank)
        self.times = ServedTimes()
        self._writer: MetricsWriter | None = None
        self._progress: Progress = Progress()
        self._losses, self._epoch_began = RunningMean(), time.monotonic()
        self._last_save, self._wish, self._sound = time.monotonic(), False, True
        self._saved: object = None
        self._bad, self._seen, self._improved = 0, 0, False
        self._latest: Exchanged | None = None

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

    def _open_data(self, data: ImageData) -> None:
        config, place = self.config, self.place
        common: dict[str, Any] = {
            "loader_workers": config.loader_workers,
            "device": self.device,
            "channels_last": config.uses_channels_last,
        }
        self.batches = TrainBatches(
            data,
            seed=config.seed,
            batch_size=config.batch_size,
            rank=place.rank,
            workers=place.workers,
            micro_batches=config.micro_batches,
            **common,
        )
        # Where nobody waits, worker 0 tests alone while the others go on.
        rank, workers = (place.rank, place.workers) if self.rules.barrier else (0, 1)
        size = max(2, config.batch_size // place.workers)
        self.test = TestBatches(data, batch_size=size, rank=rank, workers=workers, **common)
        self.per_epoch = self.batches.steps_per_epoch
        self.total = config.steps if config.steps is not None else config.epochs * self.per_epoch
        self.sample_shape = data.sample_shape

    # -------------------------------------------------------------------- loop

    def execute(self) -> int:
        """Train to the end, or until a signal."""
        stop = StopRequest()
        try:
            self.state = ServedState(
                *(self.config, self.model_name, self.model, self.stripes, self.place, self.policy),
                self.rules.barrier,
                self.per_epoch,
            )
            graceful = False
            try:
                stopped = self._train(stop)
                graceful = True
            except BaseException as error:
                record_failure(error, debug=self.config.debug)  # before the peers notice that this worker is gone
                raise
            finally:
                self.state.links.close(graceful=graceful)
        finally:
            stop.release()
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        return 128 + stop.signal if stopped and stop.signal is not None and not launched else 0

    def _train(self, stop: StopRequest) -> bool:
        """All of the run; True when a signal ended it early."""
        with before_the_start():
            self.at: Standing = self.state.begin(self.total)
        self._saved = self._progress_made() if self.at.resumed_from is not None else None
        self.learner = Learner(
            self.model,
            self.loss,
            self.state.links,
            barrier=self.rules.barrier,
            bf16=self.config.amp == "bf16",
            guard=self.config.guard,
            compiled=self.config.compile,
            took=self.state.take_weights,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self.learner.close)
            if self.is_main:
                self.info = describe_run(self._facts(), self.at, self.changes)
                self._writer = stack.enter_context(MetricsWriter(self.at.directory, self.at.resumed_from))
                self._progress = stack.enter_context(open_progress())
                self._progress.start(self.info, self.at.resumed_from or 0)
            stopped = self._steps(stop)
        self._finish(stopped)
        return stopped

    def _steps(self, stop: StopRequest) -> bool:
        """Push gradients until there are enough; True when a signal ended it early."""
        if self.at.step >= self.total:
            return False
        self._seen = self.at.step
        for batch, data_ms in self._endless():
            rate = rate_factor(min(self.at.step, self.total - 1), self.total, self.per_epoch, self.config)
            seconds = self.rule.seconds
            due = seconds is not None and self.is_main and time.monotonic() - self._last_save >= seconds
            result = self.learner.step(
                batch.micro_batches,
                batch.samples,
                batch.global_samples,
                rate=rate,
                stop=stop.wanted,
                save=due or self._wish,
            )
            self._wish = False
            self.at.own_steps += 1
            before, self._seen, self.at.step = self._seen, result.step, result.step
            self.times.add(result, data_ms)
            self._latest = result
            self._record(result, data_ms)
            self._watch(result)
            if result.save:
                self._save(f"save-{result.save}")
            if result.stop:
                return True
            self._end_of_step(before, result)
            if result.done:
                return False
        raise AssertionError("batches never end")

    def _watch(self, result: Exchanged) -> None:
        """End a training in which nothing but bad gradients comes, as `hybridpar.train.step_result.BadSteps` does.

        Raises:
            TrainingError: There were `MAX_BAD_STEPS` in a row.
        """
        self._bad = 0 if result.applied or result.done or not self.config.guard else self._bad + 1
        if self._bad >= MAX_BAD_STEPS:
            raise TrainingError(
                f"loss or gradients were not finite in {self._bad} steps in a row, up to step {result.step}",
                "After so many training stops.",
                "Lower --lr, or lengthen --warmup-epochs; the last checkpoint is from before.",
            )

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
            self._progress.warn(text)
        for row in result.rows:
            self._sound = self.config.guard or math.isfinite(row["loss"])
            record = step_record(row, result, data_ms, self.per_epoch, self.config.lr)
            self._losses.add(record.loss, record.samples)
            self._progress.step(record)
            if self._writer is not None:
                self._writer.write_step(record)
            if record.skipped:
                self._progress.warn(f"step {record.step}: a gradient was not finite and did not count")

    def _end_of_step(self, before: int, result: Exchanged) -> None:
        """Test and save where an epoch, or the run, has ended between two answers."""
        ended = result.step // self.per_epoch > before // self.per_epoch
        if (ended or result.done) and (self.rules.barrier or self.is_main):
            self._end_epoch(result)
        every = self.rule.steps
        if result.done or not every or result.step // every == before // every:
            return
        if self.rules.barrier:
            self._save(f"step-{result.step}")
        else:
            self._wish |= self.is_main

    def _end_epoch(self, result: Exchanged) -> None:
        evaluation = self._evaluate(result.step)
        step = result.step
        improved = self.at.best is None or evaluation.accuracy > self.at.best[0]
        if improved:
            self.at.best, self._improved = (evaluation.accuracy, step), True
        seconds = time.monotonic() - self._epoch_began
        # Where nobody waits an answer may come some steps after the end of the epoch that it tells of.
        epoch = (step - 1 if result.done else step - self.per_epoch) // self.per_epoch
        end = EpochRecord(epoch, step, evaluation.accuracy, evaluation.loss, self._losses.value, seconds)
        self._losses, self._epoch_began = RunningMean(), time.monotonic()
        self._progress.epoch(end)
        if self.is_main and (news := untested(evaluation.samples, self.test.total)) is not None:
            self._progress.warn(news)
        if self._writer is not None:
            self._writer.write_epoch(end)
        wanted = self.rule.epoch or (self.rule != SaveRule() and (result.done or improved))
        if self.rules.barrier and not result.done and wanted:
            self._save(f"epoch-{step}")
        elif not result.done:
            self._wish |= wanted

    def _evaluate(self, step: int) -> Evaluation:
        """Accuracy and loss over the test set: with a barrier each worker tests its share, else worker 0 all of it."""
        self.model.eval()
        with self.learner.autocast():
            own = Evaluation(0.0, 0.0, 0)
            if len(self.test):
                own = evaluate(self.learner.forward, self.loss, self.test, World(device=self.device))
        if not self.rules.barrier:
            return own
        sums = [own.accuracy * own.samples, own.loss * own.samples, own.samples]
        _, items = exchange(self.state.links.links[0], f"test-{step}/0", sums)
        right, loss, samples = (sum(values) for values in zip(*items, strict=True))
        return Evaluation(right / samples, loss / samples, samples)

    def _save(self, occasion: str, *, wanted: bool = True) -> None:
        """Write a checkpoint if worker 0 has something to save; all workers come here on the same occasion."""
        self._last_save = time.monotonic()
        states = None
        if self.is_main and wanted and self._sound and self._saved != self._progress_made():
            states, rows = self.state.snapshot()
            self._write_late(rows)
            if self._improved and self.at.best is not None:  # where nobody waits it is saved some steps after its test
                self.at.best = (self.at.best[0], int(states[0]["taken"]) // self.place.workers)
            self._improved = False
        try:
            path, _ = self.state.save(occasion, self.at, states)
        except SyncError as error:
            if self.rules.barrier:
                raise
            self._progress.warn(f"no checkpoint: {error.what}")
            return
        if path is None:
            if self.is_main and not self._sound:
                self._progress.warn("no checkpoint: the loss is not finite, and the last good one must stand")
            return
        self._saved = self._progress_made()
        if self.is_main:
            best = self.at.best
            prune_checkpoints(path.parent, self.config.keep, best[1] if best else None)
            self._progress.message(f"checkpoint saved at {path.name.replace('-', ' ')}")

    def _write_late(self, rows: list[dict[str, Any]]) -> None:
        """Steps that ended since the last answer."""
        if rows and self._latest is not None:
            self.at.step = int(rows[-1]["step"])
            self._record(replace(self._latest, rows=rows, news=()), self.times.times[-1][2])

    def _progress_made(self) -> tuple[object, ...]:
        """What tells two checkpoints of a run apart."""
        return self.at.step, self.at.best

    # --------------------------------------------------------------------- end

    def _finish(self, stopped: bool) -> None:
        # One occasion for all ways to end: where nobody waits, some workers stop while others have just finished.
        self._save("last", wanted=stopped or self.rule != SaveRule())
        _, shares = exchange(self.state.links.links[0], "finish/0", self.times.share())
        if self.is_main:
            states, _ = self.state.snapshot()
            report_run(self._facts(), self.info, self.at, states, shares, stopped)

    def _facts(self) -> ServedFacts:
        return ServedFacts(
            *(self.config, self.model_name, self.model, self.state.fingerprint, self.place, self.rules, self.policy),
            *(self.total, self.per_epoch, self.sample_shape, self.device, self.data_line),
        )
