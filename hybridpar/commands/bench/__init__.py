"""`hybridpar bench`: measures what compressing gradients costs and gains on this machine and its links.

`hybridpar bench codecs` times the codecs alone on one core, `hybridpar bench sync` whole steps on all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.commands import register_command
from hybridpar.commands.bench.request import Bench, BenchCodecs
from hybridpar.machine.launch import import_torchvision, in_job, leaving_at_once, prepare_worker
from hybridpar.machine.supervise import LEAVE_SECONDS, launch_workers


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Measure on this machine what compressing gradients costs and gains.

    Attributes:
        what: Speeds of codecs, or steps of a job.
    """

    what: Bench


@register_command("bench", "Measure on this machine what compressing gradients costs and gains.", Benchmark)
def _run(command: Benchmark, arguments: Sequence[str]) -> int:
    request = command.what
    request.check()
    if isinstance(request, BenchCodecs):
        from hybridpar.commands.bench.codecs import run_bench_codecs

        return run_bench_codecs(request)
    if not in_job():
        return launch_workers(arguments, request.workers, restarts=0, patience=LEAVE_SECONDS)
    prepare_worker(request.tune_process)
    with leaving_at_once():
        import_torchvision()
        from hybridpar.commands.bench.sync import run_bench_sync

    return run_bench_sync(request)
