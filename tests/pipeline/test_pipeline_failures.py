"""What happens to the others when a worker of a pipeline dies, stalls or fails; and what a thousand steps leave."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.errors import TrainingError
from hybridpar.lanes import Lanes
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.schedule.layout import Layout
from tests.pipeline.oracle import (
    Residuals,
    Setting,
    batches_of,
    cut,
    images,
    options_of,
    places,
    run_step,
    seeded,
    sgd,
    step_optimizer,
    train_stages,
    with_sync,
)
from tests.ranks import start_processes

PATIENCE = 2.0  # seconds after which a silent peer is an error
DEADLINE = 90.0  # for the whole of a test, mostly starting processes


class Misbehaves(nn.Module):
    """Does something bad in its n-th training forward pass. Looks at its data, so that the tracer keeps it whole."""

    def __init__(self, fault: str, when: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.fault = fault
        self.when = when
        self.calls = 0
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        if bool(torch.isinf(x.detach()).any()):
            raise FloatingPointError("overflow")
        self.calls += self.armed
        if self.calls == self.when:
            self.calls += 1
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "stall":
                time.sleep(DEADLINE)
            if self.fault == "raise":
                raise ZeroDivisionError("one of these days")
        return x * self.weight


class Faulty(nn.Module):
    def __init__(self, fault: str, when: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.fault = Misbehaves(fault, when)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fault(torch.relu(self.second(torch.relu(self.first(x))))).mean((2, 3)))


def run_worker(rank: int, directory: str, shared: bool, fault: str, answers: Any) -> None:
    size = stages = 2
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    model = seeded(lambda: Faulty(fault, 3))  # micro-batch 2 of the second step
    parts = cut(model, images(2)[0], stages)
    dist.barrier()  # on a busy machine one of them may be seconds later so far, which is more than the patience below
    world = World.join(timeout=PATIENCE, shared_memory=shared)
    owner = next(part.index for part in parts if any(isinstance(one, Misbehaves) for one in part.modules()))
    assert owner == stages - 1
    answer = "no error"
    try:
        with Lanes("cpu") as lanes:
            layout = Layout.dealt(stages, stages, replicas=size // stages)
            options = options_of(layout, 4)
            engine = PipelineEngine(model, parts, world, lanes, F.cross_entropy, _no_step, options, 4)
            outcome = None
            for batch in batches_of(8, 4):
                if outcome is not None:
                    model.fault.armed = rank == size - 1  # not in example runs
                outcome = run_step(engine, Setting().of_replica(batch, 0), 8 * size // stages)
                outcome.wait()
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", []))
    answers.put((rank, answer))
    answers.close()
    answers.join_thread()
    os._exit(0)  # groups with dead peers may not end


def _no_step(stage: nn.Module) -> Any:
    return lambda factor, commit, pieces: None


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("fault", ["kill", "stall", "raise"])
def test_the_others_end_in_time_and_say_what_they_waited_for(fault: str, shared: bool) -> None:
    wanted = 2 if fault == "raise" else 1
    with start_processes(run_worker, 2, shared, fault) as answers:
        # One that stalls does so for as long, so nobody has waited for its end.
        given = dict(answers.get(timeout=DEADLINE) for _ in range(wanted))
    text = given[0]
    assert text.startswith("SyncError"), text
    assert "worker 0 of 2" in text
    # The peer fails before it hands back the gradients of micro-batch 1 or 2; which, is a race.
    waiting = r"waiting in stage 0 for gradients of micro-batch [0-3] from stage 1"
    sending = r"sending activations of micro-batch [0-3] from stage 0 to stage 1"
    assert re.search(f"{waiting}|{sending}", text), text
    if fault == "raise":
        assert given[1].startswith("ZeroDivisionError") or "one of these days" in given[1], given[1]


class TestErrorsOfOneWorker:
    """What goes wrong on a lane comes to the host as it was, and nothing hangs."""

    def test_an_error_in_a_stage(self) -> None:
        model = seeded(lambda: Faulty("raise", 3))
        parts = cut(model, images(2)[0], 3)
        model.fault.armed = True
        with pytest.raises(ZeroDivisionError, match="one of these days") as info:
            train_stages(model, parts, batches_of(8), Setting(), places(3), schedule="gpipe", together=True)
        assert any("on lane 'compute" in note for note in info.value.__notes__)

    def test_no_step_follows_what_some_stages_have_done(self) -> None:
        def step_of(stage: Any) -> Any:
            return lambda factor, commit, pieces: 1 / stage.index  # the first stage's optimizer fails

        model = seeded(Residuals)
        batch = Setting().of_replica(batches_of(8)[0], 0)
        with Lanes("cpu") as lanes:
            parts = cut(model, images(4)[0], 2)
            engine = PipelineEngine(model, parts, World(), lanes, F.cross_entropy, step_of, options_of(places(2), 2), 2)
            with pytest.raises(ZeroDivisionError):
                run_step(engine, batch, 8).wait()
            for _ in range(2):
                with pytest.raises(TrainingError, match="ended by the error of step 1: division by zero"):
                    run_step(engine, batch, 8)
            with pytest.raises(TrainingError):
                engine.close()

    def test_an_error_of_the_model_is_not_told_as_a_peers(self) -> None:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            calls.append(1)
            return F.cross_entropy(output, target if len(calls) < 4 else target[:1])

        calls: list[int] = []
        model = seeded(Residuals)
        parts = cut(model, images(2)[0], 2)
        with pytest.raises(ValueError, match="batch_size"):
            train_stages(model, parts, batches_of(8), Setting(loss=loss), places(2), schedule="gpipe")

    def test_lack_of_memory_names_stage_and_micro_batch(self) -> None:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 4:  # the first was the example run's
                raise torch.OutOfMemoryError("no more")
            return F.cross_entropy(output, target)

        calls: list[int] = []
        model = seeded(Residuals)
        parts = cut(model, images(2)[0], 2)
        with pytest.raises(TrainingError, match="stage 1 ran out of memory on cpu in 1F2") as info:
            train_stages(model, parts, batches_of(8), Setting(loss=loss), places(2), schedule="gpipe")
        assert "--recompute 1" in str(info.value)


# ----------------------------------------------------------------- a long run


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def tensors_alive() -> int:
    gc.collect()
    return sum(isinstance(one, Tensor) for one in gc.get_objects())


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_thousand_steps_leave_nothing() -> None:
    model = seeded(Tiny)
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    parts = cut(model, x[:3], 2)
    optimizers = [sgd(part) for part in parts]
    before = (threading.active_count(), open_files())
    with Lanes("cpu") as lanes:
        options = options_of(places(2), 2, recompute=(1,))
        engine = PipelineEngine(
            model, parts, World(), lanes, F.cross_entropy, lambda part: _stepper(optimizers[part.index]), options, 2
        )
        seen = []
        for number in range(1, 1001):
            outcome = run_step(engine, [(x[:3], y[:3]), (x[3:], y[3:])], 6)
            if number in (100, 1000):
                engine.wait()
                del outcome
                seen.append((tensors_alive(), rss_bytes(), threading.active_count(), open_files()))
        early, late = seen
        assert late[0] <= early[0]  # what earlier tests left behind may go meanwhile
        assert late[1] < early[1] + 16e6
        assert late[2:] == early[2:]
        engine.close()
    assert (threading.active_count(), open_files()) == before


def _stepper(optimizer: torch.optim.Optimizer) -> Any:
    return lambda factor, commit, unwritten: step_optimizer(optimizer, unwritten)


def test_outcomes_that_are_kept_keep_no_batch() -> None:
    model = seeded(Residuals)
    outcomes: list[Any] = []
    batches: list[weakref.ref[Tensor]] = []
    parts = cut(model, images(2)[0], 2)
    with Lanes("cpu") as lanes:
        options = options_of(places(2), 2)
        engine = PipelineEngine(model, parts, World(), lanes, F.cross_entropy, _no_step, options, 2)
        for step in range(4):
            x, y = images(8, seed=step)
            batches.append(weakref.ref(x))
            outcomes.append(run_step(engine, list(zip(x.chunk(2), y.chunk(2), strict=True)), 8))
        engine.wait()
        del x
        gc.collect()
        assert [reference() is None for reference in batches] == [True] * 4
        assert all(outcome.loss > 0 and outcome.spans.spans for outcome in outcomes)
        engine.close()


def test_closing_gives_the_model_back() -> None:
    model = seeded(Residuals)
    parts = cut(model, images(2)[0], 2)
    train_stages(model, parts, batches_of(8), with_sync(Setting()), places(2))
    assert all(type(module) is nn.BatchNorm2d for module in model.norms)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    references = [weakref.ref(part) for part in parts]
    del parts
    gc.collect()
    assert all(reference() is None for reference in references)


def test_closing_waits_for_the_step_that_runs() -> None:
    def slow_loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(0.1)
        return F.cross_entropy(output, target)

    model = seeded(Residuals)
    x, y = images(8)
    parts = cut(model, x[:4], 2)
    with Lanes("cpu") as lanes:
        stepped: list[int] = []
        engine = PipelineEngine(
            *(model, parts, World(), lanes, slow_loss),
            lambda part: lambda factor, commit, pieces: stepped.append(part.index),
            options_of(places(2), 2),
            2,
        )
        run_step(engine, [(x[:4], y[:4]), (x[4:], y[4:])], 8)
        engine.close()
        assert sorted(stepped) == [0, 1]
        engine.close()
    assert all(type(module) is nn.BatchNorm2d for module in model.norms)
