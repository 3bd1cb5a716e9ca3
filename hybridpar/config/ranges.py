"""The values that options may have, as one table; a pair of options that contradict each other is in `train`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridpar.errors import UsageError

#: What values must be, a test of that, and the options. None is no value, and always allowed.
RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "at least 1",
        lambda one: one >= 1,
        "epochs steps workers stages replicas micro_batches keep",
    ),
    ("at least 1, or auto", lambda one: one == "auto" or one >= 1, "batch_size"),
    ("1 to 8", lambda one: 1 <= one <= 8, "sync_lanes"),
    (
        "at least 0",
        lambda one: one >= 0,
        "loader_workers eps weight_decay warmup_epochs warm_start_steps select_batch",
    ),
    (
        "greater than 0",
        lambda one: one > 0,
        "lr lr_per_sample head_lr_scale clip_norm bucket_mb timeout",
    ),
    (
        "at least 0 and less than 1",
        lambda one: 0 <= one < 1,
        "momentum label_smoothing bce_threshold",
    ),
    ("greater than 0 and at most 1", lambda one: 0 < one <= 1, "layer_decay"),
    ("numbers of at least 0 and less than 1", lambda some: all(0 <= one < 1 for one in some), "betas"),
)


def check_ranges(config: object) -> None:
    """Check that options are what the table says."""
    for rule, holds, names in RANGES:
        for name in names.split():
            value = getattr(config, name)
            try:
                fits = value is None or holds(value)
            except (TypeError, IndexError):  # of another type, or too few numbers
                fits = False
            require(name, value, fits, rule)


def numbers_of(text: str) -> tuple[float, ...] | None:
    """The numbers of an option such as `1,2`; None for `equal` and `auto`, and empty for anything else."""
    said = text.strip()
    if said in ("equal", "auto"):
        return None
    try:
        return tuple(map(float, said.split(",")))
    except ValueError:
        return ()


def require(name: str, value: object, holds: bool, rule: str) -> None:
    """Refuse the value of an option that breaks its rule."""
    if not holds:
        raise UsageError(f"--{name.replace('_', '-')} is {value}", f"It must be {rule}.")
