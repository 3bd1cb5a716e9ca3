"""`hybridpar report`: writes one HTML page about one or several runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hybridpar.commands import register_command
from hybridpar.errors import not_installed


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one HTML page about a run, or several of them side by side. The page needs no network and no other file."""

    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")
    ]
    """Run directories."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The file to write; an earlier report is replaced."""


@register_command("report", "Write one HTML page about a run, or several of them side by side.", Report)
def run_report(command: Report, _: Sequence[str]) -> int:
    """Write the page."""
    if importlib.util.find_spec("plotly") is None:
        raise not_installed("the report page needs plotly", "report")
    from hybridpar.observe.page import check_page_file, write_page
    from hybridpar.run.report_page import page_parts, read_runs

    check_page_file("--output", command.output)
    runs = read_runs(command.runs)
    write_page(command.output, next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs", page_parts(runs))
    print(f"report written to {command.output}")
    return 0
