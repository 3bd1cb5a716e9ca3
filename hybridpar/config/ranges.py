"""The values that options may have, as one table; a pair of options that contradict each other is in `train`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hybridpar.errors import UsageError

_POLICY = re.compile(r"none|ra(:\d+,\d+)?|ta|aa(:(imagenet|cifar10|svhn))?|augmix|timm/.+")

#: What values must be, a test of that, and the options. None is no value, and always allowed.
RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "at least 1",
        lambda one: one >= 1,
        "repeats",
    ),
    ("at least 1, or auto", lambda one: one == "auto" or one >= 1, "batch_size"),
    ("at least 8", lambda one: one >= 8, "image_size test_image_size"),
    (
        "at least 0",
        lambda one: one >= 0,
        "loader_workers mixup cutmix mix_off_epoch",
    ),
    (
        "at least 0 and less than 1",
        lambda one: 0 <= one < 1,
        "drop_rate drop_path_rate",
    ),
    (
        "at least 0 and at most 1",
        lambda one: 0 <= one <= 1,
        "hflip vflip random_erasing mix_prob mix_switch color_jitter",
    ),
    ("greater than 0 and at most 1", lambda one: 0 < one <= 1, "crop_ratio"),
    ("three numbers from 0 to 1", lambda some: all(0 <= one <= 1 for one in some), "mean"),
    ("three numbers of more than 0", lambda some: all(one > 0 for one in some), "std"),
    ("two numbers from 0 to 1, the smaller one first", lambda two: 0 < two[0] <= two[1] <= 1, "scale"),
    ("two numbers of more than 0, the smaller one first", lambda two: 0 < two[0] <= two[1], "ratio"),
    (
        "none, ra, ra:N,M, ta, aa, aa:imagenet, aa:cifar10, aa:svhn, augmix, or timm/SPEC",
        lambda text: _POLICY.fullmatch(text) is not None,
        "augment",
    ),
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
