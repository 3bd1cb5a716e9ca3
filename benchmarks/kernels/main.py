"""Command for all tables of kernels; each table is also a module that runs on its own.

python -m benchmarks.kernels.main            # hours on two cores; stopped, the long ones go on where they were
"""

from __future__ import annotations

import subprocess
import sys

#: Modules and their arguments; in processes of their own, as each chooses allocator settings and kernels.
TABLES: tuple[tuple[str, ...], ...] = (
    ("depthwise",),
    ("norms",),
    ("training", "--database", "runs/kernels/training.jsonl"),
    ("depthwise", "--threads", "2"),
)

if __name__ == "__main__":
    for module, *arguments in TABLES:
        print(f"== benchmarks.kernels.{module} {' '.join(arguments)}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.kernels.{module}", *arguments], check=True)
