"""What a shard does with gradients: how many make an update, how staleness counts, and how they are clipped.

With lambda learners (S. Gupta, W. Zhang, F. Wang, "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning",
ICDM 2016; W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016):

* synchronous: an update takes one gradient of each learner, and every learner waits for it;
* n-softsync: an update takes any c = floor(lambda / n) gradients; no learner waits;
* asynchronous: every gradient is an update, which is n-softsync with n = lambda.

Staleness is counted in updates: tau = clock of the server at arrival - clock of the weights that the gradient was
computed on (IJCAI 2016, section 3).

Clipping by norm is, with a barrier, of the sum over all workers, as in a run without servers. Every shard knows the
squares of its stripe, worker 0 adds them up, and the shards update when they have the norm. Without a barrier no
gradient waits for another, so each is clipped by its norm before it is added to an update. By value, and adaptively,
each shard clips the sum of an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from hybridpar.config import OptimizerConfig, SyncConfig
from hybridpar.config.sync import AsyncServers
from hybridpar.errors import UsageError, check
from hybridpar.sync.stage_gradients import clip_each, clip_factor

#: Weight of a gradient, from its staleness tau >= 0 and the n of n-softsync, the mean staleness to be expected.
Scale = Callable[[int, int], float]

#: All rules by name: every gradient in full; 1 / max(1, tau), of IJCAI 2016, per gradient (equation 5); and 1 / n, of
#: ICDM 2016, which takes the mean staleness for that of every gradient. Others can be entered, and named to `Rules`.
SCALES: dict[str, Scale] = {
    "none": lambda staleness, expected: 1.0,
    "inverse": lambda staleness, expected: 1.0 / max(1, staleness),
    "mean": lambda staleness, expected: 1.0 / max(1, expected),
}


@dataclass(frozen=True)
class Rules:
    """What a shard does with gradients.

    Attributes:
        learners: How many learners there are to be, lambda.
        collect: Gradients of an update, c.
        barrier: Whether these are one of each learner, and a learner gets its next weights only after the update.
        expected: Mean staleness to be expected, n.
        scale: Weight of a gradient by its staleness.
        bound: Most pushes that a learner may be ahead of the slowest; None for any.
        rate: Learning rate of an update, as a part of the rate that was given. 1 takes it for that of an update, as the
            papers do; c / lambda for that of a step of lambda gradients, of which an update is so much.
    """

    learners: int
    collect: int = 1
    barrier: bool = False
    expected: int = 1
    scale: Scale = field(default=SCALES["none"])
    bound: int | None = None
    rate: float = 1.0

    @classmethod
    def soft(cls, learners: int, split: int, scale: str = "inverse", bound: int | None = None) -> Rules:
        """`split`-softsync.

        Args:
            learners: Number of learners.
            split: n, from 1 to the number of learners, with which every gradient is an update.
            scale: A name in `SCALES`.
            bound: See the class.

        Raises:
            UsageError: n is out of range, or there is no such rule.
        """
        if not 1 <= split <= learners:
            raise UsageError(f"softsync:{split} with {learners} learners", f"n is from 1 to {learners}.")
        check(scale in SCALES, f"unknown rule of staleness {scale!r}", fix=f"Use one of {', '.join(SCALES)}.")
        return cls(learners, learners // split, False, split, SCALES[scale], bound)

    @classmethod
    def of(cls, config: SyncConfig, workers: int) -> Rules:
        """What the options of a run ask for.

        A run's learning rate is for its batch, one gradient of every worker. With fewer gradients to an update there
        are more updates: each takes its part of that rate, so that a step goes as far as a synchronous step. The papers
        start from a rate for one learner's minibatch, which comes to the same where rates grow with the batch.

        Args:
            config: Options of the run.
            workers: Number of workers.

        Raises:
            UsageError: N of softsync:N is not between 1 and the number of workers.
        """
        options = config.parameter_servers
        if not isinstance(options, AsyncServers):
            return cls(workers, collect=workers, barrier=True)
        rules = cls.soft(workers, options.split_count(workers), options.staleness, options.max_staleness)
        return replace(rules, rate=rules.collect / workers)


@dataclass(frozen=True)
class Clipping:
    """Limits of gradients.

    Attributes:
        limit: What `--clip-grad` says; None for no limit.
        mode: What it limits, as its `mode`.
        built_in: The global norm to which the optimizer clips by itself, as LAMB does; None where it does not.
        unclipped: Names of parameters that are not clipped adaptively.
    """

    limit: float | None = None
    mode: str = "norm"
    built_in: float | None = None
    unclipped: Sequence[str] = ()

    @classmethod
    def of(cls, config: OptimizerConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> Clipping:
        """What a run asks for."""
        names = [name for name, _ in model.named_parameters()]
        limit, mode = (None, "norm") if (asked := config.clipping) is None else (asked.limit, asked.mode)
        return cls(limit, mode, optimizer.defaults.get("max_grad_norm"), tuple(names[-2:]))

    @property
    def by_norm(self) -> bool:
        """Whether an update needs the norm of a whole gradient."""
        return self.built_in is not None or (self.limit is not None and self.mode == "norm")

    def factor(self, squares: float) -> float:
        """What a gradient is multiplied with."""
        factor = 1.0
        if self.limit is not None and self.mode == "norm":
            shrink = clip_factor(torch.tensor(squares, dtype=torch.float64), self.limit)
            factor = 1.0 if shrink is None else float(shrink)
        return factor if self.built_in is None else factor / max(1.0, math.sqrt(squares) * factor / self.built_in)

    def clip_pieces(self, pieces: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Clip the gradients of pieces, in place, by what is known of each of them."""
        if self.limit is not None and self.mode != "norm":
            unclipped = self.unclipped if self.mode == "agc" else ()
            clip_each([piece for name, piece in pieces if name not in unclipped], self.mode, self.limit)
