"""`hybridpar watch`: serves the report page of a run on this machine while the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hybridpar.commands import register_command


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Show the page of `hybridpar report` in a browser while the run goes on; Ctrl-C ends it, and not the run."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run directories."""
    port: int = 0
    """Port of 127.0.0.1 to listen on; 0: any that is free."""


@register_command("watch", "Show the page of `hybridpar report` in a browser while the run goes on.", Watch)
def run_watch(command: Watch, _: Sequence[str]) -> int:
    """Serve the page until Ctrl-C.

    Args:
        command: The options.

    Returns:
        The exit code, 0.

    Raises:
        UsageError: A directory holds no run, or the port is taken.
    """
    from hybridpar.run.watch import PageServer

    with PageServer(command.runs, command.port) as server:
        print(f"open {server.address} in a browser of this machine; Ctrl-C ends", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nno longer served; the run itself goes on as before")
    return 0
