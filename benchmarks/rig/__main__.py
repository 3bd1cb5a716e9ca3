"""Command `python -m benchmarks.rig`: checks in a minute whether this machine can take the project's tables."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.rig.launch import launch
from benchmarks.rig.network import Network
from hybridpar.errors import HybridparError


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
    arguments = ["-m", "benchmarks.rig.selfcheck", "--rounds", str(options.rounds)]
    if options.output is not None:
        arguments += ["--output", str(options.output.resolve())]
    try:
        with Network(options.ranks, options.rate) as network:
            launch(arguments, network, threads=options.threads, timeout=options.timeout)
    except HybridparError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
