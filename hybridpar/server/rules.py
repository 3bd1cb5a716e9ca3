"""What a shard does with gradients: how many make an update, whether workers wait, how staleness counts.

With lambda learners (S. Gupta, W. Zhang, F. Wang, "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning",
ICDM 2016; Zhang et al., IJCAI 2016):

* synchronous: an update takes one gradient of each learner, and every learner waits for it;
* n-softsync: an update takes any c = floor(lambda / n) gradients; no learner waits;
* asynchronous: every gradient is an update, which is n-softsync with n = lambda.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hybridpar.config import SyncConfig
from hybridpar.config.sync import AsyncServers
from hybridpar.errors import UsageError
from hybridpar.server.staleness import SCALES, Scale, full_weight


@dataclass(frozen=True)
class Rules:
    """What a shard does with gradients.

    Attributes:
        learners: How many learners there are to be, lambda.
        collect: Gradients of an update, c.
        barrier: Whether these are one of each learner, and a learner gets its next weights only after the update.
        expected: Mean staleness to be expected, n.
        scale: Weight of a gradient by its staleness.
        bound: Most pushes that a learner may be ahead of the slowest one; None for any.
        rate: Learning rate of an update, as a part of the one that was given. 1 takes it for that of an update, as the
            papers do; c / lambda for that of a step of lambda gradients, of which an update is so much.
    """

    learners: int
    collect: int = 1
    barrier: bool = False
    expected: int = 1
    scale: Scale = field(default=full_weight)
    bound: int | None = None
    rate: float = 1.0

    @classmethod
    def synchronous(cls, learners: int) -> Rules:
        """One gradient of each learner; nothing is ever stale.

        Args:
            learners: How many there are.
        """
        return cls(learners, collect=learners, barrier=True)

    @classmethod
    def soft(cls, learners: int, split: int, scale: str = "inverse", bound: int | None = None) -> Rules:
        """`split`-softsync.

        Args:
            learners: Number of learners.
            split: n, from 1 to the number of learners.
            scale: Name of one of `SCALES`.
            bound: See the class.

        Raises:
            UsageError: n is out of range, or there is no such rule.
        """
        if not 1 <= split <= learners:
            raise UsageError(f"softsync:{split} with {learners} learners", f"n is from 1 to {learners}.")
        return cls(learners, learners // split, False, split, SCALES.get(scale), bound)

    @classmethod
    def asynchronous(cls, learners: int, scale: str = "inverse", bound: int | None = None) -> Rules:
        """Every gradient is an update.

        Args:
            learners: How many there are.
            scale: Name of a rule of `SCALES`.
            bound: As in `Rules`.
        """
        return cls.soft(learners, learners, scale, bound)

    @classmethod
    def of(cls, config: SyncConfig, workers: int) -> Rules:
        """What the options of a run ask for.

        A run's learning rate is for its batch, one gradient of every worker. With fewer gradients to an update there
        are more updates: each takes its part of that rate, so that a step goes as far as a synchronous one. The papers
        start from a rate for one learner's minibatch, which comes to the same where rates grow with the batch.

        Args:
            config: Options of the run.
            workers: Number of workers.

        Raises:
            UsageError: N of softsync:N is not between 1 and the number of workers.
        """
        options = config.parameter_servers
        if not isinstance(options, AsyncServers):
            return cls.synchronous(workers)
        rules = cls.soft(workers, options.split_count(workers), options.staleness, options.max_staleness)
        return replace(rules, rate=rules.collect / workers)
