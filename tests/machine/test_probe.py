from __future__ import annotations

import json
import os
import time

import pytest
import torch
import torch.distributed as dist

from hybridpar.errors import LaunchError
from hybridpar.machine import probe
from hybridpar.machine.probe import Programs, program_of, torch_facts

ANSWER = "import sys; open(sys.argv[1], 'w').write({!r})"


def run(programs: list[str], timeout: float = 60.0) -> str:
    with Programs(programs, "measuring it", workers=1, timeout=timeout) as started:
        return started.answer()


def test_the_first_program_answers_whatever_is_printed():
    first = "print('NCCL version 2.27'); " + ANSWER.format("yes")
    assert run([first, ANSWER.format("no")]) == "yes"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise ImportError('no libcuda')", "measuring it failed: ImportError: no libcuda"),
        ("import os; os.abort()", "measuring it failed: the process was killed by signal 6"),
        ("import sys; sys.exit(3)", "measuring it failed: the process exited with 3"),
    ],
)
def test_a_failing_program_is_told_in_one_line(program, message):
    with pytest.raises(LaunchError) as caught:
        run([program])
    assert caught.value.what == message
    assert "hybridpar doctor" in caught.value.fix


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_failure_stops_all():
    with Programs(["import time; time.sleep(600)", "1/0"], "measuring it", workers=1) as started:
        with pytest.raises(LaunchError, match="ZeroDivisionError"):
            started.answer()
        sleeper = started._processes[0].pid
        assert alive(sleeper)
    assert not alive(sleeper)


def test_a_program_that_hangs_is_stopped_and_quoted():
    program = "import time; print('joining', flush=True); time.sleep(600)"
    with Programs([program], "measuring it", workers=1, timeout=60.0) as started:
        while started._logs[0].read_text() != "joining\n":
            time.sleep(0.01)
        started._deadline = 0.0
        with pytest.raises(LaunchError, match="took more than 60 s; it last said: joining"):
            started.answer()
    assert not alive(started._processes[0].pid)


def test_facts_about_the_torch_at_hand():
    assert "torch" not in probe.__dict__, "the process that asks stays light"
    facts = json.loads(run([program_of(torch_facts.__module__, "torch_facts")]))
    assert facts["torch"] == torch.__version__
    assert facts["backends"]["gloo"] == dist.is_gloo_available()
    assert facts["cuda_build"] == torch.version.cuda
    assert (facts["cuda_error"] is None) == (torch.version.cuda is None or torch.cuda.is_available())
