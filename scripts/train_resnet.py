"""Trains a ResNet from a checkout; `hybridpar train` does the work.

    python scripts/train_resnet.py                            # ResNet-18 on digits
    python scripts/train_resnet.py resnet34 --data cifar10 --model-arg stem=cifar
    python scripts/train_resnet.py thesis --small             # the thesis's benchmark: see benchmarks/thesis

The model, where one is named, comes first; everything behind it is an option of `hybridpar train`, and everything
behind `thesis` one of `python -m benchmarks.thesis`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hybridpar.cli import main

if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["thesis"]:
        sys.path.insert(0, str(Path(__file__).parents[1]))  # for benchmarks, which is not installed
        from benchmarks.thesis.__main__ import run

        sys.exit(run(given[1:]))
    model = [] if given and not given[0].startswith("-") else ["resnet18"]
    sys.exit(main(["train", *model, *given]))
