"""Trains a ResNet from a checkout; `hybridpar train` does the work.

    python scripts/train_resnet.py                            # ResNet-18 on digits
    python scripts/train_resnet.py resnet34 --data cifar10 --model-arg stem=cifar

The model, where one is named, comes first; everything behind it is an option of `hybridpar train`.
"""

from __future__ import annotations

import sys

from hybridpar.cli import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    model = [] if arguments and not arguments[0].startswith("-") else ["resnet18"]
    sys.exit(main(["train", *model, *arguments]))
