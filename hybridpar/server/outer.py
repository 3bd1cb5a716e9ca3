"""An outer loop over parameter servers: workers push what they learned in many steps, servers take the outer step.

A worker trains from the weights that it was given last, th, to x, and pushes D = th - x in the place of a gradient. The
optimizer of the shards is that of the outer loop (`hybridpar.sync.outer`):

- with a barrier, an update takes the D of every worker, weighed by samples, as an all-reduce would;
- without one, each arrival moves the weights at once by its part of a round, th <- th - lr D / K, and momentum, which
  over stale outer gradients would do harm, is renewed and applied once a round (delayed Nesterov, Liu et al.,
  "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, with c = 0):

      m <- mu m + sum of the D / K since last time,    th <- th - lr mu m
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view
from hybridpar.server.learner import Exchanged, Pusher
from hybridpar.server.link import Links
from hybridpar.server.shard import OptimizerOf
from hybridpar.sync.outer import OuterStep
from hybridpar.sync.statistics import Statistics


class OuterOptimizer(torch.optim.Optimizer):
    """Takes outer steps of the parameters of a stripe, whose gradients are outer gradients.

    A shard says in its groups what part of the learning rate an update takes (`lr`), the inner learning rate of what
    was pushed (`inner_rate`), and whether momentum is left alone (`plain`).

    Args:
        groups: Groups of parameters.
        outer: What becomes of an outer gradient.
        every: Updates of a round.
    """

    def __init__(self, groups: list[dict[str, Any]], outer: OuterStep, every: int = 1) -> None:
        super().__init__(groups, {"lr": outer.lr, "inner_rate": 1.0, "plain": False})
        self.outer, self.every = outer, every

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the outer step, or of several in a round the part that is due.

        Args:
            closure: Not used.
        """
        for group in self.param_groups:
            part = group["lr"] / self.outer.lr
            for anchor in group["params"]:
                if anchor.grad is not None:
                    self._move(anchor, anchor.grad * part if part != 1 else anchor.grad, group)

    def _move(self, anchor: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        outer, rate = self.outer, float(group["inner_rate"])
        if group["plain"] or not outer.momentum:
            anchor.sub_(gradient, alpha=1.0 if group["plain"] else outer.lr)
            return
        state = self.state[anchor]
        if not state:
            state |= {"momentum": torch.zeros_like(anchor), "rate": rate, "updates": 0}
        state["updates"] += 1
        shrink = rate / state["rate"] if rate and state["rate"] else 1.0
        if self.every == 1:
            outer.take(anchor, state["momentum"], gradient, shrink)
        else:
            anchor.sub_(gradient, alpha=outer.lr)
            waiting = state.setdefault("waiting", torch.zeros_like(anchor)).add_(gradient)
            if state["updates"] % self.every:
                return
            outer.carry(anchor, state["momentum"], waiting, shrink)
            waiting.zero_()
        state["rate"] = rate or state["rate"]


def outer_optimizer_of(outer: OuterStep, every: int = 1) -> OptimizerOf:
    """What makes the optimizer of a stripe.

    Args:
        outer: What becomes of an outer gradient.
        every: Updates of a round, see `Rules.updates_per_round`.
    """
    return lambda groups: OuterOptimizer([{"params": group["params"]} for group in groups], outer, every)


class OuterLearner(Pusher):
    """Pushes what a worker has learned since the last answer, and takes the weights that come for it.

    Args:
        model: The model, which somebody trains.
        links: The ways to the shards.
        timeout: Seconds after which a silent worker is an error.
        took: Called when weights have come, to put them where the model's parameters are.
    """

    def __init__(
        self, model: nn.Module, links: Links, *, timeout: float = 60.0, took: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(model, links, took)
        self._statistics = outer_statistics(model)
        self._patience, self._told = 0.2 * timeout, time.monotonic()
        #: Weights that the servers gave last, by name.
        self.anchors: dict[str, Tensor] = {}
        self.keep_anchors()

    @torch.no_grad()
    def keep_anchors(self) -> None:
        """The weights as they are now are those that the servers gave."""
        for name, parameter in self._parameters.items():
            self.anchors.setdefault(name, torch.empty_like(parameter)).copy_(parameter)

    def stay(self) -> None:
        """Let the servers know, now and then, that this worker trains."""
        now = time.monotonic()
        if now - self._told > self._patience:
            self._told = now
            self.links.stay()

    @torch.no_grad()
    def exchange(self, end: dict[str, Any], loss: float, *, rate: float, seconds: float) -> Exchanged:
        """Push the progress, and take the weights that come.

        Args:
            end: What is known of it: `samples` and `steps` that it is of, and `plain`, `speed`, `stop`, `save` and
                `lowered` where they are not as usual.
            loss: Mean loss of the samples.
            rate: Inner learning rate of the last step as a fraction of its peak.
            seconds: How long the steps took.

        Returns:
            What the servers answered. The model then has their weights and statistics.

        Raises:
            SyncError: A shard is gone, or an update waits for a worker that is.
        """
        started = time.perf_counter()
        self.links.begin_push(rate, rescale=False)
        learned = {name: anchor.sub(self._parameters[name]) for name, anchor in self.anchors.items()}
        statistics = self._statistics.message(1.0)
        norms = torch._foreach_norm(list(learned.values()), 2, torch.float64)
        sound = bool(torch.isfinite(torch.stack(norms)).all()) and bool(torch.isfinite(statistics).all())
        for name, one in learned.items():
            self._send(name, flat_view(one).cpu())
            self._parameters[name].copy_(self.anchors[name])  # a shard that has no new weights sends none
        usual = {"weight": None, "factor": 1.0, "stop": False, "save": False}
        end = {**usual, "loss": loss, "sound": sound and end["samples"] > 0, **end}
        answers = self._finish(end, set(), statistics.cpu().view(torch.float32))
        self._took()
        self.keep_anchors()
        self._told = time.monotonic()
        return self._exchanged(answers[0], loss, seconds, time.perf_counter() - started)


def outer_statistics(model: nn.Module) -> Statistics:
    """The buffers of which workers push moments and values, in float64: those of floating-point numbers.

    Args:
        model: The model.
    """
    return Statistics({name: one for name, one in model.named_buffers() if one.is_floating_point()}, 0, 1)
