"""A plan as a table in a terminal: workers, times, transfers.

The table fits into 80 columns; `on` is the worker, then its device and lane.
"""

from __future__ import annotations

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from hybridpar.plan import Plan


def print_partition(plan: Plan, console: Console | None = None) -> None:
    """Print the table of a plan, and a line of its quality.

    Args:
        plan: The plan.
        console: Where to; default: standard output.
    """
    console = console or Console()
    stages = plan.partition.stages
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "on", "units", "fwd ms", "bwd ms", "params", "saved", "cut", "load"):
        table.add_column(name, justify="left" if name in ("on", "load") else "right", no_wrap=True)
    most = max((stage.ms or 0 for stage in stages), default=0) or 1
    for index, stage in enumerate(stages):
        table.add_row(
            str(index),
            where(plan, index),
            str(len(stage.units)) if stage.units else "all",
            _number(stage.forward_ms),
            _number(stage.backward_ms),
            decimal(stage.parameter_bytes) if stage.parameter_bytes else "",
            "" if stage.saved_bytes is None else decimal(stage.saved_bytes),
            decimal(stage.cut_bytes or 0) if index < len(stages) - 1 else "",
            "" if stage.ms is None else f"{100 * stage.ms / most:.0f} %",
        )
    console.print(_head(plan), style="bold", markup=False, highlight=False)
    console.print()
    console.print(table)
    console.print()
    console.print(_summary(plan), markup=False, highlight=False)


def where(plan: Plan, stage: int) -> str:
    """The worker of a stage, with its device and lane."""
    if plan.placement is None:
        return ""
    worker, lane = plan.layout.replica().rows[0][stage]
    return f"{worker}: {plan.placement.device}" + (f" lane {lane}" if lane else "")


def _head(plan: Plan) -> str:
    count, replicas = len(plan.partition.stages), plan.layout.replicas
    return (
        f"{plan.model.name}: {count} {'stage' if count == 1 else 'stages'}"
        + (f" on {replicas} replicas" if replicas > 1 else "")
        + f", {plan.model.parameters:,} parameters"
        + (f", micro-batch {plan.partition.micro_batch}" if plan.partition.micro_batch else "")
    )


def _summary(plan: Plan) -> str:
    part = plan.partition
    lines = []
    if part.balance is not None:
        lines.append(f"largest load / mean  {part.balance:.3f}")
    if len(part.stages) > 1:
        lines.append(f"bytes sent forward per micro-batch  {decimal(part.cut_bytes)}")
    if plan.measured is not None:
        measured = plan.measured
        facts = [measured.device, f"{measured.threads} thread(s)" if measured.threads else "", measured.dtype]
        if measured.profile == "measured" and measured.noise is not None:
            facts.append(f"noise {measured.noise * 100:.1f} %")
        source = f"times {measured.profile} on" if measured.profile else "on"
        lines.append(f"{source} {', '.join(filter(None, facts))}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
