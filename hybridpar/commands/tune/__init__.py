"""`hybridpar tune`: checks the request, and searches kernels for this machine in a process set up for it."""

from __future__ import annotations

from collections.abc import Sequence

from hybridpar.commands import register_command
from hybridpar.machine.launch import import_torchvision
from hybridpar.machine.process import tune_this_process
from hybridpar.tvm_kernels.request import TuneConfig


@register_command(
    "tune", "Search the fastest kernels for a model on this machine, and keep what was measured.", TuneConfig
)
def _run(command: TuneConfig, _: Sequence[str]) -> int:
    command.check()
    if command.tune_process and command.show is None:
        tune_this_process(1)
    import_torchvision()
    from hybridpar.commands.tune.tuning import run_tune

    return run_tune(command)
