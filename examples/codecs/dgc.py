"""A codec of your own: deep gradient compression, the largest elements of momentum that each worker keeps.

    import dgc  # registers it
    ddp = hybridpar.DataParallel(model, compress="dgc:rate=0.01")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)  # the momentum is in the codec

Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
ICLR 2018. On each worker, for every parameter:

    u <- m u + g        w <- w + u        the k largest of |w| are sent, and w and u there become 0

u is the momentum, w what was not sent yet. Clearing u where w was sent keeps stale momentum from pulling twice. The
share that is sent starts at 1/4 and falls to a quarter of itself every `ramp` steps until it is `rate`.

A codec with state keeps two halves of it (`Kept`): each step writes the one, and `commit` swaps them if it counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress import CODECS, Codec, Coder, Round, TensorSpec
from hybridpar.compress.codec import NO_RESIDUAL, Kept, Residual
from hybridpar.compress.sparse import Picks, check_rate, largest
from hybridpar.errors import check


@CODECS.register("dgc", "deep gradient compression: top-k of momentum that each worker keeps")
@dataclass(frozen=True)
class DeepGradient(Codec):
    """The largest elements of accumulated momentum. The fields are the options of `--compress dgc:...`.

    Attributes:
        rate: Share of a parameter's elements that is sent, in the end.
        momentum: m.
        ramp: Steps of each level of the warm-up; 0 for none.
        least: Parameters with fewer elements, and vectors, are sent in full: u is, and nothing is cleared.
    """

    rate: float = 0.001
    momentum: float = 0.9
    ramp: int = 100
    least: int = 1000
    name = "dgc"
    biased = True
    stateful = True
    castable = True
    takes_feedback = False
    refuses_momentum = True

    def __post_init__(self) -> None:
        check_rate(self.rate, 0.001)
        check(0 <= self.momentum < 1, f"momentum={self.momentum:g}", "It is at least 0 and below 1.", "Use 0.9.")
        check(self.ramp >= 0, f"ramp={self.ramp}", "It is a number of steps.", "Use 0 for no warm-up.")

    def bind(self, spec: TensorSpec) -> MomentumCoder:
        """The coder of one parameter on one worker."""
        return MomentumCoder(spec, self)


class MomentumCoder(Coder):
    """Accumulates the momentum of one parameter, and sends the largest of it."""

    def __init__(self, spec: TensorSpec, config: DeepGradient) -> None:
        super().__init__(spec)
        self._config = config
        self._sparse = len(spec.shape) > 1 and spec.count >= config.least
        self._kept = {name: Kept(spec.count, spec.device) for name in ("momentum", "unsent")}
        self._steps = 0

    @property
    def _picks(self) -> Picks:
        """How many elements the next step sends, and how their message looks."""
        level = self._steps // self._config.ramp if self._config.ramp else math.inf
        return Picks.of(self.spec, max(self._config.rate, 0.25 ** (level + 1)) if self._sparse else 1.0)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """One, gathered; or a sum where that is cheaper."""
        return (self._picks.round,)

    def begin(self, gradient: Tensor, residuals: Mapping[str, Residual] = NO_RESIDUAL) -> None:
        """A step begins."""
        momentum, unsent = self._kept.values()
        torch.add(gradient, momentum.now, alpha=self._config.momentum, out=momentum.next)
        torch.add(unsent.now, momentum.next, out=unsent.next)

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """Write the message of the only round."""
        momentum, unsent = (one.next for one in self._kept.values())
        if not self._sparse:
            parts[0].copy_(momentum)
            unsent.zero_()
            return
        picks = self._picks
        places = largest(unsent, picks.picked, self._scratch)
        values = unsent.index_select(0, places)
        sent = picks.write(values, places, parts[0])
        unsent.index_copy_(0, places, values - sent)  # what a cast rounds off stays
        momentum.index_fill_(0, places, 0.0)

    def finish(self, out: Tensor) -> None:
        """Add up what all workers have sent."""
        self._picks.read(self._received, out, self.spec.divisor)

    def commit(self) -> None:
        """The step counts."""
        for one in self._kept.values():
            one.commit()
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"steps": self._steps, **{name: one.now.clone() for name, one in self._kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From checkpoints."""
        for name, one in self._kept.items():
            one.load(state[name], self.spec.name)
        self._steps = int(state["steps"])
