"""Why: what comes with the package must be small, so of all that was tuned the best is kept, where it saves most.

`python scripts/package_kernels.py FILE...` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hybridpar.tvm_kernels.database import Database, KernelRecord, read_database
from hybridpar.tvm_kernels.space import reject

#: Bytes that the packaged database may have.
MOST_BYTES = 200_000


def distill(paths: Iterable[str | Path], most_bytes: int = MOST_BYTES) -> list[KernelRecord]:
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
        merged.add(read_database(path).records)
    best = [merged.best(key, current=False) for key in merged]
    winners = [one for one in best if one is not None and one.wins and _is_kernel(one)]
    size, kept = 0, []
    for record in sorted(winners, key=lambda one: (one.ms or 0.0) - (one.stock_ms or 0.0)):
        size += len(record.line().encode()) + 1
        if size > most_bytes:
            break
        kept.append(record)
    return sorted(kept, key=lambda one: one.key)


def _is_kernel(record: KernelRecord) -> bool:
    numbers = {name: value for name, value in record.parameters.items() if type(value) is int}
    whole = len(numbers) == len(record.parameters)
    return whole and reject(record.key.shape, record.direction, record.layout, numbers) is None
