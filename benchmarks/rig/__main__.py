"""Command `python -m benchmarks.rig`: checks in a minute whether this machine can take the project's tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import Network


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the rig's own link, and DDP with and without its gradient exchange on it."""

    ranks: int = 2
    """Number of ranks."""
    rate: str = "1gbit"
    """Each rank's link: loopback, or a rate and perhaps more, as 1gbit or 100mbit+10ms (`benchmarks/README.md`)."""
    rounds: int = 20
    """Rounds to keep."""
    threads: int = 1
    """Threads per rank."""
    timeout: float = 900.0
    """Seconds until the whole run must be over."""
    output: Path | None = None
    """Table to add the rows to."""


def main(options: Options) -> int:
    """Run the check; the exit status."""
    told = {"rounds": options.rounds, "output": None if options.output is None else str(options.output.resolve())}
    with Network(options.ranks, options.rate) as network:
        measure_in_ranks(network, "benchmarks.rig.selfcheck", told, timeout=options.timeout, threads=options.threads)
    return 0


if __name__ == "__main__":
    run_command(main, Options)
