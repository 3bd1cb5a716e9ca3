"""Why: `python -m hybridpar` works where the script is not on the path, and both of them leave quietly on Ctrl-C."""

import sys

from hybridpar.machine.launch import leaving_at_once


def main() -> int:
    """Run the command line. Importing the command takes long enough to be interrupted."""
    with leaving_at_once():
        from hybridpar import cli
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
