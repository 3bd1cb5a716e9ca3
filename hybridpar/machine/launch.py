"""What a worker and its launcher have to do with each other: how a job is stopped, fails, and tells so once.

A worker whose error would only come again leaves a *verdict*, a file with the message and the exit code, which
the launcher (`hybridpar.machine.supervise`) reports; the other workers then stay silent.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from hybridpar.errors import HybridparError, LaunchError, SyncError, exception_text, user_frames
from hybridpar.machine.process import tune_this_process

VERDICT_VARIABLE = "HYBRIDPAR_VERDICT"
#: The file beside the verdict by which a worker says that it has told how the run ended.
TOLD = "told"
#: Number of the open socket on which this process opens the job's store.
DOOR_VARIABLE = "HYBRIDPAR_DOOR"


def in_job() -> bool:
    """Whether this process is a worker that some launcher started."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def launched_here() -> bool:
    """Whether our own launcher started this worker."""
    return VERDICT_VARIABLE in os.environ


def tell_interrupted(verdict: Path | None = None) -> None:
    """Say that the job was interrupted, once for all of its processes."""
    worker = VERDICT_VARIABLE in os.environ if verdict is None else verdict.with_name(TOLD).exists()
    if not worker and os.environ.get("RANK", "0") == "0":
        print("interrupted", file=sys.stderr, flush=True)


def note_orderly_end() -> None:
    """Have our launcher know that this worker has told how the run ended."""
    if VERDICT_VARIABLE in os.environ:
        Path(os.environ[VERDICT_VARIABLE]).with_name(TOLD).touch()


def prepare_worker(tune: bool) -> None:
    """Set up this process as a worker, before it imports torch: allocator, threads, and its end with the launcher's."""
    from hybridpar.machine.devices import gpu_count

    if tune and not gpu_count():
        tune_this_process(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if VERDICT_VARIABLE in os.environ and sys.platform == "linux":
        # The system sends SIGTERM when the main thread of our launcher ends, which started this worker.
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def import_torchvision() -> None:
    """Import torchvision without torch's compiler, which takes longer than all else and which most runs never use.

    torchvision names the compiler where it says what is not to be compiled, and so do torch's optimizers. The names
    stand for functions that change nothing meanwhile. Where that does not work, nothing is imported here; whoever uses
    the compiler imports it as ever.
    """
    import torch

    names = ("torch._dynamo", "torch._dynamo.utils")
    if any(name in sys.modules for name in names):
        return
    compiler, utils = stand_ins = [types.ModuleType(name) for name in names]
    vars(compiler).update(utils=utils, disable=lambda function=None, *_, **__: function or (lambda same: same))
    vars(utils).update(is_compile_supported=lambda device: False)
    sys.modules.update(zip(names, stand_ins, strict=True))
    vars(torch)["_dynamo"] = compiler
    try:
        with contextlib.suppress(Exception):
            import torchvision
            import torchvision.transforms.v2  # noqa: F401
    finally:
        for name in names:
            del sys.modules[name]
        vars(torch).pop("_dynamo", None)
    added = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if added is not None:  # where torch keeps what it made of a function that is not to be compiled
        vars(added).setdefault("__dynamo_disable", added)
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) else None
        if getattr(getattr(step, "__code__", None), "co_name", "") == "_use_grad":
            kind.step = _without_compiler(step)


def _without_compiler(step: Any) -> Any:
    """A step of one of torch's optimizers, whose wrapper imports the compiler to tell it where a graph ends."""
    import torch

    @functools.wraps(step)
    def stepped(optimizer: Any, *args: Any, **options: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(optimizer, *args, **options)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step.__wrapped__(optimizer, *args, **options)

    return stepped


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


_ending: list[str] = []


def end_at_once() -> None:
    """Have `leave` end this process at once: a thread hangs in a library that would wait for it at the exit."""
    _ending.append("at once")


def leave(code: int) -> int:
    """End this process at once if `end_at_once` was called."""
    if _ending:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def error_text(error: BaseException, debug: bool) -> str:
    """The text printed for an error: value, rule, what to do; with the traceback on request, or if it is a bug.

    Of an exception that the user's own code raised, for instance a model in its forward pass, only the frames of that
    code are shown.
    """
    if isinstance(error, HybridparError) and not debug:
        return f"error: {error}"
    if not debug and (frames := user_frames(error)):
        hint = "It was raised by the code above, which is not hybridpar's; --debug shows the whole traceback."
        return "\n".join([*frames, f"error: {exception_text(error)}", hint])
    return "".join(traceback.format_exception(error)) + f"error: {error}"


def record_failure(error: BaseException, *, debug: bool) -> bool:
    """Write the verdict of a worker that would fail in the same way again.

    It must be written before the worker leaves its peers, who are to find it when they notice.
    """
    path = os.environ.get(VERDICT_VARIABLE)
    if path is None or isinstance(error, (SyncError, LaunchError, KeyboardInterrupt)):
        return False
    code = error.exit_code if isinstance(error, HybridparError) else 1
    aside = f"{path}.{os.getpid()}"
    try:
        Path(aside).write_text(json.dumps({"text": error_text(error, debug), "code": code}), encoding="utf-8")
        os.link(aside, path)  # the first verdict stands
    except FileExistsError:
        pass
    except OSError:
        return False
    finally:
        Path(aside).unlink(missing_ok=True)
    return True


def failure_recorded() -> bool:
    """Whether another worker of this job has left a verdict."""
    path = os.environ.get(VERDICT_VARIABLE)
    return path is not None and Path(path).exists()


def report_verdict(verdict: Path) -> int:
    """Print the verdict to standard error."""
    content = json.loads(verdict.read_text(encoding="utf-8"))
    print(content["text"], file=sys.stderr)
    return int(content["code"])


#: What asks for a stop: Ctrl-C, the system, and clusters before they take the machine.
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


class StopRequest:
    """Turns `SIGNALS` into a stop flag that the training loop reads between steps.

    Each asks the loop to end its step, save and leave. A second Ctrl-C does not wait for that; torchrun passes
    it on as SIGTERM. Otherwise a second SIGTERM changes nothing: the system may send SIGTERM more than once
    (see `prepare_worker`), because Linux does so for every thread of the parent that ends.
    """

    def __init__(self, says: bool = False) -> None:
        self.signal: int | None = None
        self._says = says
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        torchruns = "TORCHELASTIC_RUN_ID" in os.environ and VERDICT_VARIABLE not in os.environ
        again = number == signal.SIGINT or (torchruns and self.signal == signal.SIGINT)
        if self.signal is not None and again:
            self.release()
            raise KeyboardInterrupt
        if self.signal is None and self._says:
            with contextlib.suppress(OSError):  # written at once: a stream may be in the middle of a line
                os.write(2, b"stopping after this step, and saving; a second Ctrl-C stops at once\n")
        self.signal = self.signal or number

    @property
    def wanted(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def release(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
