"""Why: `python scripts/partition_model.py resnet50 --stages 4` works in a fresh clone, before anything is installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro

from hybridpar.errors import HybridparError
from hybridpar.partition.command import PlanConfig, run_plan


def main() -> int:
    config = tyro.cli(PlanConfig, description="Cut a model into balanced stages and write the plan.")
    try:
        return run_plan(config)
    except HybridparError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
