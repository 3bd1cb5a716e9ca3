"""`python -m hybridpar` and the script `hybridpar`: run the command line, and end quietly on Ctrl-C."""

import sys

from hybridpar.machine.launch import leave, leaving_at_once


def main() -> int:
    """Run the command line on `sys.argv`."""
    with leaving_at_once():
        from hybridpar import cli
    return leave(cli.main())


if __name__ == "__main__":
    sys.exit(main())
