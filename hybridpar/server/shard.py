"""A shard: a stripe of the parameters, its optimizer, and what becomes of gradients for it.

Momentum and weight decay are applied here: with momentum at the learners a stale gradient would be applied several
times. A **clock** counts updates. Shards do not wait for each other; each has its clock. A shard is called with a push
at a time and returns `Answer`s: which learners may continue, with which weights. It knows nothing of processes and
sockets (`hybridpar.server.serve`), so that any order of arrivals can be tested.

A *step* is as many gradients as there are workers, from whichever of them: the work of one synchronous step, so that
epochs, learning rates and speeds mean the same in every mode.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.config import OptimizerConfig
from hybridpar.errors import SyncError
from hybridpar.optim.build import counters_of, fill_momentum, optimizer_by_name, put_counters
from hybridpar.server.rules import Clipping, Rules
from hybridpar.server.stripes import Stripe

#: Rows that wait until worker 0 asks for them, at most; far more than ever do.
_MOST = 10_000


@dataclass(frozen=True)
class Push:
    """What a learner says of a gradient.

    Attributes:
        learner: Who.
        sequence: Number of this push of the learner, from 1; a repeated push has the number of the first one.
        clock: Clock of the weights that the gradient was computed on.
        weight: What it is multiplied with, before staleness: with a barrier in the sum of an update, else in the mean.
        rate: Learning rate, as a fraction of the peak rate.
        samples: Samples that it is of.
        loss: Their mean loss.
        sound: Whether it is finite, on all shards. One that is not counts as a push and changes nothing; where an
            update takes one of each learner, it does not happen.
        unused: Numbers of the stripe's pieces for which there was no gradient.
    """

    learner: int
    sequence: int
    clock: int
    weight: float = 1.0
    rate: float = 1.0
    samples: int = 1
    loss: float = 0.0
    sound: bool = True
    unused: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepRow:
    """One step as a shard saw it.

    Attributes:
        step: Its number, from 1.
        loss: Mean loss over its samples, not counting those that were not finite; NaN where there are none.
        samples: Samples of its gradients.
        step_ms: Time since the step before.
        staleness: Mean staleness of its gradients.
        most_stale: Largest staleness.
        queued: Mean number of gradients that lay there and waited, over the arrivals.
        skipped: How many of its gradients were not finite and did not count.
        lr: Mean of the learning rates, as parts of the peak rate.
    """

    step: int
    loss: float
    samples: int
    step_ms: float
    staleness: float
    most_stale: int
    queued: float
    skipped: int
    lr: float


class Ledger:
    """Adds up gradients to steps."""

    def __init__(self, per_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.step = 0
        self._per_step, self._clock = per_step, clock
        self._rows: deque[StepRow] = deque(maxlen=_MOST)
        self._arrivals: list[tuple[Push, int, int]] = []
        self._since = clock()

    def restart(self) -> None:
        """The time of the next step begins now."""
        self._since = self._clock()

    def arrived(self, push: Push, staleness: int, queued: int) -> None:
        """Take in a gradient; `queued` is how many lie there with it."""
        self._arrivals.append((push, staleness, queued))
        if len(self._arrivals) < self._per_step:
            return
        pushes, ages, queues = zip(*self._arrivals, strict=True)
        before, self._since = self._since, self._clock()
        counted = [each for each in pushes if each.sound]
        samples = sum(each.samples for each in counted)
        self._arrivals, self.step = [], self.step + 1
        row = StepRow(
            self.step,
            sum(each.loss * each.samples for each in counted) / samples if samples else math.nan,
            sum(each.samples for each in pushes),
            1e3 * (self._since - before),
            statistics.fmean(ages),
            max(ages),
            statistics.fmean(queues),
            len(pushes) - len(counted),
            statistics.fmean(each.rate for each in pushes),
        )
        self._rows.append(row)

    def rows_after(self, step: int) -> list[StepRow]:
        """All rows past a step; those up to it are forgotten."""
        while self._rows and self._rows[0].step <= step:
            self._rows.popleft()
        return list(self._rows)


@dataclass(frozen=True)
class Answer:
    """A learner may go on.

    Attributes:
        learner: Who.
        sequence: Of the push that is answered.
        clock: Clock of the weights that it gets.
        staleness: Of its gradient.
        applied: Whether its gradient counts, or will in the update that it waits for.
        repeated: Whether the push had come before; it was not counted again.
    """

    learner: int
    sequence: int
    clock: int
    staleness: int
    applied: bool
    repeated: bool = False


@dataclass
class _Learner:
    """What a shard knows of a learner.

    Attributes:
        last: The answer to the last push that counted.
        pushes: How many there were; who joins late starts with as many as the slowest has.
        waiting: Whether it has not been given that answer.
        samples: Of its last push that counted; 0 before.
    """

    last: Answer
    pushes: int
    waiting: bool = False
    samples: int = 0


class Shard:
    """A stripe of the parameters, and what becomes of gradients for it.

    Args:
        stripe: What it holds.
        values: The parameters at the start, 1-D float32 of the stripe's size; copied.
        rules: What to do with gradients.
        config: Names the optimizer; its learning rate is the peak rate.
        limit: Pushes that are taken in all; later ones change nothing. None for any number.
        clipping: How gradients are clipped. Where updates with a barrier need a norm over all shards, `squares` says
            what this shard adds to it, and `finish` makes the update with the sum.
        statistics: Running statistics of BatchNorm, which are averaged over the learners: with a barrier they become
            the mean of those that came; else each arrival replaces 1 / lambda of them, a convex combination, which
            stays between what learners really saw however stale it is (adding differences would not).
    """

    def __init__(
        self,
        stripe: Stripe,
        values: Tensor,
        rules: Rules,
        config: OptimizerConfig,
        *,
        limit: int | None = None,
        clipping: Clipping | None = None,
        statistics: Tensor | None = None,
    ) -> None:
        assert values.shape == (stripe.count,)
        self.stripe, self.rules, self.limit = stripe, rules, limit
        self.values = values.detach().to(torch.float32, copy=True)
        #: A tensor that is replaced, and never written to.
        self.statistics = torch.empty(0) if statistics is None else statistics
        self.clock = self.taken = 0
        #: How many gradients arrived with which staleness.
        self.histogram: Counter[int] = Counter()
        self.ledger = Ledger(rules.learners)
        self._total = torch.zeros_like(self.values)
        self._pieces = [nn.Parameter(values) for values in self._in_pieces(self.values)]
        members: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for parameter, piece in zip(self._pieces, stripe.pieces, strict=True):
            members.setdefault((piece.decays, piece.scale), []).append(parameter)
        groups = [
            {"params": params, "weight_decay": config.weight_decay if decays else 0.0, "lr": config.peak_lr * scale}
            for (decays, scale), params in members.items()
        ]
        self.optimizer = optimizer_by_name(groups, config)
        self._peaks = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._clipping = clipping or Clipping()
        if self._clipping.built_in is not None:
            self.optimizer.defaults["max_grad_norm"] = None  # it would take the norm of this stripe for that of all
        #: Squared norm of the sum of all learners' gradients, while the norm over all shards is not known.
        self.squares: float | None = None
        self._learners: dict[int, _Learner] = {}
        self._departed: dict[int, Answer] = {}
        self._added: list[Push] = []  # whose gradients are in the total, which wait for the rest of an update
        self._arrived: dict[int, tuple[Push, Tensor, Tensor]] = {}

    # ---------------------------------------------------------------- learners

    @property
    def waiting(self) -> list[int]:
        """Who has pushed and not been answered."""
        return sorted(number for number, known in self._learners.items() if known.waiting)

    @property
    def queued(self) -> int:
        """Gradients that lie here and wait for others."""
        return len(self._arrived) + len(self._added)

    @property
    def step(self) -> int:
        """Steps done: pushes over learners."""
        return self.taken // self.rules.learners

    @property
    def done(self) -> bool:
        """Whether all pushes that were wanted have come."""
        return self.limit is not None and self.taken >= self.limit and not self._arrived

    @property
    def _slowest(self) -> int:
        return min((known.pushes for known in self._learners.values()), default=0)

    def join(self, learner: int, *, again: bool = False) -> None:
        """A learner takes part from now on.

        Args:
            learner: Its number.
            again: It has taken part before, and may repeat the push that it sent last.
        """
        before, none = self._departed.pop(learner, None), Answer(learner, 0, 0, 0, applied=False)
        self._learners[learner] = _Learner(before if again and before is not None else none, self._slowest)

    def leave(self, learner: int) -> list[Answer]:
        """A learner takes part no more: it has finished, or died. What it pushed stays counted.

        Args:
            learner: Its number.

        Returns:
            Answers that waited for it alone.

        Raises:
            SyncError: An update takes a gradient of each learner, and others wait for that of this learner.
        """
        known = self._learners.pop(learner, None)
        if known is None:
            return []
        self._departed[learner] = known.last
        self._arrived.pop(learner, None)
        if self._arrived:
            raise SyncError(
                f"worker {learner} is gone, and {len(self._arrived)} others wait for its gradient",
                "A synchronous update takes a gradient of every worker.",
                "A launched job restarts from its last checkpoint; --sync ps-async goes on without the worker.",
            )
        return [] if self.rules.barrier else self._release()

    # ------------------------------------------------------------------ pushes

    def expects(self, learner: int, sequence: int) -> bool:
        """Whether a push has not come before.

        Args:
            learner: Its number.
            sequence: Number of the push.
        """
        return sequence > self._learners[learner].last.sequence

    @torch.no_grad()
    def push(self, push: Push, gradient: Tensor, statistics: Tensor | None = None) -> list[Answer]:
        """Take in a gradient.

        Args:
            push: What is known of it.
            gradient: 1-D float32 of the stripe's size. With a barrier it must stay as it is until its learner is
                answered, else until this call returns.
            statistics: The learner's running statistics, as many as there are here.

        Returns:
            Who may go on; in the order in which they are to be answered.
        """
        known = self._learners[push.learner]
        if not self.expects(push.learner, push.sequence):  # answered again, unless it is still waiting
            return [] if known.waiting else [replace(known.last, clock=self.clock, repeated=True)]
        staleness = self.clock - push.clock
        assert staleness >= 0, "weights come from the shard"
        statistics = self.statistics if statistics is None else statistics
        if statistics.shape != self.statistics.shape:
            raise ValueError(f"{tuple(statistics.shape)} running statistics, and not {tuple(self.statistics.shape)}")
        counts = push.sound and not self.done
        known.waiting, known.pushes = True, known.pushes + 1
        known.last = Answer(push.learner, push.sequence, self.clock, staleness, counts)
        if not self.done:
            self.taken += 1
            self.histogram[staleness] += 1
            self.ledger.arrived(push, staleness, self.queued + 1)
            if self.rules.barrier:
                self._arrived[push.learner] = push, gradient, statistics
                return self._meet()
        if counts:
            self.statistics = torch.lerp(self.statistics, statistics, 1 / self.rules.learners)
            known.samples = push.samples
            others = [other.samples for other in self._learners.values() if other.samples]
            share = push.samples * len(others) / sum(others) if push.samples else 0.0
            self._add(push, gradient, share * self.rules.scale(staleness, self.rules.expected))
            if len(self._added) == self.rules.collect:
                self._update()
        return self._release()

    def _add(self, push: Push, gradient: Tensor, scale: float) -> None:
        """Add a gradient to those of the next update."""
        weight = scale * push.weight * (1.0 if self.rules.barrier else 1 / self.rules.collect)
        if self._added:
            self._total.add_(gradient, alpha=weight)
        else:
            torch.mul(gradient, weight, out=self._total) if weight != 1 else self._total.copy_(gradient)
        self._added.append(push)

    def _meet(self) -> list[Answer]:
        """With all gradients there, add them in the learners' order, so that the sum does not depend on arrivals."""
        if len(self._arrived) < self.rules.collect:
            return []
        arrived = [self._arrived[number] for number in sorted(self._arrived)]
        if not all(push.sound for push, _, _ in arrived):
            return self._end_meeting(False)
        for push, gradient, _ in arrived:
            self._add(push, gradient, 1.0)
        if self._clipping.by_norm:
            totals = [total for total in self._totals() if total is not None]
            norms = [torch.linalg.vector_norm(total, dtype=torch.float64) for total in totals]
            self.squares = float(sum(norm.square() for norm in norms))
            return []
        self._update()
        return self._end_meeting(True)

    @torch.no_grad()
    def finish(self, squares: float) -> list[Answer]:
        """Make the update for which the norm over all shards was wanted.

        Args:
            squares: The sum of `squares` of all shards.

        Returns:
            Who may go on.
        """
        self.squares = None
        factor = self._clipping.factor(squares)
        if factor != 1.0:
            self._total.mul_(factor)
        self._update()
        return self._end_meeting(True)

    def _end_meeting(self, sound: bool) -> list[Answer]:
        """Answer all learners of an update, in their order."""
        learners = sorted(self._arrived)
        if sound:
            total = torch.zeros_like(self.statistics)
            for number in learners:
                total += self._arrived[number][2]
            self.statistics = total / len(learners)
        self._arrived.clear()
        for number in learners:
            self._learners[number].last = replace(self._learners[number].last, applied=sound)
        return self._answers(learners)

    def _answers(self, learners: Iterable[int]) -> list[Answer]:
        """Let learners go on, with the weights of now."""
        answers = []
        for known in map(self._learners.__getitem__, learners):
            known.waiting, known.last = False, replace(known.last, clock=self.clock)
            answers.append(known.last)
        return answers

    def _release(self) -> list[Answer]:
        """Answer every learner that is not too far ahead of the slowest."""
        bound, slowest = self.rules.bound, self._slowest
        return self._answers(n for n in self.waiting if bound is None or self._learners[n].pushes - slowest <= bound)

    def _in_pieces(self, values: Tensor) -> list[Tensor]:
        """Views of the pieces in values of the stripe."""
        ranges = zip(self.stripe.pieces, self.stripe.ranges, strict=True)
        return [values[first:last].view(piece.shape) for piece, (first, last) in ranges]

    def _totals(self) -> list[Tensor | None]:
        """The gradient of each piece; None where no push of the update has used it."""
        unused = frozenset.intersection(*(push.unused for push in self._added))
        return [None if n in unused else total for n, total in enumerate(self._in_pieces(self._total))]

    def _update(self) -> None:
        """One step of the optimizer along the added gradients, which the clock counts."""
        factor = self.rules.rate * sum(push.rate for push in self._added) / len(self._added)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        for piece, total in zip(self._pieces, self._totals(), strict=True):
            piece.grad = total
        names = [piece.name for piece in self.stripe.pieces]
        self._clipping.clip_pieces(list(zip(names, self._pieces, strict=True)))
        fill_momentum(self.optimizer)  # for pieces that are used for the first time
        self.optimizer.step()
        self._added = []
        self.clock += 1

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the shard, as plain values and tensors.

        Learners are not part of it, as they join again, nor are gradients that wait for the rest of an update.
        """
        state = self.optimizer.state
        groups = {id(piece): group for group in self.optimizer.param_groups for piece in group["params"]}
        return {
            "values": self.values.clone(),
            "statistics": self.statistics.clone(),
            "optimizer": [_copied(state.get(piece, {})) for piece in self._pieces],
            "counters": [counters_of(groups[id(piece)]) for piece in self._pieces],
            "clock": self.clock,
            "taken": self.taken,
            "histogram": dict(self.histogram),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: What `state_dict` returned; counts may be those of another stripe, and state of the optimizer and its
                counters may be empty for any piece.
        """
        self.clock, self.taken = int(state["clock"]), int(state["taken"])
        self.ledger.step = self.step
        self.histogram = Counter(state["histogram"])
        self.values.copy_(state["values"])
        self.statistics = state["statistics"]
        self.optimizer.state.clear()
        for piece, saved in zip(self._pieces, state["optimizer"], strict=True):
            if saved:
                self.optimizer.state[piece] = _copied(saved)
        counters = {id(piece): saved for piece, saved in zip(self._pieces, state["counters"], strict=True) if saved}
        for group in self.optimizer.param_groups:
            put_counters(group, next((counters[id(piece)] for piece in group["params"] if id(piece) in counters), {}))


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the state that an optimizer has of a parameter."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
