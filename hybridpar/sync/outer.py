"""The outer loop: exchanges what workers have learned in many steps, as outer gradients, and takes an outer step.

Every worker k trains alone from the weights of the last exchange, th, to x_k. With w_k its share of the samples,

    D = sum_k w_k (th - x_k)                       the outer gradient
    mean:      th <- th - lr D                     local SGD (Stich 2019) with lr = 1
    nesterov:  m <- mu m + D                       DiLoCo (Douillard et al. 2023)
               th <- th - lr (D + mu m)
    x_k <- th, or where an exchange takes some steps: (x_k + th) / 2

D is sent by a codec with error feedback, or as it is. Where th becomes the plain mean, and no codec is used, the x_k
are sent themselves and their mean is assigned: th - (th - x) would round.

D is the gradient that a torch optimizer steps th by: `torch.optim.SGD`, with Nesterov's momentum, or without for a mean
with another lr. Without an optimizer th becomes the plain mean.

Parameters are divided into fragments, which are exchanged in turn, on a lane that does nothing else, so that training
can go on meanwhile (Streaming DiLoCo, Douillard et al. 2025). Every worker decodes the same bytes and does the same
arithmetic, so th is equal bit for bit on all of them. th is therefore what is tested and saved: that sends nothing.

In a **round** of H steps each fragment is sent once, and its result arrives some steps later. Rounds may grow as the
learning rate falls, by the quadratic synchronisation rule (Gu et al., "A Quadratic Synchronization Rule for Distributed
Deep Learning", ICLR 2024):

    H(t) = max(H, floor((ratio * peak rate / rate(t))^2))

The last round of a run ends at its last step, with an exchange of all fragments.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.compress import Policy
from hybridpar.compress.nodes import NodeWorlds
from hybridpar.errors import UsageError
from hybridpar.lanes import Event, Lanes
from hybridpar.models.state_dicts import copy_of
from hybridpar.sync.buckets import Bucket, layout_fingerprint, make_buckets, sum_of_squares
from hybridpar.sync.compression import Compression, add_plainly
from hybridpar.sync.figures import SyncCosts
from hybridpar.sync.statistics import Statistics

#: Makes what takes the outer steps, of the weights of the last exchange.
OuterOptimizer: TypeAlias = Callable[[list[Tensor]], torch.optim.Optimizer]

#: Share of a worker's weights that stays where a result arrives steps after it was sent, as in Streaming DiLoCo.
_STAYS = 0.5

#: What of an exchange under way is saved.
_SAVED = ("fragment", "message", "head", "plain", "as_weights", "sound", "good")


class Transfer(NamedTuple):
    """An exchange of a fragment.

    Attributes:
        sent: Step after which the fragment leaves.
        arrives: Step after which its result is used.
        fragment: Its number.
    """

    sent: int
    arrives: int
    fragment: int


class OuterRound(NamedTuple):
    """Steps `start` + 1 to `stop`, in which each fragment is exchanged once.

    Attributes:
        start: Step after which it begins.
        stop: Its last step.
        is_last: It is the last round of the run.
    """

    start: int
    stop: int
    is_last: bool = False

    def transfers(self, fragments: int, delay: int) -> list[Transfer]:
        """What is exchanged, in order; at most a single fragment is on its way at a time."""
        length = self.stop - self.start
        ends = [self.start + (index + 1) * length // fragments for index in range(fragments)]
        slots = [Transfer(end - delay, end, index) for index, end in enumerate(ends)]
        if not self.is_last:
            return slots
        early = slots[:-1] if length // fragments > delay else []
        return early + [Transfer(self.stop, self.stop, index) for index in range(fragments)]


class Timetable(NamedTuple):
    """The rounds of a run.

    Attributes:
        every: H, steps of a round; of the shortest with `ratio`.
        total: Steps of the run; None where that is not known, and no round is the last.
        ratio: Of the quadratic rule; None keeps H.
        warmup: First steps of the run, in which the learning rate rises and H stays.
    """

    every: int
    total: int | None = None
    ratio: float | None = None
    warmup: int = 0

    def next_round(self, start: int, rate_factor: float) -> OuterRound:
        """The round that begins after a step.

        Args:
            start: The step.
            rate_factor: Learning rate of the step that follows, as a part of its peak.
        """
        length = self.every
        if self.ratio is not None and start >= self.warmup:
            root = self.ratio / rate_factor if rate_factor > 0 else math.inf
            length = max(length, math.floor(root * root) if root < 2**15 else 2**30)
        if self.total is None or not start < self.total <= start + length:
            return OuterRound(start, start + length)
        return OuterRound(start, self.total, is_last=True)

    def round_at(self, step: int) -> OuterRound:
        """The round of fixed length that a step is in, where nothing else is known.

        Args:
            step: Steps done.
        """
        return self.next_round(step - step % self.every, math.inf)


@dataclass
class OuterExchange:
    """An exchange under way.

    Attributes:
        fragment: Number of the fragment.
        message: What workers add up: the report, the weight, then the statistics.
        head: How many numbers the report has.
        plain: The result is the mean, whatever the optimizer.
        as_weights: Weights are sent, not outer gradients.
        sound: Whether what this worker sent was finite.
        good: Whether what came of it is finite, and somebody had samples; on all workers alike.
        costs: What it cost.
        done: Passed when the result is there; None where it has been waited for.
    """

    fragment: int
    message: Tensor
    head: int
    plain: bool
    as_weights: bool
    sound: Tensor | None = None
    good: Tensor | None = None
    costs: SyncCosts = field(default_factory=SyncCosts)
    done: Event | None = None


class OuterResult(NamedTuple):
    """What all workers know of an exchange.

    Attributes:
        good: Whether it counts.
        report: Their reports, added up.
        costs: What it cost this worker.
        sent: Bytes that this worker sent.
    """

    good: bool
    report: list[float]
    costs: SyncCosts
    sent: int


class _Fragment:
    """Some of the parameters, which are exchanged together, and their weights of the last exchange.

    Outer gradients are the `.grad` of those weights, as an optimizer wants them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.last = {name: nn.Parameter(torch.empty_like(parameter)) for name, parameter in parameters.items()}
        self.weights: list[Tensor] = [*self.last.values()]
        self.optimizer: torch.optim.Optimizer | None = None
        self.compression: Compression | None = None

    def begin(self, make: OuterOptimizer | None) -> None:
        """The weights as they are now are those of the last exchange; there is no momentum."""
        torch._foreach_copy_(self.weights, [*self.parameters.values()])
        self.optimizer = None if make is None else make(self.weights)

    def collect(self, bucket: Bucket, *, as_weights: bool) -> Tensor:
        """What this worker sends of a bucket: its weights, or how far it is from those of the last exchange."""
        for slot in bucket.slots:
            parameter = self.parameters[slot.name]
            slot.parameter.grad = parameter.clone() if as_weights else slot.parameter - parameter
        return bucket.collect()

    def step(self, exchange: OuterExchange) -> None:
        """Move the weights by what came of the exchange; without an optimizer to the mean."""
        gradients: Any = [weight.grad for weight in self.weights]
        if exchange.as_weights:
            torch._foreach_copy_(self.weights, gradients)
        elif exchange.plain or self.optimizer is None:
            torch._foreach_sub_(self.weights, gradients)
        else:
            self.optimizer.step()

    def scatter(self, stays: float = 0.0) -> None:
        """Give the parameters the weights of the last exchange, but for a share of what they are."""
        parameters: list[Tensor] = [*self.parameters.values()]
        if stays:
            torch._foreach_lerp_(parameters, self.weights, 1.0 - stays)
        else:
            torch._foreach_copy_(parameters, self.weights)

    @property
    def momentum(self) -> dict[str, Tensor]:
        """The optimizer's momentum, by name; empty where it has none."""
        states: Any = {} if self.optimizer is None else self.optimizer.state
        known = {name: states.get(weight, {}).get("momentum_buffer") for name, weight in self.last.items()}
        return {name: momentum for name, momentum in known.items() if momentum is not None}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over weights and momentum of the last exchange, as far as they are known."""
        for name, weight in self.last.items():
            weight.copy_(state["weights"].get(name, weight))
            if self.optimizer is not None and name in state["momentum"]:
                momentum = torch.empty_like(weight).copy_(state["momentum"][name])
                self.optimizer.state[weight]["momentum_buffer"] = momentum


def divide(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Divide tensors, in order, into parts of nearly equal bytes, none of them empty.

    Args:
        sizes: Bytes of each tensor, at least as many as parts.
        parts: Number of parts.

    Returns:
        Indices of each part.
    """
    sums, ends = [0, *accumulate(sizes)], [0]
    for part in range(1, parts):
        wanted = part * sums[-1] / parts
        allowed = range(ends[-1] + 1, len(sizes) - parts + part + 1)
        ends.append(min(allowed, key=lambda end, wanted=wanted: abs(sums[end] - wanted)))  # type: ignore[misc]
    return [list(range(*pair)) for pair in pairwise([*ends, len(sizes)])]


