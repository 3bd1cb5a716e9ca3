"""Picks the records that come with the package: the best of each convolution, those that save most first.

`python scripts/package_kernels.py FILE...` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hybridpar.tvm_kernels.database import Database, read_database
from hybridpar.tvm_kernels.record import KernelRecord, Record

#: Bytes that the packaged database may have.
MOST_BYTES = 200_000


def distill(paths: Iterable[str | Path], most_bytes: int = MOST_BYTES) -> list[Record]:
    """The best record of each key in some databases: the newest search's fastest, if it beat torch.

    Args:
        paths: The databases.
        most_bytes: Where they come to more than this, those that save least are left out.

    Returns:
        In the order of their keys, so that two packages differ in what changed.

    Raises:
        UsageError: A file cannot be read.
    """
    merged = Database("what is packaged")
    for path in paths:
        merged.add(one for one in read_database(path).records if type(one) is KernelRecord)
    best = [merged.best(key, current=False) for key in merged]
    winners = [one for one in best if one is not None and one.wins and one.rejected is None]
    size, kept = 0, []
    for record in sorted(winners, key=lambda one: (one.ms or 0.0) - (one.stock_ms or 0.0)):
        size += len(record.line().encode()) + 1
        if size > most_bytes:
            break
        kept.append(record)
    return sorted(kept, key=lambda one: one.key)
