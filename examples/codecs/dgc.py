"""A codec of your own: deep gradient compression, the largest elements of momentum that each worker keeps.

    import dgc  # registers it
    ddp = hybridpar.DataParallel(model, compress="dgc:rate=0.01")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)  # the momentum is in the codec

Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
ICLR 2018. On each worker, for every parameter:

    u <- m u + g        w <- w + u        the k largest of |w| are sent, and w and u there become 0

u is the momentum, w what was not sent yet. Clearing u where w was sent keeps stale momentum from pulling twice. The
share that is sent starts at 1/4 and falls to a quarter of itself every `ramp` steps until it is `rate`.

State is registered: each step writes its `next`, which becomes its `now` if the step counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from hybridpar.compress import CODECS, Codec, Coder, TensorSpec
from hybridpar.compress.codecs.topk import Picks, largest, share
from hybridpar.spec import AT_LEAST_0, AT_LEAST_1, AT_MOST_1, BELOW_1


@CODECS.register("dgc", "deep gradient compression: top-k of momentum that each worker keeps")
@dataclass(frozen=True, kw_only=True)
class DeepGradient(Codec):
    """The largest elements of accumulated momentum. The fields are the options of `--compress dgc:...`.

    Attributes:
        rate: Share of a parameter's elements that is sent, in the end.
        momentum: m.
        ramp: Steps of each level of the warm-up; 0 for none.
        least: Parameters with fewer elements, and vectors, are sent in full: u is, and nothing is cleared.
    """

    rate: Annotated[float, AT_MOST_1] = 0.001
    momentum: Annotated[float, BELOW_1] = 0.9
    ramp: Annotated[int, AT_LEAST_0] = 100
    least: Annotated[int, AT_LEAST_1] = 1000
    castable = True
    takes_feedback = False
    keeps_momentum = True

    def coder(self, spec: TensorSpec) -> MomentumCoder:
        """The coder of one parameter on one worker."""
        return MomentumCoder(spec, self)


class MomentumCoder(Coder):
    """Accumulates the momentum of one parameter, and sends the largest of it."""

    def __init__(self, spec: TensorSpec, config: DeepGradient) -> None:
        super().__init__(spec)
        self._config = config
        self._sparse = len(spec.shape) > 1 and spec.count >= config.least
        self._lay_out()
        self._momentum, self._unsent = (
            self.register_state(name, torch.zeros(spec.count, device=spec.device)) for name in ("momentum", "unsent")
        )

    def _lay_out(self) -> None:
        """Decide how many elements the next step sends: gathered with indices, or as a sum where that is cheaper."""
        level = self.steps // self._config.ramp if self._config.ramp else math.inf
        rate = max(self._config.rate, 0.25 ** (level + 1)) if self._sparse else 1.0
        self._picks = Picks(self.spec, self.spec.count, share(rate, self.spec.count))
        self.rounds = (self._picks.round,)

    def commit(self) -> None:
        """The step counts."""
        super().commit()
        self._lay_out()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self._lay_out()

    def write(self, index: int, parts: Sequence[Tensor]) -> None:
        """Write the message of the only round."""
        momentum, unsent = self._momentum.next, self._unsent.next
        torch.add(self.gradient, self._momentum.now, alpha=self._config.momentum, out=momentum)
        torch.add(self._unsent.now, momentum, out=unsent)
        if not self._sparse:
            parts[0].copy_(momentum)
            unsent.zero_()
            return
        indices = largest(unsent, self._picks.picked, self.scratch)
        values = unsent.index_select(0, indices)
        sent = self._picks.write(values, indices, parts[0])
        unsent.index_copy_(0, indices, values - sent)  # what a cast rounds off stays
        momentum.index_fill_(0, indices, 0.0)

    def finish(self, out: Tensor) -> None:
        """Add up what all workers have sent."""
        self._picks.read(self.messages, out, self.spec.divisor)