class OuterLoop:
    """Exchanges the parameters of workers that train alone.

    The calls: `begin` when workers part; for each exchange `send` and, in the same step or some steps later, `arrive`.
    At most a single exchange is on its way. All are made between steps, on all workers after the same step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Callable[[], Mapping[str, Tensor]],
        team: World,
        lanes: Lanes,
        policy: Policy,
        optimizer: OuterOptimizer | None = None,
        fragments: int = 1,
        delayed: bool = False,
        seed: int = 0,
        nodes: NodeWorlds | None = None,
        bucket_bytes: int = 8 << 20,
    ) -> None:
        _check_codecs(policy)
        trained = {name: p for name, p in parameters.items() if p.is_floating_point() and p.requires_grad}
        if len(trained) < fragments:
            raise UsageError(
                f"fragments={fragments} of {len(trained)} parameters",
                "A fragment holds a parameter at least.",
                f"Use fragments={max(1, len(trained))}, or fewer.",
            )
        self._trained = [*trained.values()]
        self._team, self._lanes, self._lane = team, lanes, lanes.open("outer", priority=-1)
        self._optimizer, self._delayed, self._bucket_bytes = optimizer, delayed, bucket_bytes
        #: Whether the new weights are the workers' mean.
        self.is_mean = optimizer is None
        #: Bytes of the parameters that are exchanged.
        self.bytes = sum(parameter.nbytes for parameter in self._trained)
        names, cuts = [*trained], divide([parameter.nbytes for parameter in self._trained], fragments)
        self.fragments = [_Fragment({names[index]: trained[names[index]] for index in cut}) for cut in cuts]
        #: Equal on workers that divide equal parameters alike.
        self.layout = [layout_fingerprint(self._buckets(fragment)) for fragment in self.fragments]
        #: What compresses outer gradients, by fragment; empty where nothing does.
        self.compressions: list[Compression] = []
        for fragment in self.fragments if team.size > 1 and not policy.changes_nothing else ():
            fragment.compression = Compression(policy, team, team.lane_groups[:1], seed, nodes)
            fragment.compression.cut(self._buckets(fragment))
            self.compressions.append(fragment.compression)
        self._buffers = buffers
        self._statistics = Statistics(buffers, team.rank, team.size)
        #: The buffers of the last exchange, by name.
        self._last_buffers: dict[str, Tensor] = {}
        #: The exchange that is under way.
        self.exchange: OuterExchange | None = None

    def _buckets(self, fragment: _Fragment) -> list[Bucket]:
        return make_buckets([*fragment.last.items()], self._bucket_bytes)

    @torch.no_grad()
    def begin(self) -> None:
        """The weights as they are now, which all workers have, are those of the last exchange; there is no momentum."""
        for fragment in self.fragments:
            fragment.begin(self._optimizer)
        self.exchange = None
        self._note_buffers()

    @torch.no_grad()
    def load_last(self) -> None:
        """Give parameters and buffers the values of the last exchange, which are equal on all workers."""
        for fragment in self.fragments:
            fragment.scatter()
        buffers = self._buffers()
        for name, before in self._last_buffers.items():
            buffers[name].copy_(before)

    # ------------------------------------------------------------- an exchange

    @torch.no_grad()
    def send(self, index: int, weight: float, report: Sequence[float] = (), *, plain: bool = False) -> None:
        """Send a fragment as it is now.

        The weight is this worker's samples since the last exchange of the fragment, in steps that counted. The numbers
        of the report are added up over the workers.
        """
        assert self.exchange is None
        if not all(parameter.requires_grad for parameter in self._trained):
            raise UsageError(
                "a parameter was frozen after the outer loop had begun",
                "What is exchanged is decided at the start.",
                "Freeze parameters before the Trainer is made.",
            )
        fragment = self.fragments[index]
        as_weights = fragment.compression is None and (plain or self.is_mean)
        message = torch.tensor([*report, weight], dtype=torch.float64, device=self._team.device)
        if index == len(self.fragments) - 1 and self._team.size > 1:  # with which the statistics go
            message = torch.cat((message, self._statistics.message(weight).to(message.device)))
        exchange = self.exchange = OuterExchange(index, message, len(report), plain, as_weights)
        flats = {bucket: fragment.collect(bucket, as_weights=as_weights) for bucket in self._buckets(fragment)}
        self._lane.wait(self._lanes.caller.record())
        self._lane.submit(lambda: self._carry(exchange, flats), uses=[*flats.values(), message])
        exchange.done = self._lane.record()

    @torch.no_grad()
    def _carry(self, exchange: OuterExchange, flats: Mapping[Bucket, Tensor]) -> None:
        """On the lane: agree on the weights, then add what was sent; of what is not finite zeros are sent."""
        team, coded = self._team, self.fragments[exchange.fragment].compression
        counted = exchange.message[exchange.head :]
        sound = exchange.sound = _are_finite([*flats.values(), counted])
        if sound.device.type != "cpu" or not sound:
            for part in (*flats.values(), counted):
                part.copy_(torch.where(sound, part, 0.0))
        weight = counted[0].clone()
        if team.size > 1:
            add = add_plainly if coded is None else coded.add
            with team.named_errors("exchanging outer gradients"):
                team.lane_groups[0].all_reduce(exchange.message)
                share = weight / counted[0].clamp(min=1.0)
                for bucket, flat in flats.items():
                    flat.mul_(share.to(flat.dtype))
                    exchange.costs.buckets[bucket.index] = add(bucket, flat, team.lane_groups[0])
        exchange.good = _are_finite([*flats.values()]) & (counted[0] > 0)

    @torch.no_grad()
    def arrive(self) -> OuterResult:
        """Take the outer step with the result of the exchange under way."""
        self.land()
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        good, fragment, message = bool(exchange.good), self.fragments[exchange.fragment], exchange.message
        if good:
            fragment.step(exchange)
        for weight in fragment.weights:
            weight.grad = None
        # Where it is not good the interval is lost: back to where all workers were. A worker that had no finite weights
        # takes those of the others.
        mixes = self._delayed and good and not exchange.plain and bool(exchange.sound)
        fragment.scatter(_STAYS if mixes else 0.0)
        report, (total, *_), statistics = message.tensor_split([exchange.head, exchange.head + 1])
        if good and exchange.fragment == len(self.fragments) - 1:
            if self._team.size > 1:
                self._statistics.load(statistics, float(total))
            self._note_buffers()
        sent = all_reduce_bytes(8 * message.numel(), self._team.size) + exchange.costs.sent
        return OuterResult(good, report.tolist(), exchange.costs, sent)

    def land(self) -> None:
        """Wait until what is under way is there, and let codecs keep what they did not send."""
        exchange = self.exchange
        if exchange is None or exchange.done is None:
            return
        self._lanes.caller.wait(exchange.done)
        exchange.done = None
        compression = self.fragments[exchange.fragment].compression
        if compression is not None:
            compression.settle(bool(exchange.good), costs=exchange.costs)

    def _note_buffers(self) -> None:
        now = {name: buffer.detach().clone() for name, buffer in self._buffers().items()}
        for name, before in self._last_buffers.items():
            if name in now and now[name].shape != before.shape:
                raise UsageError(
                    f"sync='outer:...' with {name}, a buffer that forward makes another size",
                    "Workers take the mean of their buffers, which needs equal sizes on all of them.",
                    "Use a buffer of fixed size, or exchange gradients in every step.",
                )
        self._last_buffers = now

    # ------------------------------------------------------------------- state

    def common_state(self) -> dict[str, Any]:
        """What is equal on all workers: the weights of the last exchange and the momentum, by name."""
        weights = ChainMap(*(fragment.last for fragment in self.fragments))
        momentum = ChainMap(*(fragment.momentum for fragment in self.fragments))
        return {"weights": copy_of(weights), "momentum": copy_of(momentum), "buffers": dict(self._last_buffers)}

    @torch.no_grad()
    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `common_state` returned, of parameters that are exchanged here; after `begin`."""
        for fragment in self.fragments:
            fragment.load(state)
        self._last_buffers |= {name: value for name, value in state["buffers"].items() if name in self._last_buffers}

    def state_dict(self) -> dict[str, Any]:
        """What this worker alone has: what its codecs keep, and the exchange under way, which is waited for."""
        self.land()
        codecs = {str(index): compression.state_dict() for index, compression in enumerate(self.compressions)}
        state: dict[str, Any] = {"layout": self.layout, "codecs": codecs}
        if self.exchange is not None:
            gradients = {name: weight.grad for name, weight in self.fragments[self.exchange.fragment].last.items()}
            exchange = {name: getattr(self.exchange, name) for name in _SAVED}
            state |= {"exchange": copy_of(exchange), "gradients": copy_of(gradients)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, where fragments are the same."""
        same, device = state if state.get("layout") == self.layout else {}, str(self._team.device)
        for index, compression in enumerate(self.compressions):
            compression.load_state_dict(same.get("codecs", {}).get(str(index), {}))
        self.exchange = OuterExchange(**copy_of(same["exchange"], device)) if "exchange" in same else None
        for name, gradient in copy_of(same.get("gradients", {}), device).items():
            next(fragment.last[name] for fragment in self.fragments if name in fragment.last).grad = gradient


def _check_codecs(policy: Policy) -> None:
    """Refuse codecs that are about gradients of single steps."""
    for codec in policy.codecs:
        if codec.keeps_momentum or not codec.gives_sums:
            raise UsageError(
                f"--compress {codec.name} with --sync outer:H",
                "It keeps momentum, or squares, of gradients of every step; an outer gradient is the progress of many.",
                "Use onebit, qsgd_mn:bits=4, topk or another codec that keeps none.",
            )


def _are_finite(parts: Sequence[Tensor]) -> Tensor:
    """Whether all elements of 1-D tensors are finite; 0-d."""
    return torch.stack([sum_of_squares(part).isfinite() for part in parts]).all()
