"""Why: a checkout can train a ResNet without knowing the command; `hybridpar train` does the work.

    python scripts/train_resnet.py                            # ResNet-18 on digits
    python scripts/train_resnet.py resnet34 --data cifar10 --stem cifar

The model, where one is named, comes first; everything behind it is an option of `hybridpar train`.
"""

from __future__ import annotations

import sys

from hybridpar.cli import main

if __name__ == "__main__":
    given = sys.argv[1:]
    model = [] if given and not given[0].startswith("-") else ["resnet18"]
    sys.exit(main(["train", *model, *given]))
