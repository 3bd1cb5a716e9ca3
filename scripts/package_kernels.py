"""Makes the database of kernels that comes with the package from tuned ones: the best of each convolution.

Lines are shorter than those of a tune: numbers are rounded, and what has its default is left out.

From the root of the repository: python scripts/package_kernels.py k.jsonl other.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridpar.errors import HybridparError
from hybridpar.tvm_kernels.database import Database, KernelRecord, read_database
from hybridpar.tvm_kernels.space import reject

PACKAGED = Path(__file__).resolve().parents[1] / "hybridpar" / "tvm_kernels" / "kernels.jsonl"


#: Bytes that the packaged database may have.
MOST_BYTES = 200_000


def distill(paths: Iterable[str | Path], most_bytes: int = MOST_BYTES) -> list[KernelRecord]:
    """The best record of each key in some databases: the newest search's fastest, if it beat torch.

    Where they come to more than `most_bytes`, those that save least are left out. Devices share it: one that has many
    records does not push out those of another that has few. Records are in the order of their keys, so that two
    packages differ in what changed.
    """
    merged = Database("what is packaged")
    for path in paths:
        merged.add(read_database(path).records)
    best = [merged.best(key, current=False) for key in merged]
    winners = [one for one in best if one is not None and one.wins and reject(one.key, one.parameters) is None]
    by_device: dict[str, list[KernelRecord]] = {}
    for record in sorted(winners, key=lambda record: record.saved_ms, reverse=True):
        by_device.setdefault(record.device, []).append(record)
    in_turn = (record for row in zip_longest(*by_device.values()) for record in row if record is not None)
    size, chosen = 0, []
    for record in in_turn:
        size += len(short_line(record).encode()) + 1
        if size > most_bytes:
            break
        chosen.append(record)
    return sorted(chosen, key=lambda record: record.key)


def short_line(record: KernelRecord) -> str:
    """A record of a convolution as a line of JSON of the packaged database."""
    cells = record.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    digits = {"error": 2, "stock_error": 2, "noise": 2, "ms": 4, "stock_ms": 4}
    cells |= {name: float(f"{cells[name]:.{count}g}") for name, count in digits.items() if name in cells}
    if "tuned_at" in cells:
        cells["tuned_at"] = round(cells["tuned_at"])
    return json.dumps(cells, separators=(",", ":"))


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
    options.output.write_text("".join(short_line(record) + "\n" for record in records), encoding="utf-8")
    print(f"{len(records)} records, {options.output.stat().st_size} bytes in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
