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
"""

from __future__ import annotations

import hashlib
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.compress import Policy, read_policy
from hybridpar.compress.nodes import NodeWorlds
from hybridpar.errors import UsageError
from hybridpar.lanes import Event, Lanes
from hybridpar.models.state_dicts import copy_of
from hybridpar.sync.buckets import layout_fingerprint, make_buckets, sum_of_squares, view_like
from hybridpar.sync.compression import Compression, add_plainly
from hybridpar.sync.figures import SyncCosts
from hybridpar.sync.statistics import Statistics

#: Makes what takes the outer steps, of the weights of the last exchange.
OuterOptimizer: TypeAlias = Callable[[list[Tensor]], torch.optim.Optimizer]

#: Share of a worker's weights that stays where a result arrives steps after it was sent, as in Streaming DiLoCo.
_STAYS = 0.5

#: What of an exchange under way is saved.
_SAVED = ("fragment", "flats", "message", "plain", "whole", "sound", "good")


class OuterReport(NamedTuple):
    """What a worker says of its last step at an exchange, in numbers that are added up.

    Attributes:
        loss: Its mean loss, times the samples that count in it.
        counted: Those samples: of a step that counted, with a finite loss.
        norms: 1 where the norm of its gradient is known.
        squares: That norm, squared.
        samples: All its samples.
        stop: 1 where it wants to stop.
        save: 1 where it wants a checkpoint.
        weight: Its samples since the last exchange of the fragment, in steps that counted.
    """

    loss: float
    counted: float
    norms: float
    squares: float
    samples: float
    stop: float
    save: float
    weight: float

    @classmethod
    def of(cls, loss: float, samples: int, squares: float, committed: bool, weight: int, *wishes: bool) -> OuterReport:
        """The report of a step; squares are below 0 where they are not known. Wishes are to stop, and to save."""
        counted = samples if committed and math.isfinite(loss) else 0
        known = committed and squares >= 0
        norm = (1, squares) if known else (0, 0.0)
        stop, save = wishes or (False, False)
        return cls(loss * counted if counted else 0.0, counted, *norm, samples, stop, save, weight)


_HEAD = len(OuterReport._fields)
_WEIGHT = OuterReport._fields.index("weight")


@dataclass
class OuterExchange:
    """An exchange under way.

    Attributes:
        fragment: Number of the fragment.
        flats: What is sent, and then what came of it, by bucket.
        message: What workers add up: reports, then the statistics.
        plain: The result is the mean, whatever the optimizer.
        whole: Weights are sent, not outer gradients.
        sound: Whether what this worker sent was finite.
        good: Whether what came of it is finite, and somebody had samples; on all workers alike.
        costs: What it cost.
        done: Passed when the result is there; None where it has been waited for.
    """

    fragment: int
    flats: list[Tensor]
    message: Tensor
    plain: bool
    whole: bool
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
    report: OuterReport
    costs: SyncCosts
    sent: int


class _Fragment:
    """Some of the parameters, which are exchanged together."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], limit: int) -> None:
        self.buckets = make_buckets(parameters, limit)
        self.parameters: list[Tensor] = [slot.parameter for bucket in self.buckets for slot in bucket.slots]
        #: Weights of the last exchange, and the optimizer's momentum if it has any; by bucket, 1-D.
        self.anchors: list[Tensor] = []
        self.moments: list[Tensor] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.compression: Compression | None = None

    def begin(self, make: OuterOptimizer | None) -> None:
        """The weights as they are now are those of the last exchange; there is no momentum."""
        self.anchors = self.gather()
        if make is None or not self.anchors:
            return
        self.optimizer = make(self.anchors)
        if self.optimizer.defaults.get("momentum"):
            self.moments = [torch.zeros_like(anchor) for anchor in self.anchors]
            for anchor, moment in zip(self.anchors, self.moments, strict=True):
                self.optimizer.state[anchor]["momentum_buffer"] = moment

    def views(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Parts of the flat tensors of all buckets, as the parameters that they stand for; of none nothing."""
        pairs = [(slot, flat) for bucket, flat in zip(self.buckets, flats, strict=False) for slot in bucket.slots]
        return {slot.name: view_like(flat, slot) for slot, flat in pairs}

    def gather(self) -> list[Tensor]:
        """The parameters in new memory, by bucket, 1-D."""
        flats = [bucket.slots[0].parameter.new_empty(bucket.numel) for bucket in self.buckets]
        torch._foreach_copy_(list(self.views(flats).values()), self.parameters)
        return flats

    def scatter(self, stays: float = 0.0) -> None:
        """Give the parameters the weights of the exchange, but for a share of what they are."""
        views = list(self.views(self.anchors).values())
        if stays:
            torch._foreach_lerp_(self.parameters, views, 1.0 - stays)
        else:
            torch._foreach_copy_(self.parameters, views)

    def step(self, gradients: list[Tensor], *, plain: bool) -> None:
        """Take the optimizer's step; a plain step is that to the mean, as is any without an optimizer."""
        if plain or self.optimizer is None:
            torch._foreach_sub_(self.anchors, gradients)
            return
        for anchor, gradient in zip(self.anchors, gradients, strict=True):
            anchor.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()


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
        optimizer: OuterOptimizer | None = None,
        fragments: int = 1,
        delayed: bool = False,
        policy: str | Policy = "none",
        seed: int = 0,
        nodes: NodeWorlds | None = None,
        bucket_bytes: int = 8 << 20,
    ) -> None:
        self._team, self._lanes = team, lanes
        self._optimizer, self._delayed = optimizer, delayed
        #: Whether the new weights are the workers' mean.
        self.is_mean = optimizer is None
        self._lane = lanes.open("outer", priority=-1)
        policy = read_policy(policy) if isinstance(policy, str) else policy
        check_outer_policy(policy)
        trained = [(name, p) for name, p in parameters.items() if p.is_floating_point() and p.requires_grad]
        if len(trained) < fragments:
            raise UsageError(
                f"fragments={fragments} of {len(trained)} parameters",
                "A fragment holds a parameter at least.",
                f"Use fragments={max(1, len(trained))}, or fewer.",
            )
        cuts = divide([p.numel() * p.element_size() for _, p in trained], fragments) if trained else [[]]
        self.fragments = [_Fragment([trained[index] for index in cut], bucket_bytes) for cut in cuts]
        self._buffers = buffers
        self._statistics = Statistics(buffers, team.rank, team.size)
        #: The buffers of the last exchange, by name.
        self._last_buffers: dict[str, Tensor] = {}
        for fragment in self.fragments if team.size > 1 and not policy.changes_nothing else ():
            fragment.compression = Compression(policy, team, team.lane_groups[:1], seed, nodes)
            fragment.compression.cut(fragment.buckets)
        #: The exchange that is under way.
        self.exchange: OuterExchange | None = None

    @property
    def fingerprint(self) -> str:
        """Equal on workers that divide equal parameters alike."""
        layouts = [layout_fingerprint(fragment.buckets) for fragment in self.fragments]
        return hashlib.sha256(repr(layouts).encode()).hexdigest()[:16]

    @property
    def bytes(self) -> int:
        """Of the parameters that are exchanged."""
        return sum(bucket.bytes for fragment in self.fragments for bucket in fragment.buckets)

    @property
    def compressions(self) -> list[Compression]:
        """What compresses outer gradients, by fragment; empty where nothing does."""
        return [fragment.compression for fragment in self.fragments if fragment.compression is not None]

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
    def send(self, index: int, report: OuterReport, *, plain: bool = False) -> None:
        """Send a fragment as it is now."""
        assert self.exchange is None
        if not all(parameter.requires_grad for fragment in self.fragments for parameter in fragment.parameters):
            raise UsageError(
                "a parameter was frozen after the outer loop had begun",
                "What is exchanged is decided at the start.",
                "Freeze parameters before the Trainer is made.",
            )
        fragment = self.fragments[index]
        whole = fragment.compression is None and (plain or self.is_mean)
        flats = fragment.gather()
        if not whole:
            torch._foreach_neg_(flats)
            torch._foreach_add_(flats, fragment.anchors)
        parts = [torch.tensor(report, dtype=torch.float64)]
        if index == len(self.fragments) - 1 and self._team.size > 1:  # with which the statistics go
            parts.append(self._statistics.message(report.weight))
        message = torch.cat([part.to(self._team.device) for part in parts])
        exchange = self.exchange = OuterExchange(index, flats, message, plain, whole)
        self._lane.wait(self._lanes.caller.record())
        self._lane.submit(lambda: self._carry(fragment, exchange), uses=[*flats, message])
        exchange.done = self._lane.record()

    @torch.no_grad()
    def _carry(self, fragment: _Fragment, exchange: OuterExchange) -> None:
        """On the lane: agree on the weights, then add what was sent; of what is not finite zeros are sent."""
        team, flats, message = self._team, exchange.flats, exchange.message
        sound = exchange.sound = _are_finite([*flats, message[_WEIGHT:]])
        if sound.device.type != "cpu" or not sound:
            for part in (*flats, message[_WEIGHT:]):
                part.copy_(torch.where(sound, part, 0.0))
        weight = message[_WEIGHT].clone()
        if team.size > 1:
            with team.named_errors("exchanging outer gradients"):
                team.lane_groups[0].all_reduce(message)
                share = weight / message[_WEIGHT].clamp(min=1.0)
                coded = fragment.compression
                add = partial(add_plainly, workers=team.size) if coded is None else coded.add
                for bucket, flat in zip(fragment.buckets, flats, strict=True):
                    flat.mul_(share.to(flat.dtype))
                    exchange.costs.buckets[bucket.index] = add(bucket, flat, team.lane_groups[0])
        exchange.good = _are_finite(flats) & (message[_WEIGHT] > 0)

    @torch.no_grad()
    def arrive(self) -> OuterResult:
        """Take the outer step with the result of the exchange under way."""
        self.land()
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        good, fragment, message = bool(exchange.good), self.fragments[exchange.fragment], exchange.message
        report = OuterReport(*message[:_HEAD].tolist())
        if good and exchange.whole:
            torch._foreach_copy_(fragment.anchors, exchange.flats)
        elif good:
            fragment.step(exchange.flats, plain=exchange.plain)
        # Where it is not good the interval is lost: back to where all workers were. A worker that had no finite weights
        # takes those of the others.
        mixes = self._delayed and good and not exchange.plain and bool(exchange.sound)
        fragment.scatter(_STAYS if mixes else 0.0)
        if good and exchange.fragment == len(self.fragments) - 1:
            if message.numel() > _HEAD:
                self._statistics.load(message[_HEAD:], report.weight)
            self._note_buffers()
        sent = all_reduce_bytes(8 * message.numel(), self._team.size) + exchange.costs.sent
        return OuterResult(good, report, exchange.costs, sent)

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

    # ------------------------------------------------------------------- state

    def common_state(self) -> dict[str, Any]:
        """What is equal on all workers: the weights of the last exchange and the momentum, by name."""
        anchors = ChainMap(*(fragment.views(fragment.anchors) for fragment in self.fragments))
        momentum = ChainMap(*(fragment.views(fragment.moments) for fragment in self.fragments))
        return {"anchors": copy_of(anchors), "momentum": copy_of(momentum), "buffers": dict(self._last_buffers)}

    @torch.no_grad()
    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `common_state` returned, of parameters that are exchanged here; after `begin`."""
        for fragment in self.fragments:
            for key, flats in (("anchors", fragment.anchors), ("momentum", fragment.moments)):
                for name, view in fragment.views(flats).items():
                    view.copy_(state[key].get(name, view))
        self._last_buffers |= {name: value for name, value in state["buffers"].items() if name in self._last_buffers}

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

    def state_dict(self) -> dict[str, Any]:
        """What this worker alone has: what its codecs keep, and the exchange under way, which is waited for."""
        self.land()
        codecs = {str(index): compression.state_dict() for index, compression in enumerate(self.compressions)}
        state: dict[str, Any] = {"map": self.fingerprint, "codecs": codecs}
        if self.exchange is not None:
            state["exchange"] = copy_of({name: getattr(self.exchange, name) for name in _SAVED})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Of other fragments, only what codecs keep."""
        same = state.get("map") == self.fingerprint
        for index, compression in enumerate(self.compressions):
            compression.load_state_dict(state.get("codecs", {}).get(str(index), {}) if same else {})
        saved = state.get("exchange") if same else None
        self.exchange = None if saved is None else OuterExchange(**copy_of(saved, str(self._team.device)))


def check_outer_policy(policy: Policy) -> None:
    """Refuse codecs that are about gradients of single steps."""
    for rule in policy.rules:
        core = rule.codec.core
        if core.keeps_momentum or not core.gives_sums:
            raise UsageError(
                f"--compress {core.name} with --sync outer:H",
                "It keeps the momentum of gradients of every step; an outer gradient is the progress of many.",
                "Use onebit, qsgd_mn:bits=4, topk or another codec that keeps none.",
            )


def _are_finite(parts: Sequence[Tensor]) -> Tensor:
    """Whether all elements of 1-D tensors are finite; 0-d."""
    sums = [sum_of_squares(part).isfinite() for part in parts]
    return torch.stack(sums).all() if sums else torch.tensor(True)
