"""The command line `hybridpar`: finds the command, reads its options, runs it, and turns errors into exit codes.

The commands are in `hybridpar.commands`. Exit codes: 0 done; 1 the run failed after it had started; 2 the request was
wrong; 128 and the number of the signal, such as 130 for Ctrl-C, stopped after saving.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence

from hybridpar import __version__
from hybridpar.commands import COMMANDS
from hybridpar.errors import HybridparError, LaunchError, SyncError
from hybridpar.machine.launch import error_text, failure_recorded, leaving_at_once, record_failure, tell_interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name; default: `sys.argv`.

    Returns:
        The exit code.

    Raises:
        SystemExit: The help of a command was printed (code 0), or its options cannot be read (code 2).
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"hybridpar {__version__}")
        return 0
    if not arguments or arguments[0] in ("--help", "-h"):
        print(help_text(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    debug = "--debug" in arguments
    try:
        with leaving_at_once():
            command = COMMANDS.get(arguments[0])
            options = command.parse(arguments[0], arguments[1:])
        _make_torchs_cache()
        return command.run(options, arguments)
    except KeyboardInterrupt:
        tell_interrupted()
        return 130
    except BrokenPipeError:  # the reader of the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 0
    except Exception as error:
        return _fail(error, debug)


def help_text() -> str:
    """The help screen of `hybridpar` itself."""
    lines = [
        f"usage: hybridpar [-h] [--version] {{{','.join(COMMANDS)}}} ...",
        "\nTrain PyTorch vision models faster on the hardware you have.",
        "\ncommands:",
    ]
    width = max(map(len, COMMANDS)) + 2
    for name, description in COMMANDS.describe().items():
        wrapped = textwrap.wrap(description, 76 - width)
        lines += [f"  {name:{width}}{wrapped[0]}", *(f"  {'':{width}}{line}" for line in wrapped[1:])]
    return "\n".join([*lines, "\n`hybridpar COMMAND --help` shows the options of a command."])


def _make_torchs_cache() -> None:
    """Keep what torch compiles beside our own cache. Torch makes the directory in any case, else a temporary one."""
    from hybridpar.formats.cache import cache_directory

    folder = cache_directory() / "torchinductor"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder.resolve()))


def _fail(error: BaseException, debug: bool) -> int:
    """Report an error once for the whole job, and choose the exit code."""
    if isinstance(error, (SyncError, LaunchError)) and failure_recorded():
        return 0  # a peer failed first, and its message is the one to show
    if record_failure(error, debug=debug):
        return 0
    if isinstance(error, HybridparError) and error.is_repeated:
        return error.exit_code
    print(error_text(error, debug), file=sys.stderr)
    return error.exit_code if isinstance(error, HybridparError) else 1
