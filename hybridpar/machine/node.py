"""`python -m hybridpar.machine.node`: runs torchrun on one host of a run that `--launch ssh` has started.

The first line of standard input is JSON, torchrun's arguments and the environment, so that no secret is on a command
line. Each further line is the name of a signal. `INT` goes to the workers alone, which end their step, save and leave;
torchrun itself would kill them after 30 s. The end of the input, which is the end of the connection, ends everything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from hybridpar.machine.launch import VERDICT_VARIABLE
from hybridpar.machine.supervise import KILL_SECONDS, LEAVE_SECONDS, STOP_SECONDS

#: Begins the line on standard error that has the text of a verdict, as JSON, which is shown once for all hosts.
VERDICT_MARK = "hybridpar verdict "


def main() -> int:
    """Run torchrun until it ends, or is to end."""
    order = json.loads(sys.stdin.readline())
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # words come by the input
    words: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: words.append("TERM"))
    threading.Thread(target=_listen, args=(words,), daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as directory:
        verdict = Path(directory) / "verdict.json"
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *order["arguments"]],
            env={**os.environ, **order["environment"], VERDICT_VARIABLE: str(verdict)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return _watch(job, words, verdict)
        finally:
            _end(job)


def _listen(words: list[str]) -> None:
    for line in sys.stdin:
        words.append(line.strip())
    words.append("END")


def _watch(job: subprocess.Popen[bytes], words: list[str], verdict: Path) -> int:
    heard, deadline = 0, float("inf")
    told: set[int] = set()
    while job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        if verdict.exists():  # torchrun would start workers again whose error only came again
            deadline = min(deadline, time.monotonic() + KILL_SECONDS)
        if heard and (children_of(job.pid) - told):  # torchrun has taken a worker that left for one that failed
            job.terminate()
            deadline = min(deadline, time.monotonic() + LEAVE_SECONDS)
        if len(words) > heard:
            word = words[heard]
            heard += 1
            told = children_of(job.pid)
            if word == "INT" and told:
                deadline = min(deadline, time.monotonic() + STOP_SECONDS)
                for child in told:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGINT)
            else:
                job.terminate()
                deadline = min(deadline, time.monotonic() + (KILL_SECONDS if word == "END" else LEAVE_SECONDS))
    if verdict.exists():
        said = json.loads(verdict.read_text(encoding="utf-8"))
        print(VERDICT_MARK + json.dumps(said["text"]), file=sys.stderr, flush=True)
        return int(said["code"])
    code = job.poll()
    return 1 if code is None or code < 0 else code


def _end(job: subprocess.Popen[bytes]) -> None:
    """Kill what is left: torchrun, and workers, which have sessions of their own."""
    for child in children_of(job.pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    job.kill()
    job.wait()


def children_of(parent: int) -> set[int]:
    """The processes that a process has started, and that have not ended."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] not in "ZX":
                found.add(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
