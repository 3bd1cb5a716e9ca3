"""Plays a written order of arrivals through real shards, in one process and without a clock.

Learners are simulated, the shards are real. An order says who pushes next, and whose message is lost or
doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from hybridpar.compress import Policy, parse_codec
from hybridpar.server.encoding import PushDecoder, PushEncoder
from hybridpar.server.rules import Rules
from hybridpar.server.shard import Answer, OptimizerOf, Push, Shard
from hybridpar.server.stripes import Stripe, cut_model
from tests.server.problems import unsent

#: Gradient of a learner: called with its number, how many it has computed, and the weights that it holds, 1-D.
Gradient = Callable[[int, int, Tensor], Tensor]


class Happening(Enum):
    """What may become of a push."""

    #: It arrives, and its learner hears the answer.
    ARRIVES = "arrives"
    #: It is lost on its way: the learner gives it up, and computes another gradient.
    LOST = "lost"
    #: It arrives, the answer is lost, and the learner sends the very same push again.
    UNHEARD = "unheard"
    #: It arrives twice.
    DOUBLED = "doubled"


@dataclass(frozen=True)
class Arrival:
    """One line of a schedule.

    Attributes:
        learner: Whose.
        what: What happens.
    """

    learner: int
    what: Happening = Happening.ARRIVES


@dataclass
class _Learner:
    clocks: list[int]
    weights: Tensor
    encoders: list[PushEncoder]
    decoders: list[PushDecoder]
    sequence: int = 0
    computed: int = 0
    waits: set[int] = field(default_factory=set)


class Simulation:
    """Learners and shards in one process.

    Args:
        shapes: The parameters' shapes by name, none of which decays.
        start: Their values, 1-D, one behind the other.
        rules: The shards' rules.
        optimizer: The shards' optimizers.
        gradient: What the learners compute.
        shards: Number of shards.
        codec: Codec of the pushes.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        start: Tensor,
        rules: Rules,
        optimizer: OptimizerOf,
        gradient: Gradient,
        *,
        shards: int = 1,
        codec: str = "none",
    ) -> None:
        stripes = cut_model([(name, shape, False) for name, shape in shapes.items()], shards)
        self._places = _places(shapes, stripes)
        self._policy = Policy.of(parse_codec(codec))
        self._gradient = gradient
        self.shards = [
            Shard(stripe, start[places], rules, optimizer) for stripe, places in zip(stripes, self._places, strict=True)
        ]
        self._learners: dict[int, _Learner] = {}
        #: Sum of all gradients that were pushed and heard of, as the learners computed them.
        self.computed = torch.zeros_like(start, dtype=torch.float64)
        #: Sum of all gradients that shards took in, as they were decoded.
        self.received = torch.zeros_like(start, dtype=torch.float64)
        for learner in range(rules.learners):
            self._join(learner)

    @property
    def weights(self) -> Tensor:
        """The parameters as the shards hold them, 1-D, new."""
        return self._spread([shard.values for shard in self.shards])

    def unsent(self) -> Tensor:
        """What all learners' codecs have left out, 1-D float64."""
        total = torch.zeros_like(self.computed)
        for learner in self._learners.values():
            total += self._spread([unsent(encoder) for encoder in learner.encoders])
        return total

    def _spread(self, parts: Sequence[Tensor]) -> Tensor:
        """What lies as in the shards, as it lies in the model."""
        whole = torch.empty(sum(part.numel() for part in parts))
        for part, places in zip(parts, self._places, strict=True):
            whole[places] = part
        return whole

    def play(self, schedule: Iterable[Arrival]) -> None:
        """Play a schedule.

        Args:
            schedule: The order of arrivals.

        Raises:
            SyncError: As for `Shard.push`.
        """
        for arrival in schedule:
            self.happen(arrival)

    def happen(self, arrival: Arrival) -> None:
        """Play one line: whose push, and what happens to it."""
        number, what = arrival.learner, arrival.what
        learner = self._learners[number]
        assert not learner.waits, f"learner {number} is to push, and waits for shard {min(learner.waits)}"
        messages, gradient = self._compute(number, learner)
        if what is Happening.LOST:
            for encoder in learner.encoders:
                encoder.rollback()
            return
        learner.sequence += 1
        learner.waits = set(range(len(self.shards)))
        self.computed += gradient
        heard: list[tuple[int, Answer]] = []
        for k in range(len(self.shards)):
            answers = self._push(k, number, learner, messages[k])
            if what is Happening.UNHEARD:
                answers = [answer for answer in answers if answer.learner != number]
            if what in (Happening.UNHEARD, Happening.DOUBLED):
                answers += self._push(k, number, learner, messages[k])
            heard += [(k, answer) for answer in answers]
        self._hear(heard)

    def _join(self, number: int) -> None:
        encoders = [PushEncoder(self._policy, shard.stripe) for shard in self.shards]
        decoders = [PushDecoder(self._policy, shard.stripe) for shard in self.shards]
        clocks = [shard.clock for shard in self.shards]
        self._learners[number] = _Learner(clocks, self.weights, encoders, decoders)
        for shard in self.shards:
            shard.join(number)

    def _compute(self, number: int, learner: _Learner) -> tuple[list[Tensor], Tensor]:
        """A gradient, and its messages to the shards."""
        gradient = self._gradient(number, learner.computed, learner.weights)
        learner.computed += 1
        messages = []
        for encoder, places in zip(learner.encoders, self._places, strict=True):
            own = gradient[places]
            parts = [encoder.encode(n, own[a:b]) for n, (a, b) in enumerate(encoder.stripe.ranges)]
            messages.append(torch.cat(parts))
        return messages, gradient

    def _push(self, k: int, number: int, learner: _Learner, message: Tensor) -> list[Answer]:
        """One message arrives at one shard."""
        shard, decoder = self.shards[k], learner.decoders[k]
        decoded = torch.empty(shard.stripe.count)
        if shard.expects(number, learner.sequence):
            decoder.decode(message, decoded, learner.encoders[k].warm)
            self.received[self._places[k]] += decoded
        return shard.push(Push(number, learner.sequence, learner.clocks[k]), decoded)

    def _hear(self, answers: Sequence[tuple[int, Answer]]) -> None:
        """Learners take their answers, and the weights of the moment."""
        for k, answer in answers:
            learner = self._learners[answer.learner]
            if k not in learner.waits:
                continue  # the second answer to a push that came twice
            learner.waits.discard(k)
            learner.decoders[k].commit()
            learner.encoders[k].commit()
            learner.clocks[k] = answer.clock
            learner.weights[self._places[k]] = self.shards[k].values


def round_robin(learners: int, pushes: int) -> Iterator[Arrival]:
    """Learners push in turn, as equally fast ones do.

    Args:
        learners: How many there are.
        pushes: How many pushes in all.
    """
    for number in range(pushes):
        yield Arrival(number % learners)


def _places(shapes: dict[str, tuple[int, ...]], stripes: Sequence[Stripe]) -> list[Tensor]:
    """For each stripe, where its elements lie when all parameters lie one behind the other."""
    begins, end = {}, 0
    for name, shape in shapes.items():
        begins[name] = end
        end += torch.Size(shape).numel()
    return [
        torch.cat([torch.arange(piece.count) + begins[piece.name] + piece.start for piece in stripe.pieces])
        for stripe in stripes
    ]
