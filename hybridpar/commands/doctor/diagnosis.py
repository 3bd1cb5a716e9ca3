"""Examines this machine for `hybridpar doctor`, and shows the findings.

Each thing looked at gives one `Finding` (`checkup.py`), shown as a screen, as plain lines where the output is no
terminal, or as JSON. Software is examined in processes of its own, which a broken installation may crash.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hybridpar.commands.doctor.checkup import Finding, check_places, check_software, check_tools
from hybridpar.errors import LaunchError
from hybridpar.machine.cluster import Cluster, Device, Link, default_backend, default_workers
from hybridpar.machine.probe import probe_cluster
from hybridpar.machine.process import available_cores, describe, worker_environment

if TYPE_CHECKING:
    from rich.console import Console

#: How a status is shown: on a Unicode screen, elsewhere, and its colour.
_MARKS = {
    "ok": ("✓", "ok", "green"),
    "absent": ("·", "absent", "dim"),
    "warning": ("!", "warning", "yellow"),
    "failed": ("✗", "FAILED", "bold red"),
}


@dataclass(frozen=True)
class Diagnosis:
    """All findings of one examination.

    Attributes:
        findings: One per thing looked at, in the order of the screen.
        cluster: What was measured, where anything could be.
        use: What a run will use unless told otherwise; empty where training cannot run.
    """

    findings: tuple[Finding, ...]
    cluster: Cluster | None
    use: str

    @property
    def ready(self) -> bool:
        """Whether training can run."""
        return all(finding.status != "failed" for finding in self.findings)


def run_doctor(fresh: bool, as_json: bool) -> int:
    """Examine this machine and print the result to standard output."""
    from rich.console import Console

    # FORCE_COLOR, common on build servers, would have rich take a file for a terminal.
    console = Console(force_terminal=sys.stdout.isatty(), highlight=False)
    if console.is_terminal and not as_json:
        with console.status("looking at software and devices, and measuring what is not known yet ..."):
            diagnosis = diagnose(fresh)
        _show_screen(console, diagnosis)
    else:
        diagnosis = diagnose(fresh)
        print(to_json(diagnosis) if as_json else "\n".join(plain_lines(diagnosis)))
    return 0 if diagnosis.ready else 1


def diagnose(fresh: bool) -> Diagnosis:
    """Look at software, tools and directories, and measure the devices and links."""
    findings = [*check_software(), *check_tools(), *check_places()]
    if any(finding.status == "failed" and finding.name == "torch" for finding in findings):
        return Diagnosis(tuple(findings), None, "")  # there is nothing to measure with
    try:
        cluster = probe_cluster(fresh=fresh)
    except LaunchError as error:
        findings.append(Finding("devices", "CPU", "failed", error.what))
        return Diagnosis(tuple(findings), None, "")
    findings += cluster_findings(cluster)
    return Diagnosis(tuple(findings), cluster, _use(cluster))


def cluster_findings(cluster: Cluster) -> list[Finding]:
    """What was measured, as findings."""
    devices = [Finding("devices", _device_name(device), "ok", _rates(device)) for device in cluster.devices]
    links = [
        Finding("links", f"{link.world_size} workers, {link.backend}", "ok", _link_rates(link))
        for link in cluster.links
    ]
    linked = default_workers(cluster) < 2 or cluster.link(default_backend(cluster)) is not None
    for problem in cluster.problems:
        if problem.startswith("measuring the link"):
            fix = "hybridpar train resnet18 --workers 1"
            links.append(Finding("links", "between workers", "warning" if linked else "failed", problem, fix))
        else:
            devices.append(Finding("devices", "GPU", "warning", problem, "nvidia-smi"))
    if cluster.busy:
        value = f"measured while other programs used the CPU ({cluster.load:.1f} per core); rates may be far too low"
        devices.append(Finding("devices", "load", "warning", value, "hybridpar doctor --fresh"))
    return [*devices, *links]


def _device_name(device: Device) -> str:
    return "CPU" if device.kind == "cpu" else f"GPU {device.index}"


def _rates(device: Device) -> str:
    cores = f"{device.cores} core{'' if device.cores == 1 else 's'}, " if device.cores else ""
    size = f"{device.memory_bytes / 2**30:.1f} GiB"
    return f"{device.name}, {cores}{size}; copies {_figure(device.bytes_per_second / 1e9)} GB/s"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _link_rates(link: Link) -> str:
    return f"all-reduce: {link.latency_ms:.2f} ms latency, {link.bytes_per_second / 1e6:,.0f} MB/s per worker"


def _use(cluster: Cluster) -> str:
    workers = default_workers(cluster)
    count = f"{workers} worker{'' if workers == 1 else 's'}"
    talk = f", {default_backend(cluster)}" if workers > 1 else ""
    if cluster.of_kind("cuda"):
        return f"{count}, one GPU each{talk}"
    environment = {**os.environ, **worker_environment(workers, available_cores())}
    return f"{count} on the CPU{talk}, {describe(environment)}"


def to_json(diagnosis: Diagnosis) -> str:
    """The diagnosis as indented JSON."""
    content = {
        "ready": diagnosis.ready,
        "use": diagnosis.use,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "cluster": diagnosis.cluster.model_dump(mode="json") if diagnosis.cluster else None,
    }
    return json.dumps(content, indent=2)


def plain_lines(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis as plain text, for files and pipes."""
    lines = []
    for finding in diagnosis.findings:
        fix = f" -> {finding.fix}" if finding.fix else ""
        lines.append(f"{_MARKS[finding.status][1]:8}{finding.group}: {finding.name}: {finding.value}{fix}")
    return [*lines, _measured_when(diagnosis), _verdict(diagnosis)]


def _show_screen(console: Console, diagnosis: Diagnosis) -> None:
    from rich.table import Table
    from rich.text import Text

    symbols = console.encoding.lower().startswith("utf")
    width = max(len(finding.name) for finding in diagnosis.findings)
    for group, findings in itertools.groupby(diagnosis.findings, key=lambda finding: finding.group):
        console.print(Text(group, style="bold"))
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, min_width=width)
        table.add_column(overflow="fold")
        for finding in findings:
            symbol, word, style = _MARKS[finding.status]
            value = Text(finding.value, style="dim" if finding.status == "absent" else "")
            if finding.fix:
                value.append(f"\n{'→' if symbols else '->'} {finding.fix}", style="cyan")
            table.add_row(Text(f"  {symbol if symbols else word}", style=style), Text(finding.name), value)
        console.print(table)
    console.print(Text(_measured_when(diagnosis), style="dim"))
    console.print(Text(_verdict(diagnosis), style="bold green" if diagnosis.ready else "bold red"))


def _measured_when(diagnosis: Diagnosis) -> str:
    if diagnosis.cluster is None:
        return "Nothing was measured."
    minutes = max(0.0, time.time() - diagnosis.cluster.measured_at) / 60
    if minutes < 1:
        return "Devices and links were measured just now."
    age = (
        f"{minutes:.0f} minutes"
        if minutes < 120
        else f"{minutes / 60:.0f} hours"
        if minutes < 2880
        else (f"{minutes / 1440:.0f} days")
    )
    return f"Devices and links were measured {age} ago; `hybridpar doctor --fresh` measures again."


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.ready:
        return f"hybridpar will use: {diagnosis.use}"
    failed = ", ".join(finding.name for finding in diagnosis.findings if finding.status == "failed")
    return f"Training cannot run here: see {failed} above."
