"""`hybridpar tune` from a fresh clone, uninstalled.

python scripts/autotune_kernels.py mobilenet_v2 -o k.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridpar.cli import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
