"""`hybridpar plan` from a fresh clone, uninstalled.

python scripts/partition_model.py resnet50 --stages 4
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridpar.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
