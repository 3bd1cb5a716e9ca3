"""`hybridpar train` on one worker: joins the others, opens the run, trains epoch by epoch, and reports.

Every worker runs the same program; rank 0 alone writes files (except for its peers' parts of a checkpoint) and prints.
`opening.py` opens a run, its parts (`part.py`) look at the steps, and `reporting.py` reports on it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from functools import partial

from hybridpar.comm.flight import FLIGHT, noted, outside
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.data import Batch
from hybridpar.machine.launch import StopRequest, record_failure
from hybridpar.observe.progress import open_progress
from hybridpar.observe.records import EpochRecord
from hybridpar.run.data import with_images_of_model
from hybridpar.run.directory import before_the_start
from hybridpar.run.opening import begin, join, open_run, recall
from hybridpar.run.part import Run
from hybridpar.run.reporting import close_run, opening_lines
from hybridpar.run.timings import Step, measured_step
from hybridpar.run.worker import describe_worker, tune_worker
from hybridpar.train.results import StepResult


def run_training(config: TrainConfig, model_name: str) -> int:
    """Train on this worker until the run is finished or interrupted."""
    config.check()
    with contextlib.ExitStack() as job:
        try:
            if (world := join(config, model_name, job)) is None:  # this was a server
                return 0
            config, changes = world.from_main(partial(recall, config, model_name))
            config = with_images_of_model(config, model_name)
            tune_worker(config, world if config.parameter_servers is None else World(device=world.device))
            with contextlib.closing(open_progress(shown=world.is_main)) as progress:
                notes = [*describe_worker(config), *changes]
                run = Run(config=config, model_name=model_name, world=world, progress=progress, notes=notes)
                with before_the_start():
                    open_run(run)
                with run.trainer:
                    with before_the_start():
                        has_steps = begin(run)
                    code = train(run) if has_steps else 0
            FLIGHT.close()  # after an error it stays, for `hybridpar doctor --hang`
            return code
        except BaseException as error:
            record_failure(error, debug=config.debug)  # before the peers notice that this worker is gone
            raise


def train(run: Run) -> int:
    """Train to the end, or until a signal; show the run, and report. The exit code."""
    stop = StopRequest(says=run.world.is_main)
    try:
        with contextlib.ExitStack() as stack:
            for part in run.parts:
                stack.callback(part.close, run)
                part.start(run)
            run.progress.start(opening_lines(run), epochs=run.epochs, steps=run.total)
            train_epochs(run, stop)
            run.ending = "interrupted" if run.stopping else "finished"
        run.progress.close()
        close_run(run)
    finally:
        stop.release()
    # A launcher has received the signal too, and would take another code than 0 for a failure.
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    return 128 + stop.signal if run.stopping and stop.signal is not None and not launched else 0


def train_epochs(run: Run, stop: StopRequest) -> None:
    """Train and test all epochs, as far as nobody stops the run."""
    state = run.state
    endless = run.samples.endless(state) if run.trainer.independent else None
    for epoch in range(state.epoch, run.epochs):
        if epoch < state.epoch:  # other workers have done it meanwhile
            continue
        if run.over is not None:
            run.progress.message(run.over)
            break
        state.began = time.monotonic()
        for part in run.parts:
            part.begin_epoch(run, epoch)
        for step in train_steps(run, epoch, endless or run.samples.epoch(epoch, state), stop):
            run.stopping |= step.result.outcome.stop
            run.timings.add(step.record, step.spans if step.result.staged else None)
            run.note(run.trainer.records(step.record, run.progress.warn))
            for part in run.parts:
                part.step(run, step)
        if run.stopping or (run.trainer.leads and end_epoch(run, epoch)):
            break
    if run.stopping:
        run.checkpoints.save(run)
    with run.clock.away():
        for part in run.parts:
            part.finish(run)


def train_steps(run: Run, epoch: int, batches: Iterator[Batch], stop: StopRequest) -> Iterator[Step]:
    """The steps of an epoch. A request to stop or to save takes effect after those that are queued by then."""
    trainer, queued = run.trainer, deque[tuple[StepResult, float]]()
    while trainer.steps_done < run.total and not run.stopping and run.state.epoch <= epoch:
        asked = time.perf_counter()
        with outside("waiting for the next batch"):
            batch = next(batches, None)
        if batch is None:
            break
        data_ms = (time.perf_counter() - asked) * 1e3
        for part in run.parts:
            part.begin_step(run)
        with noted(f"step {trainer.steps_done + 1}"):
            result = trainer.step(batch, stop=stop.wanted, save=run.checkpoints.wanted)
        queued.append((result, data_ms))
        run.state.epoch_step += 1
        run.find_position()
        # A checkpoint has all that was issued.
        while queued and (len(queued) > trainer.lookahead or run.checkpoints.due):
            yield measured_step(*queued.popleft(), epoch, run.clock)
        if run.checkpoints.due:
            run.checkpoints.save(run)
    while queued:
        yield measured_step(*queued.popleft(), epoch, run.clock)
    if run.checkpoints.due:
        run.checkpoints.save(run)


def test(run: Run, epoch: int, *, last: bool) -> dict[str, float]:
    """Accuracy and loss of the model, and of its moving average where there is one; nothing before it is time."""
    trainer, every = run.trainer, run.config.test_every
    ended = max(epoch + 1, run.state.epoch)  # other workers may have done more meanwhile
    # A run that ended within this epoch was tested there, and not after it.
    before = [end.epoch + 1 for end in run.state.tested if end.test_accuracy is not None and end.epoch < epoch]
    if ended // every == max(before, default=0) // every and not last:
        return {}
    with run.clock.away(), outside("testing"):
        of_model = trainer.evaluate(run.samples.test)
        figures = {"test_accuracy": of_model.accuracy, "test_loss": of_model.loss}
        if run.config.model_ema is not None:
            with trainer.averaged():
                of_average = trainer.evaluate(run.samples.test)
            figures |= {"ema_test_accuracy": of_average.accuracy, "ema_test_loss": of_average.loss}
    if (tested := of_model.samples) < (total := run.samples.test.total):
        run.progress.warn(f"the accuracy is over {tested:,} of {total:,} test images: the others cannot be read")
    return figures


def end_epoch(run: Run, epoch: int) -> bool:
    """Test at the end of an epoch, or of the run within it; whether that was the last one."""
    state, trainer = run.state, run.trainer
    last = epoch == run.epochs - 1 or trainer.steps_done >= run.total
    figures = test(run, epoch, last=last)
    if trainer.independent:  # the answer to a push may tell of steps past the end of an epoch
        epoch, ended = (run.epochs if last else state.epoch) - 1, state.epoch > epoch
    elif ended := state.epoch_step >= run.samples.per_epoch:  # --steps may end within an epoch
        state.epoch, state.epoch_step = epoch + 1, 0
    if ended and figures:
        trainer.note_metric(figures["test_accuracy"])
    end = EpochRecord(epoch, trainer.steps_done, train_loss=state.losses.value, seconds=state.elapsed, **figures)
    state.end_epoch(end)
    for part in run.parts:
        part.epoch(run, end, last=last)
    return last
