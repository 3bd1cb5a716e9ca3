"""`hybridpar tune`: searches the fastest kernels for a model on this machine, in a process set up for it.

It takes the options of `hybridpar train`, and those of the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from hybridpar.commands import register_command
from hybridpar.commands.train import SHOWN
from hybridpar.commands.tune.request import SearchOptions, TuneRequest
from hybridpar.config.files import FileOptions, read_sources
from hybridpar.config.train import GROUPS
from hybridpar.machine.launch import import_torchvision
from hybridpar.machine.process import tune_this_process


@register_command(
    "tune",
    "Search the fastest kernels for a model on this machine, and keep what was measured.",
    TuneRequest,
    groups={"Search": (SearchOptions,), "Configuration files": (FileOptions,), **GROUPS},
    shown=(*(field.name for field in fields(SearchOptions)), *SHOWN),
    read=read_sources,
)
def _run(command: TuneRequest, _: Sequence[str]) -> int:
    command.check()
    if command.tune_process and command.show is None:
        tune_this_process(1)
    import_torchvision()
    from hybridpar.commands.tune.tuning import run_tune

    return run_tune(command)
