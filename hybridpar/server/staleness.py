"""Rules for the weight of stale gradients, and a histogram of staleness.

Staleness is counted in updates: tau = clock of the server at arrival - clock of the weights that the gradient was
computed on (Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016, section 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from hybridpar.registry import Registry

#: Weight of a gradient, from its staleness tau >= 0 and the n of n-softsync, the mean staleness to be expected.
Scale = Callable[[int, int], float]

#: All rules by name. Others can be registered, and named to `Rules`.
SCALES: Registry[Scale] = Registry("staleness rule")


@SCALES.register("none", "every gradient counts in full, however old it is")
def full_weight(staleness: int, expected: int) -> float:
    """1."""
    return 1.0


@SCALES.register("inverse", "1 / tau, and 1 where tau is 0")
def inverse_weight(staleness: int, expected: int) -> float:
    """1 / max(1, tau): the rule of the paper, per gradient (equation 5)."""
    return 1.0 / max(1, staleness)


@SCALES.register("mean", "1 / n for n-softsync, whatever the gradient's own staleness")
def mean_weight(staleness: int, expected: int) -> float:
    """1 / n: the rule of Gupta, Zhang, Wang, ICDM 2016, which takes the mean staleness for every gradient's own."""
    return 1.0 / max(1, expected)


class StalenessHistogram:
    """How many gradients arrived with which staleness.

    Args:
        counts: Counts by staleness, of before.
    """

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: Counter[int] = Counter(counts or {})

    def add(self, staleness: int) -> None:
        """Count a gradient.

        Args:
            staleness: In updates.
        """
        self.counts[staleness] += 1

    @property
    def total(self) -> int:
        """Number of gradients."""
        return sum(self.counts.values())

    @property
    def sum(self) -> int:
        """Sum of all staleness."""
        return sum(staleness * count for staleness, count in self.counts.items())

    @property
    def mean(self) -> float | None:
        """Mean staleness; None before the first gradient."""
        return self.sum / self.total if self.total else None

    @property
    def most(self) -> int | None:
        """Largest staleness; None before the first gradient."""
        return max(self.counts, default=None)

    def to_dict(self) -> dict[str, int]:
        """Counts by staleness, which is text as JSON wants it, in ascending order."""
        return {str(staleness): self.counts[staleness] for staleness in sorted(self.counts)}

    @classmethod
    def of_dict(cls, counts: Mapping[str, int]) -> StalenessHistogram:
        """What `to_dict` returned.

        Args:
            counts: Counts by staleness, as text.
        """
        return cls({int(staleness): count for staleness, count in counts.items()})
