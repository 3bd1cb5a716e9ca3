"""Why: `python -m hybridpar` is the command, wherever the console script is not on PATH."""

import sys

from hybridpar.cli import main

if __name__ == "__main__":
    sys.exit(main())
