"""Jobs of several real processes: what happens to them when one dies, when the user stops them, when they cannot run.

A job takes seconds to start, so there are few tests, and each looks at everything it can.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hybridpar.errors import DataError, nearest
from hybridpar.machine import launch
from hybridpar.machine.launch import SIGNALS, StopRequest, error_text, record_failure
from hybridpar.train.checkpoint import load_checkpoint
from tests.ranks import run_ranks
from tests.runs import assert_same_state, check_run, command, small_arguments, train_rank
from tests.waiting import eventually

#: How long a test waits for a job on a busy machine before it gives up.
PATIENCE = 150


class Job:
    """A running command, and all processes that descend from it, found by a mark in their environment."""

    def __init__(self, arguments: list[str], **options: object) -> None:
        self._mark = f"MARK_OF_A_TEST={uuid.uuid4()}"
        name, value = self._mark.split("=")
        self.process: subprocess.Popen[str] = command(arguments, **{name: value}, **options)

    def finish(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        output, error = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, output, error

    def members(self) -> list[int]:
        """Living processes of the job."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                if alive and self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def kill(self) -> None:
        for member in self.members():
            try:
                os.kill(member, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Start jobs; whatever is left of them at the end of the test is killed."""
    jobs: list[Job] = []

    def run(arguments: list[str], **options: object) -> Job:
        jobs.append(Job(arguments, **options))
        return jobs[-1]

    yield run
    for job in jobs:
        job.kill()


def wait_for_steps(job: Job, run_dir: Path, steps: int = 3) -> None:
    """Until the job has trained for some steps; fails if it ends before."""

    def trained() -> bool:
        assert job.process.poll() is None, job.process.communicate()[1]
        metrics = run_dir / "metrics.jsonl"
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= steps

    eventually(trained, PATIENCE)


def left_memory() -> set[str]:
    """Shared memory that no living process has; that of other tests lives as long as they like."""
    maps = ""
    for process in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            maps += process.read_text(errors="replace")
    return {path.name for path in Path("/dev/shm").glob("*") if f"{path}\n" not in maps}


#: Without a plan, so that it computes the same bits as a short run, which is not planned.
ENDLESS = ("--epochs=100000", "--lr-schedule=constant:warmup=0", "--checkpoints=never", "--plan=none")


# ------------------------------------------------------------------------------------------------------ whole jobs


def test_a_worker_killed_in_mid_step_costs_nothing_but_time(start, tmp_path):
    before = left_memory()
    arguments = small_arguments(tmp_path / "job", "--checkpoints=4", "--nproc=2", model="tests.small_nets:dropping")
    # The ninth forward pass is in step 9, after the checkpoint of step 8.
    code, output, error = start(arguments, SMALL_NET_FAULT="KILL@1:9").finish()
    assert code == 0, error
    assert "a worker died; all workers were restarted and go on from step 8" in output
    summary = check_run(tmp_path / "job", steps=12)
    assert summary["workers"] == 2
    assert summary["resumed_from"] == 8
    run_ranks(train_rank, 2, tmp_path / "straight", "dropping", None, {})
    assert_same_state(tmp_path / "straight", tmp_path / "job")
    eventually(lambda: not left_memory() - before)


def test_ctrl_c_saves_and_torchrun_goes_on(start, tmp_path):
    job = start(small_arguments(tmp_path / "job", *ENDLESS, "--nproc=2", model="tests.small_nets:dropping"))
    wait_for_steps(job, tmp_path / "job")
    job.process.send_signal(signal.SIGINT)
    code, output, error = job.finish()
    assert code == 130
    assert "Traceback" not in error
    assert "--resume goes on from there" in output
    assert not job.members()
    stopped = check_run(tmp_path / "job", ended="interrupted")["steps"]
    assert load_checkpoint(tmp_path / "job").step == stopped

    options = {"lr_schedule": "constant:warmup=0", "checkpoints": "epoch", "steps": stopped + 4}
    rest = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    job = start(
        small_arguments(tmp_path / "job", *rest, "--resume", model="tests.small_nets:dropping"),
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "hybridpar"),
        OMP_NUM_THREADS="1",
    )
    code, output, error = job.finish()
    assert code == 0, error
    summary = check_run(tmp_path / "job", steps=stopped + 4)
    assert (summary["workers"], summary["resumed_from"]) == (2, stopped)
    run_ranks(train_rank, 2, tmp_path / "straight", "dropping", None, options)
    assert_same_state(tmp_path / "straight", tmp_path / "job")


def test_a_second_ctrl_c_stops_a_job_that_cannot_end_its_step(start, tmp_path):
    """Worker 1 is stopped in its fourth step, so worker 0 waits for it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    job = start(
        small_arguments(tmp_path / "job", *ENDLESS, "--nproc=2"), SMALL_NET_FAULT="STOP@1:4", TMPDIR=str(temporary)
    )
    wait_for_steps(job, tmp_path / "job")
    job.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(1)  # the first one waits for the step
    job.process.send_signal(signal.SIGINT)
    code, _, error = job.finish()
    assert code == 130
    assert error == "stopping after this step, and saving; a second Ctrl-C stops at once\ninterrupted\n"
    assert not job.members()
    assert not list(temporary.iterdir()), "nothing stays behind"


def test_a_job_whose_launcher_is_killed_saves_and_leaves_no_process(start, tmp_path):
    job = start(small_arguments(tmp_path / "job", *ENDLESS, "--nproc=2"))
    wait_for_steps(job, tmp_path / "job")
    job.process.send_signal(signal.SIGKILL)
    code, _, error = job.finish()
    assert code == -signal.SIGKILL
    assert "Traceback" not in error
    eventually(lambda: not job.members())
    stopped = check_run(tmp_path / "job", ended="interrupted")["steps"]
    assert load_checkpoint(tmp_path / "job").step == stopped


def test_an_error_of_all_workers_is_told_once(start, tmp_path):
    job = start(small_arguments(tmp_path / "job", "--nproc=2", model="resnet19"))
    code, _, error = job.finish()
    assert code == 2
    assert error.count("unknown model 'resnet19'") == 1
    assert error.startswith("error: unknown model 'resnet19'\nDid you mean resnet18")
    assert "Traceback" not in error
    assert not job.members()


# ------------------------------------------------------------------------------------------------------------- parts


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    place = tmp_path / "verdict.json"
    monkeypatch.setenv(launch.VERDICT_VARIABLE, str(place))
    return place


def test_a_bug_is_told_with_its_traceback_and_a_users_error_without(verdict):
    def fail(error: Exception) -> Exception:
        try:
            raise error
        except Exception as raised:
            return raised

    assert error_text(fail(DataError("x")), debug=False) == "error: x"
    assert "Traceback" in error_text(fail(DataError("x")), debug=True)
    bug = error_text(package_fault(), debug=False)
    assert "Traceback" in bug
    assert "difflib" in bug
    record_failure(fail(KeyError("x")), debug=False)
    assert json.loads(verdict.read_text())["code"] == 1


def package_fault() -> Exception:
    try:
        nearest(3, ["a"])  # type: ignore[arg-type]
    except Exception as raised:
        return raised
    raise AssertionError


@pytest.mark.parametrize("first", SIGNALS)
def test_a_signal_is_a_wish_and_a_second_ctrl_c_an_order(first):
    handlers = [signal.getsignal(one) for one in SIGNALS]
    stop = StopRequest()
    try:
        assert not stop.wanted
        for number in (first, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert stop.wanted
            assert stop.signal == first
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        stop.release()
    assert [signal.getsignal(one) for one in SIGNALS] == handlers


#: A process of its own, because this one may have imported the compiler.
WITHOUT_COMPILER = """
import sys
from hybridpar.machine.launch import import_torchvision
import_torchvision()
import torch
import torchvision
import hybridpar.run.run
from hybridpar.models.state import DispatchMode
class Counts(DispatchMode):
    calls = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))
with Counts() as mode:
    torch.zeros(2).add(1)
assert mode.calls == 2
for kind in (torch.optim.SGD, torch.optim.AdamW):
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.ones(2)
    kind([weight], lr=0.5, weight_decay=0.0).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.5, -0.5]))
assert "torch._dynamo" not in sys.modules and "torchvision.transforms.v2" in sys.modules
boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
torchvision.ops.roi_align(torch.ones(1, 1, 4, 4), [boxes], 2)
added = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
assert float(added(torch.zeros(()))) == 1.0
assert torch._dynamo.utils.counters
with mode:
    torch.zeros(2).add(1)
assert mode.calls == 4
"""


def test_a_run_is_imported_without_the_compiler_which_can_be_used_all_the_same():
    with command(["-c", WITHOUT_COMPILER], launcher=()) as process:
        said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
