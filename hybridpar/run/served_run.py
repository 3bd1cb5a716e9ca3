"""`hybridpar train` on one worker of a run with parameter servers.

Every worker computes gradients until the servers have taken in as many as the run is to have; a *step* is as many as
there are workers, from whichever workers they came. Worker 0 tests, shows and writes, and hears from shard 0 what each
step did. Another process can take its place: what it must know is in the run directory and at shard 0.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from hybridpar.errors import SyncError, TrainingError, UsageError
from hybridpar.machine.launch import StopRequest, record_failure
from hybridpar.models import autocast, learning_rate_scales, parameter_count
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
from hybridpar.run.data import batch_maker, check_batch, example_batch, make_model, shares_of, test_batches
from hybridpar.run.directory import before_the_start
from hybridpar.run.figures import WorkerFigures, measured_fields
from hybridpar.run.loop import RunLoop
from hybridpar.run.save_rule import SaveRule
from hybridpar.run.served_outer import OuterWorker, inner_trainer
from hybridpar.run.served_stages import Replica, StageLearner
from hybridpar.run.served_state import ServedState
from hybridpar.run.timings import StepTimes, Timings
from hybridpar.run.worker import device_name, tune_worker
from hybridpar.server.clipping import Clipping
from hybridpar.server.encoding import check_for_servers
from hybridpar.server.learner import Exchanged, GradientPusher, Learner, Pusher
from hybridpar.server.meetings import save_occasion
from hybridpar.server.outer import OuterLearner
from hybridpar.server.place import Place, find_own_place
from hybridpar.server.process import OwnShards, serve_shards, tell_parts
from hybridpar.server.rules import Rules
from hybridpar.server.staleness import StalenessHistogram
from hybridpar.server.stripe_optimizer import described_parameters, needs_whole_parameters
from hybridpar.server.stripes import cut_stages, trained_parameters
from hybridpar.sync.outer import check_outer_policy
from hybridpar.train.checkpoint_files import step_of
from hybridpar.train.evaluation import Evaluation, evaluate
from hybridpar.train.outer import check_length
from hybridpar.train.step_result import MAX_BAD_STEPS
from hybridpar.train.trainer import Trainer


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
        with contextlib.ExitStack() as stack:
            place, world = join_replica(config, place, stack)
            config.split_count(place.learners, "worker" if place.positions == 1 else "replica")
            if not place.is_worker:
                # Signals are for workers: until they have left, they need the servers to save.
                stack.callback(StopRequest().release)
                serve_shards(config, place)
                return 0
            progress = stack.enter_context(open_progress() if place.rank == 0 else Progress())
            with before_the_start():
                run = ServedRun(config, model_name, place, world, rule, progress, changes)
            if place.servers == 0:
                stack.enter_context(OwnShards(config, place, run.parts))
            return run.execute()
    except BaseException as error:
        record_failure(error, debug=config.debug)  # before the peers notice that this process is gone
        raise


def join_replica(config: TrainConfig, place: Place, stack: contextlib.ExitStack) -> tuple[Place, World]:
    """Join the workers of this worker's replica, where the model is cut into stages.

    Args:
        config: Options of the run.
        place: What this process is.
        stack: Leaves them again.

    Returns:
        What this process is, with the number of positions, and the workers of its replica; of a server itself alone.

    Raises:
        UsageError: Stages, replicas and workers do not fit each other.
        LaunchError: The peers cannot be reached.
    """
    placement = resolve(config, place.workers).placement
    if placement.workers == 1 or place.workers == 1:
        return place, World(device=default_device(), timeout=config.timeout)
    if place.servers and default_device().type == "cuda":
        raise UsageError(
            f"--servers {place.servers} with --stages on GPUs",
            "Process groups are made by all processes of a job, and a server would need a GPU of its own for that.",
            "Use --servers 0, with which the workers of a stage hold its shards.",
        )
    place = replace(place, positions=placement.workers)
    job = World.join(lanes=1, timeout=config.timeout)
    stack.callback(job.close)
    replicas = [[*range(one, place.workers, place.learners)] for one in range(place.learners)]
    servers = [[rank] for rank in range(place.workers, job.size)]
    world = job.split([*replicas, *servers], lanes=1)
    stack.callback(world.close)
    return place, world


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
        grad_norm=result.norm,
        staleness=row["staleness"],
        most_stale=row["most_stale"],
        queued=row["queued"],
        bytes_pulled=result.pulled,
    )


class ServedRun(RunLoop):
    """One worker's part of a run with servers.

    Args:
        config: Options.
        model_name: What the user calls the model.
        place: What this process is.
        world: The workers of its replica.
        rule: When to save.
        progress: The display.
        changes: Lines on options that a resumed run began with otherwise.
    """

    def __init__(
        self,
        config: TrainConfig,
        model_name: str,
        place: Place,
        world: World,
        rule: SaveRule,
        progress: Progress,
        changes: Sequence[str] = (),
    ) -> None:
        super().__init__(config, model_name, rule, progress, place.rank == 0, changes)
        self.place = place
        self.rules = Rules.of(config, place.learners)
        self.device = world.device
        tune_worker(config, World(device=self.device))
        data = self._load_data()
        check_batch(config, len(data.train), place.learners)
        config.check_paces(place.workers)
        plan = resolve(config, place.workers)
        shares = shares_of(config, plan)
        self.batches = batch_maker(data, config, plan, self.device, place.learner, shares)(config.batch_size)
        # Without a barrier the first replica tests alone while the others go on.
        share = (place.rank, place.workers) if self.rules.barrier else (place.position, place.positions)
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
        looped = config.outer_steps is not None
        if config.outer_steps is not None:
            check_length(config, config.outer_steps, self.total)
            check_outer_policy(self.policy)
        optimizer = build_optimizer(self.model, config)
        for entry in () if looped else self.policy.rules:
            check_optimizer(entry.codec, optimizer)
        # In an outer loop rates, and what is clipped, are the workers' business.
        self.clipping = Clipping() if looped else Clipping.of(config, self.model, optimizer)
        if self.clipping.by_norm and plan.is_staged:
            raise UsageError(
                f"--optimizer {config.optimizer}, which clips by the norm of all gradients, with --stages and servers",
                "Each stage is updated by servers of its own, which know its gradients alone.",
                "Use --opt-arg max_grad_norm=none.",
            )
        self.replica = Replica(place, world, self.model)
        self.loss = OutputLoss(make_loss(config, mixed=config.mixes))
        self.inner: Trainer | None = None
        self.stages: Trainer | None = None
        if plan.is_staged:
            example = example_batch(data, config, plan)
            self.stages = self.replica.stage_trainer(self.model, config, self.loss, self.classes, example)
        scales = None
        if config.scales_rates and not looped:
            scales = learning_rate_scales(self.model, config.layer_decay, config.head_lr_scale)
        self.stripes = cut_stages(
            described_parameters(self.model, config.no_decay),
            [self.replica.names(position) for position in range(place.positions)],
            place.hosts_each,
            scales,
            whole=not looped and needs_whole_parameters(config),
        )
        #: How many shards a process holds.
        self.parts = sum(map(len, self.stripes)) // place.hosts
        if self.is_main:
            tell_parts(place, self.parts)
        if looped:
            self.inner = inner_trainer(self.model, config, self.loss, world, self.classes)
        self.outer: OuterWorker | None = None
        # From here on the workers' generators (dropout) differ.
        torch.manual_seed(config.seed * 1000 + 1 + place.rank)
        self.timings = Timings()
        self._save_asked = False
        self._bad, self._seen = 0, 0
        self.learner: GradientPusher
        self._forward: Callable[..., Any] = self.model
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
        what = "gradients" if self.inner is None else "outer gradients"
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
        if self.stages is not None:
            cut = {"partition": self.stages.plan.partition, "measured": self.stages.plan.measured}
            plan = resolve(config, place.workers, model=info, device=self.device.type).model_copy(update=cut)
        return self._begin_with(
            plan,
            device_name(self.device),
            workers=place.workers,
            epochs=-(-self.total // self.per_epoch),
            steps_per_epoch=self.per_epoch,
            notes=(
                *self._opening_notes(),
                *self.state.weights_lines,
                f"{what} are added at {where}: --sync {config.sync}",
            ),
            replicas=place.learners,
            codec=str(self.policy),
            sync=config.sync,
            servers=place.servers,
        )

    # -------------------------------------------------------------------- loop

    def _train(self, stop: StopRequest) -> bool:
        self.state = ServedState(
            *(self.config, self.model_name, self.model, self.stripes, self.replica, self.policy),
            self.rules.barrier,
            self.clipping,
            self.at,
            self.inner,
        )
        graceful = False
        try:
            if not self._join():
                graceful = True
                return False
            if self.stages is not None:
                self.stages.engine.go_on_from(self.at.own_steps)
            self._saved = self._progress_made() if self.at.resumed_from is not None else None
            self._test_saved = self._last_test
            self.info = self._describe()
            with contextlib.closing(self._open_learner()):
                stopped = super()._train(stop)
            graceful = True
            return stopped
        except BaseException as error:
            record_failure(error, debug=self.config.debug)  # before the peers notice that this worker is gone
            raise
        finally:
            self.state.links.close(graceful=graceful)
            for trainer in (self.inner, self.stages):
                if trainer is not None:
                    trainer.close()

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

    def _open_learner(self) -> Pusher:
        config, links, took = self.config, self.state.links, self.state.take_weights
        if self.inner is not None:
            outer = OuterLearner(self.model, links, timeout=config.timeout, took=took)
            place = self.place.rank, self.total, self.per_epoch
            self.outer = OuterWorker(self.inner, outer, config, *place)
            self._forward = self.inner.engine.pipeline.forwards[0]
            return outer
        if self.stages is not None:
            self.learner = StageLearner(self.stages, self.replica, links, barrier=self.rules.barrier, took=took)
            return self.learner
        learner = Learner(
            self.model,
            self.loss,
            links,
            barrier=self.rules.barrier,
            context=self._autocast,
            loss_scale=self.state.loss_scale,
            guard=config.guard,
            compiled=config.compile,
            clipping=self.clipping,
            took=took,
        )
        self._forward, self.learner = learner.forward, learner
        return learner

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.config.amp, self.device)

    def _learn(self, batch: Batch, data_ms: float, stop: bool) -> Exchanged | None:
        """One step of this worker; what the servers answered, if it ended with an exchange."""
        ahead = 0 if self.outer is None else self.outer.steps
        rate = rate_factor(min(self.at.step + ahead, self.total - 1), self.total, self.per_epoch, self.config)
        rate *= self.state.lowered
        wanted: dict[str, Any] = {"stop": stop, "save": self._is_save_due() or self._save_asked}
        wanted["lowered"] = self.state.tells
        micro_batches = self._mixed(batch.micro_batches)
        if self.outer is not None:
            noted: dict[str, Any] = {"timings": self.timings, "data_ms": data_ms}
            return self.outer.step(micro_batches, batch, self.at.step, rate=rate, wanted=wanted, **noted)
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
            if result is None:
                continue
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
        """End a training in which nothing but bad gradients comes, as `hybridpar.train.step_result.BadSteps` does.

        Raises:
            TrainingError: There were `MAX_BAD_STEPS` in a row, and before them as many as a loss scale may fall.
        """
        self._bad = 0 if result.applied or result.done or not self.config.guard else self._bad + 1
        if self._bad >= MAX_BAD_STEPS + (FALLS if self.state.loss_scale is not None else 0):
            raise TrainingError(
                f"loss or gradients were not finite in {self._bad} steps in a row, up to step {result.step}",
                "After so many training stops.",
                "Lower --lr, or lengthen --warmup-epochs; the last checkpoint is from before.",
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
            record = step_record(row, result, data_ms, self.per_epoch, self.config.lr)
            self._note_step(record, "did not count a gradient that was not finite")

    def _end_of_step(self, before: int, result: Exchanged) -> None:
        """Test and save where an epoch, or the run, has ended between two answers."""
        step, barrier = result.step, self.rules.barrier
        ended = step // self.per_epoch > before // self.per_epoch
        if (ended or result.done) and (barrier or self.place.learner == 0):
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
        with self._testing() as forward, self._autocast():
            own = Evaluation(0.0, 0.0, 0)
            if len(self.test):
                own = evaluate(forward, self.loss.of_scores, self.test, World(device=self.device))
        if not self.rules.barrier and self.place.positions == 1:
            return own
        sums = [own.accuracy * own.samples, own.loss * own.samples, own.samples]
        if self.rules.barrier:
            _, items = self.state.meet(f"{occasion}/0", sums)
        else:
            items = self.replica.world.gather(sums)
        right, loss, samples = (sum(values) for values in zip(*items, strict=True))
        return Evaluation(right / samples, loss / samples, samples)

    def _testing(self) -> AbstractContextManager[Callable[..., Any]]:
        """The model in evaluation mode, as something to call; a collective of the workers of a replica."""
        if self.stages is not None:
            return self.stages.engine.evaluating()
        self.model.eval()
        return contextlib.nullcontext(self._forward)

    def _evaluate_average(self, occasion: str) -> Evaluation | None:
        """The result of the moving average (`--model-ema`), if one is kept."""
        if self.state.average is None:
            return None
        with self.state.average.applied():
            return self._evaluate(occasion)

    def _save(self, occasion: str, *, wanted: bool = True) -> None:
        """Write a checkpoint if worker 0 has something to save; all workers come here on the same occasion."""
        states = None
        if self.stages is not None:  # the model of a checkpoint is whole
            self.stages.engine.synchronize_buffers()
        if self.place.learner == 0 and self.replica.world.from_main(lambda: wanted and self._may_save(self.at.step)):
            states, rows = self.state.snapshot()
        if states is not None:
            self._write_late(rows)
            # Without a barrier the best result is saved some steps after its test.
            test = self._last_test
            if test is not None and test != self._test_saved and test in self.keep_rule.best(self.at.tested):
                self.at.tested[-1] = replace(test, step=int(states[0]["taken"]) // self.place.learners)
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

    def _write_late(self, rows: list[dict[str, Any]]) -> None:
        """Steps that ended since the last answer."""
        if rows and self._latest is not None:
            self.at.step = int(rows[-1]["step"])
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
        _, answers = self.state.meet("finish/0", noted)
        if self.place.learner:
            return
        states, _ = self.state.snapshot()
        if states is None:
            return
        summary = self._summary(stopped)
        whole = self.at.resumed_from is None
        summary |= measured_fields(
            answers,
            [[*range(one, self.place.workers, self.place.learners)] for one in range(self.place.learners)],
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
