"""Makes the database of kernels that comes with the package from tuned ones.

From the root of the repository: python scripts/package_kernels.py k.jsonl other.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridpar.errors import HybridparError
from hybridpar.tvm_kernels.database import distill

PACKAGED = Path(__file__).resolve().parents[1] / "hybridpar" / "tvm_kernels" / "kernels.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the best of some kernel databases into the packaged one.")
    parser.add_argument("databases", nargs="+", type=Path, help="files that `hybridpar tune` wrote")
    parser.add_argument("-o", "--output", type=Path, default=PACKAGED)
    options = parser.parse_args()
    known = [options.output] if options.output.exists() else []
    try:
        records = distill([*known, *options.databases])
    except HybridparError as error:
        print(error, file=sys.stderr)
        return 2
    options.output.write_text("".join(record.line() + "\n" for record in records), encoding="utf-8")
    print(f"{len(records)} records, {options.output.stat().st_size} bytes in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
