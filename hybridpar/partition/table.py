"""A plan as a table in a terminal: workers, times, transfers.

The table fits into 80 columns; `on` is the worker, then its device and lane.
"""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hybridpar.partition.layout import readable_bytes
from hybridpar.plan import Plan, Stage

_BAR = 8


def partition_table(plan: Plan) -> Group:
    """The table of a plan and a line of its quality, for rich."""
    part = plan.partition
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name, side in (
        ("stage", "right"), ("on", "left"), ("units", "right"), ("fwd ms", "right"), ("bwd ms", "right"),
        ("params", "right"), ("saved", "right"), ("cut", "right"), ("load", "left"),
    ):  # fmt: skip
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    most = max((stage.ms or 0 for stage in part.stages), default=0) or 1
    for index, stage in enumerate(part.stages):
        table.add_row(
            str(index),
            _where(plan, index),
            str(len(stage.units)) if stage.units else "all",
            _number(stage.forward_ms),
            _number(stage.backward_ms),
            readable_bytes(stage.parameter_bytes) if stage.parameter_bytes else "",
            "" if stage.saved_bytes is None else readable_bytes(stage.saved_bytes),
            readable_bytes(stage.cut_bytes or 0) if index < len(part.stages) - 1 else "",
            "" if stage.ms is None else _bar(stage, most),
        )
    return Group(Text(_head(plan), style="bold"), Text(), table, Text(), Text(_summary(plan)))


def print_partition(plan: Plan, console: Console | None = None) -> None:
    """Print the table of a plan.

    Args:
        plan: The plan.
        console: Where to; default: standard output.
    """
    (console or Console()).print(partition_table(plan))


def _head(plan: Plan) -> str:
    shape = "x".join(map(str, plan.model.input)) if plan.model.input else "several inputs"
    count = len(plan.partition.stages)
    replicas = plan.layout.replicas
    micro_batch = plan.partition.micro_batch
    return (
        f"{plan.model.name}: {count} {'stage' if count == 1 else 'stages'}"
        + (f" on {replicas} replicas" if replicas > 1 else "")
        + f", {plan.model.parameters:,} parameters, "
        + (f"micro-batch {micro_batch} of {shape}" if micro_batch else f"samples of {shape}")
    )


def _summary(plan: Plan) -> str:
    part = plan.partition
    lines = []
    if part.balance is not None:
        lines.append(f"largest load / mean  {part.balance:.3f}")
    if part.cut_bytes is not None:
        lines.append(f"bytes sent forward per micro-batch  {readable_bytes(part.cut_bytes)}")
    if plan.measured is not None:
        measured = plan.measured
        noise = (
            f", noise {measured.noise * 100:.1f} %"
            if measured.profile == "measured" and measured.noise is not None
            else ""
        )
        facts = [measured.device, f"{measured.threads} thread(s)" if measured.threads else "", measured.dtype]
        source = f"times {measured.profile} on" if measured.profile else "on"
        lines.append(f"{source} {', '.join(fact for fact in facts if fact)}{noise}")
    return "\n".join(lines)


def _where(plan: Plan, stage: int) -> str:
    if plan.placement is None:
        return ""
    worker, lane = plan.layout.replica().rows[0][stage]
    return f"{worker}: {plan.placement.device}" + (f" lane {lane}" if lane else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _bar(stage: Stage, most: float) -> str:
    share = (stage.ms or 0) / most
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8].strip()) + f" {share * 100:.0f} %"
