"""Starts the workers of a job on this machine, restarts them after a crash, and reports how the job ended.

Workers are started by torch's elastic launcher with the c10d rendezvous. (Its static rendezvous hands restarted
workers the addresses of the dead attempt.) A worker that the system kills - signal 9, out of memory - makes the
launcher restart all of them, and they go on from the last whole checkpoint. An error that would only come again is
not worth a restart: the worker leaves a *verdict*, a file with the message and the exit code, all workers end, and
this process reports the verdict once.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from hybridpar.errors import HybridparError, LaunchError, SyncError, UsageError, shortened, user_frames
from hybridpar.machine.process import available_cores, threads_per_worker, tune_this_process, usable_memory

VERDICT_VARIABLE = "HYBRIDPAR_VERDICT"
#: The file beside the verdict by which a worker says that it has told how the run ended.
_TOLD = "told"

#: Processes of a job that a core may have; so many already take minutes to start.
MOST_PER_CORE = 8
#: Main memory that a process needs for itself at least, before it has a model.
LEAST_BYTES = 150 << 20

#: Seconds that workers have after Ctrl-C or SIGTERM to end their step and save; those that have nothing to save.
STOP_SECONDS, LEAVE_SECONDS = 60, 5
#: Seconds that workers have after a second Ctrl-C.
KILL_SECONDS = 1


def in_job() -> bool:
    """Whether this process is a worker that some launcher started."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def launched_here() -> bool:
    """Whether our own launcher started this worker."""
    return VERDICT_VARIABLE in os.environ


def check_processes(workers: int, servers: int = 0) -> None:
    """Refuse to start more processes than the machine has cores and memory for.

    Args:
        workers: Workers of a job on this machine.
        servers: Its server processes.

    Raises:
        UsageError: There are too many.
    """
    cores = len(available_cores())
    most = max(2, min(MOST_PER_CORE * cores, usable_memory() // LEAST_BYTES))
    if workers + servers > most:
        given = f"--workers {workers}" + (f" and --servers {servers}" if servers else "")
        raise UsageError(
            f"{given} on one machine",
            f"Each is a process of {LEAST_BYTES >> 20} MiB at least, and there are at most {MOST_PER_CORE} per core: "
            f"with {cores} core(s) and {usable_memory() >> 30} GiB no more than {most}.",
            "Start fewer.",
        )


def launch_workers(arguments: Sequence[str], workers: int, *, restarts: int = 3, patience: int = STOP_SECONDS) -> int:
    """Run `python -m hybridpar ARGUMENTS` as `workers` local workers until they end.

    Args:
        arguments: Command line of every worker.
        workers: Number of workers, at least 2.
        restarts: How often dying workers are restarted.
        patience: Seconds that workers have to leave after Ctrl-C or SIGTERM.

    Returns:
        The exit code: 0, what the verdict says, 1 when no restarts are left, or 128 + the signal that stopped the job.

    Raises:
        UsageError: More workers than this machine has room for.
    """
    check_processes(workers)
    # Each with torch's default, all cores, they would be in each other's way; also where they do not tune themselves.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_worker(workers, available_cores())))

    with leaving_at_once():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:  # each of them has a level of its own
        if name.startswith("torch.distributed."):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Torch's handler of a second Ctrl-C would wait for the workers once more; of these two signals ours take care.
    options = {"shutdown_timeout": patience, "signals_to_handle": "SIGHUP,SIGQUIT"}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as directory:
        verdict = Path(directory) / "verdict.json"
        os.environ[VERDICT_VARIABLE] = str(verdict)
        signals = _LauncherSignals(SignalException)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=f"hybridpar-{os.getpid()}-{os.urandom(4).hex()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=restarts,
            monitor_interval=0.1,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=directory),  # else they stay in the temporary directory
            **{name: value for name, value in options.items() if name in known},  # type: ignore[arg-type]
        )
        try:
            elastic_launch(config, sys.executable)("-m", "hybridpar", *arguments)
        except SignalException as stopped:
            tell_interrupted(verdict)
            return 128 + int(stopped.sigval)
        except ChildFailedError as error:
            if verdict.exists():
                return report_verdict(verdict)
            first = error.get_first_failure()[1]
            cause = f"was killed by signal {-first.exitcode}" if first.exitcode < 0 else f"exited with {first.exitcode}"
            print(
                f"error: worker {first.local_rank} {cause}, and {restarts} restarts are used up\n"
                "Every restart went on from the last whole checkpoint.\n"
                "Look at the messages above; `dmesg` tells whether the system ran out of memory.",
                file=sys.stderr,
            )
            return 1
        finally:
            signals.release()
            os.environ.pop(VERDICT_VARIABLE, None)
        return report_verdict(verdict) if verdict.exists() else 0


