"""Examines this machine for `hybridpar doctor`, and shows the findings.

Each thing looked at gives one `Finding` (`checkup.py`), shown as a screen, as plain lines where the output is no
terminal, or as JSON. Software is examined, and hosts and links are measured, in processes of their own, which a broken
installation may crash. They are measured as workers measure them before a search for a plan.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hybridpar.commands.doctor.checkup import Finding, check_places, check_software, check_tools
from hybridpar.errors import HybridparError, LaunchError
from hybridpar.machine.cluster_file import ClusterSpec
from hybridpar.machine.devices import machine_load
from hybridpar.machine.probe import Programs, program_of
from hybridpar.machine.process import available_cores, describe, usable_memory, worker_environment

if TYPE_CHECKING:
    from rich.console import Console

#: Load per core above which a measurement is not to be trusted.
BUSY_LOAD = 0.5

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
    cluster: ClusterSpec | None
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
    software, gpus = check_software()
    findings = [*software, *check_tools(), *check_places()]
    if gpus < 0:
        return Diagnosis(tuple(findings), None, "")  # there is nothing to measure with
    workers, load = gpus or min(2, len(available_cores())), machine_load()
    try:
        cluster = probe_cluster(workers, fresh)
    except LaunchError as error:
        fix = "hybridpar train resnet18 --nproc 1" if workers > 1 else ""
        findings.append(Finding("links", _count(workers), "failed", error.what, fix))
        return Diagnosis(tuple(findings), None, "")
    if load > BUSY_LOAD:
        value = f"other programs use the CPU ({load:.1f} per core); rates may be far too low"
        findings.append(Finding("devices", "load", "warning", value, "hybridpar doctor --fresh"))
    findings += cluster_findings(cluster)
    return Diagnosis(tuple(findings), cluster, _use(workers, on_gpus=gpus > 0))


def probe_cluster(workers: int, fresh: bool) -> ClusterSpec:
    """What so many workers of this machine measure of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"workers": workers, "port": port, "fresh": fresh}
    programs = [program_of(__name__, "measure", rank=rank, **given) for rank in range(workers)]
    with Programs(programs, f"measuring with {_count(workers)}", workers=workers) as probe:
        return ClusterSpec.model_validate_json(probe.answer())


def measure(rank: int, workers: int, port: int, fresh: bool) -> str:
    """Be a worker of `probe_cluster`."""
    from hybridpar.comm.world import World
    from hybridpar.planner.links import measure_cluster

    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update((name, str(value)) for name, value in job.items())
    try:
        with closing(World.join(lanes=1)) as world:
            return measure_cluster(world, fresh=fresh).model_dump_json()
    except HybridparError as error:
        sys.exit(error.what)


def cluster_findings(cluster: ClusterSpec) -> list[Finding]:
    """What was measured, as findings."""
    host, level = cluster.hosts[0], cluster.inside
    copies = f"copies {_figure((host.memory_bandwidth or 0.0) * host.devices / 1e9)} GB/s"
    if host.kind == "cpu":
        cores = len(available_cores())
        value = f"{host.name}, {cores} core{'' if cores == 1 else 's'}, {usable_memory() / 2**30:.1f} GiB; {copies}"
    else:
        memory = f"{(host.memory or 0) / 2**30:.1f} GiB each"
        value = f"{host.name}, {memory}; {copies}, {_figure((host.host_link or 0.0) / 1e9)} GB/s each to the host"
    findings = [Finding("devices", "CPU" if host.kind == "cpu" else f"GPUs: {host.devices}", "ok", value)]
    if level is not None:
        sums, messages = (level.bandwidth * part / 1e6 for part in (level.efficiency.all_reduce, level.efficiency.send))
        value = f"{level.latency_ms:.2f} ms latency; per worker sums {sums:,.0f} MB/s, messages {messages:,.0f} MB/s"
        findings.append(Finding("links", _count(cluster.workers), "ok", f"{cluster.name}: {value}"))
    return findings


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


def _use(workers: int, on_gpus: bool) -> str:
    if on_gpus:
        return f"{_count(workers)}, a GPU each"
    environment = {**os.environ, **worker_environment(workers, available_cores())}
    return f"{_count(workers)} on the CPU, {describe(environment)}"


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
    return [*lines, _verdict(diagnosis)]


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
    console.print(Text(_verdict(diagnosis), style="bold green" if diagnosis.ready else "bold red"))


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.ready:
        return f"hybridpar will use: {diagnosis.use}"
    failed = ", ".join(finding.name for finding in diagnosis.findings if finding.status == "failed")
    return f"Training cannot run here: see {failed} above."
