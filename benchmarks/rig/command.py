"""Runs the command of a benchmark, and the measurement that it starts in every rank of a network.

`python -m benchmarks.rig.command MODULE OPTIONS` is what a rank runs: `MODULE.measure` with the options, in JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import tyro

from benchmarks.rig.launch import launch
from benchmarks.rig.network import Network
from hybridpar.errors import HybridparError

Options = TypeVar("Options")


def measure_in_ranks(
    network: Network, module: str, told: Mapping[str, Any], timeout: float = 3600.0, threads: int = 1
) -> None:
    """Call `measure(**told)` of a module in every rank.

    Args:
        network: An entered network.
        module: Full name of the module.
        told: The arguments, which JSON can hold.
        timeout: Seconds until the whole run must be over.
        threads: Threads per rank within an operation.
    """
    # What torch says of its own future names is no news of this run.
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}
    command = ["-m", "benchmarks.rig.command", module, json.dumps(told)]
    launch(command, network, threads=threads, timeout=timeout, environment=quiet)


def run_command(
    main: Callable[[Options], int | None], options: type[Options], description: str | None = None
) -> NoReturn:
    """Run the command of a benchmark with the options of the command line, and end this process.

    Args:
        main: The command; its result is the exit status.
        options: A dataclass of its options.
        description: What `--help` says first; default: the docstring of the options.
    """
    _exit(lambda: main(tyro.cli(options, description=description)))


def _exit(run: Callable[[], int | None]) -> NoReturn:
    try:
        sys.exit(run())
    except HybridparError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    _exit(lambda: importlib.import_module(sys.argv[1]).measure(**json.loads(sys.argv[2])))