class _LauncherSignals:
    """What SIGINT and SIGTERM do in the launcher, whose workers are in process groups of their own.

    The first one is raised as torch's exception, so that its agent passes it on and waits for the workers. A second
    Ctrl-C has them leave at once, and kills those that have not after `KILL_SECONDS`, or at a third.
    """

    def __init__(self, exception: Callable[[str, signal.Signals], Exception]) -> None:
        self._exception = exception
        self._count = 0
        handlers = {signal.SIGINT: self._note, signal.SIGTERM: self._note, signal.SIGALRM: self._kill}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._count and number != signal.SIGINT:
            return
        self._count += 1
        if self._count == 1:
            raise self._exception(f"stopped by signal {number}", signal.Signals(number))
        if self._count > 2:
            self._kill(number, frame)
            return
        _signal_children(signal.SIGINT)
        signal.setitimer(signal.ITIMER_REAL, KILL_SECONDS)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        _signal_children(signal.SIGKILL)
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # the cursor, which a killed worker's display has hidden

    def release(self) -> None:
        """Put the handlers back that were there before."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _signal_children(number: int) -> None:
    """Send a signal to the process groups of this process's children, where /proc tells who they are."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ProcessLookupError):
            # PID (NAME) STATE PARENT GROUP ...; the name may have spaces and brackets in it.
            _, parent, group = entry.read_text().rpartition(")")[2].split()[:3]
            if int(parent) == os.getpid() and int(group) != os.getpgrp():
                os.killpg(int(group), number)


def tell_interrupted(verdict: Path | None = None) -> None:
    """Say that the job was interrupted, once for all of its processes.

    Args:
        verdict: Where its workers leave verdicts, in the launcher; a worker that ended in an orderly way has told.
    """
    worker = VERDICT_VARIABLE in os.environ if verdict is None else verdict.with_name(_TOLD).exists()
    if not worker and os.environ.get("RANK", "0") == "0":
        print("interrupted", file=sys.stderr, flush=True)


def note_orderly_end() -> None:
    """Have our launcher know that this worker has told how the run ended."""
    if VERDICT_VARIABLE in os.environ:
        Path(os.environ[VERDICT_VARIABLE]).with_name(_TOLD).touch()


def prepare_worker(tune: bool) -> None:
    """Set up this process as a worker, before it imports torch: allocator, threads, and its end with the launcher's.

    Args:
        tune: Whether a CPU worker gets the allocator and thread settings for training; it may be started again for it.
    """
    from hybridpar.machine.cluster import has_gpu

    if tune and not has_gpu():
        tune_this_process(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if VERDICT_VARIABLE in os.environ and sys.platform == "linux":
        # The system sends SIGTERM when the main thread of our launcher ends, which started this worker.
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Context in which Ctrl-C ends this process on the spot.

    For imports: they take seconds, there is nothing to save yet, and a `KeyboardInterrupt` raised inside a callback of
    an import is lost.
    """
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    tell_interrupted()
    os._exit(128 + number)


def error_text(error: BaseException, debug: bool) -> str:
    """The text printed for an error: value, rule, what to do; with the traceback on request, or if it is a bug.

    Of an exception that the user's own code raised, for instance a model in its forward pass, only the frames of that
    code are shown.

    Args:
        error: What ended the process.
        debug: Print the traceback in any case.

    Returns:
        The text.
    """
    if isinstance(error, HybridparError) and not debug:
        return f"error: {error}"
    if not debug and (frames := user_frames(error, packages=False)):
        raised = shortened("".join(traceback.format_exception_only(error)).strip(), 800)
        hint = "It was raised by the code above, which is not hybridpar's; --debug shows the whole traceback."
        return "\n".join([*frames, f"error: {raised}", hint])
    return "".join(traceback.format_exception(error)) + f"error: {error}"


def record_failure(error: BaseException, *, debug: bool) -> bool:
    """Write the verdict of a worker that would fail in the same way again.

    It must be written before the worker leaves its peers, who are to find it when they notice.

    Args:
        error: What ended the worker. A peer that was lost, or not found, gets no verdict: that is worth a restart. Nor
            does Ctrl-C, of which the launcher knows.
        debug: Add the traceback.

    Returns:
        Whether a launcher of ours will report the error, so that this worker can stay silent.
    """
    place = os.environ.get(VERDICT_VARIABLE)
    if place is None or isinstance(error, (SyncError, LaunchError, KeyboardInterrupt)):
        return False
    code = error.exit_code if isinstance(error, HybridparError) else 1
    aside = f"{place}.{os.getpid()}"
    try:
        Path(aside).write_text(json.dumps({"text": error_text(error, debug), "code": code}), encoding="utf-8")
        os.link(aside, place)  # the first verdict stands
    except FileExistsError:
        pass
    except OSError:
        return False
    finally:
        Path(aside).unlink(missing_ok=True)
    return True


def failure_recorded() -> bool:
    """Whether another worker of this job has left a verdict."""
    place = os.environ.get(VERDICT_VARIABLE)
    return place is not None and Path(place).exists()


def report_verdict(verdict: Path) -> int:
    """Print the verdict to standard error.

    Args:
        verdict: File that a worker wrote, see `record_failure`.

    Returns:
        The exit code in it.
    """
    content = json.loads(verdict.read_text(encoding="utf-8"))
    print(content["text"], file=sys.stderr)
    return int(content["code"])


class StopRequest:
    """Turns SIGINT and SIGTERM into a stop flag that the training loop reads between steps.

    Either signal asks the loop to end its step, save and leave. A second Ctrl-C does not wait for that; torchrun passes
    it on as SIGTERM. Otherwise a second SIGTERM changes nothing: the system may send SIGTERM more than once
    (see `prepare_worker`), because Linux does so for every thread of the parent that ends.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def _note(self, number: int, frame: FrameType | None) -> None:
        torchruns = "TORCHELASTIC_RUN_ID" in os.environ and VERDICT_VARIABLE not in os.environ
        again = number == signal.SIGINT or (torchruns and self.signal == signal.SIGINT)
        if self.signal is not None and again:
            self.release()
            raise KeyboardInterrupt
        self.signal = self.signal or number

    @property
    def wanted(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def release(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
