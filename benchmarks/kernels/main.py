"""Command for all tables of kernels; each table is also a module that runs on its own.

python -m benchmarks.kernels.main            # hours on two cores; stopped, the long ones go on where they were
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Modules and their arguments, those first that others' questions depend on.
TABLES: tuple[tuple[str, ...], ...] = (
    ("depthwise",),
    ("norms",),
    ("training", "--database", "runs/kernels/training.jsonl"),
    ("depthwise", "--threads", "2"),
    ("depthwise", "--random", "6", "--seconds", "20"),
)


def main() -> int:
    """Run them one after another, in processes of their own; the first failure ends it."""
    Path("runs/kernels").mkdir(parents=True, exist_ok=True)
    for module, *arguments in TABLES:
        print(f"== benchmarks.kernels.{module} {' '.join(arguments)}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.kernels.{module}", *arguments])
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
