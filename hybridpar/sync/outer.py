"""The outer loop: exchanges what workers have learned in many steps, as outer gradients, and takes an outer step.

Every worker k trains on its own from the weights of the last exchange, th, to x_k. With w_k its share of the samples,

    D = sum_k w_k (th - x_k)                       the outer gradient
    mean:      th <- th - lr D                     local SGD (Stich 2019) with lr = 1
    nesterov:  m <- mu m + D                       DiLoCo (Douillard et al. 2023)
               th <- th - lr (D + mu m)
    x_k <- th, or where an exchange takes some steps: (x_k + th) / 2

D is sent by a codec with error feedback, or as it is. Where th becomes the plain mean, and no codec is used, the x_k
are sent themselves and their mean is assigned: th - (th - x) would round.

Parameters are divided into fragments, which are exchanged one after the other, on a lane of their own, so that training
can go on meanwhile (Streaming DiLoCo, Douillard et al. 2025). Every worker decodes the same bytes and does the same
arithmetic, so th is equal bit for bit on all of them. th is therefore what is tested and saved: that sends nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World, all_reduce_bytes
from hybridpar.compress import Policy, read_policy
from hybridpar.errors import UsageError
from hybridpar.lanes import Event, Lane, Lanes
from hybridpar.sync.buckets import Bucket, layout_fingerprint, make_buckets, sum_of_squares, view_like
from hybridpar.sync.compression import Compression, add_plainly
from hybridpar.sync.figures import SyncCosts
from hybridpar.sync.node_worlds import NodeWorlds
from hybridpar.sync.statistics import Statistics

#: Places in what workers add up at an exchange; sums over those of them whose steps counted, but for the last two.
LOSS, COUNTED, COUNTS, SQUARES, SAMPLES, STOP, SAVE, _WEIGHT, _HEAD = range(9)

#: Share of a worker's own weights where a result arrives steps after it was sent, as in Streaming DiLoCo.
_OWN_SHARE = 0.5


@dataclass(frozen=True)
class OuterStep:
    """What becomes of an outer gradient.

    Attributes:
        lr: Outer learning rate.
        momentum: Outer momentum, Nesterov's; 0 for a mean.
    """

    lr: float = 1.0
    momentum: float = 0.0

    @property
    def is_mean(self) -> bool:
        """Whether the new weights are the workers' mean."""
        return self.lr == 1 and self.momentum == 0

    def take(self, anchor: Tensor, moment: Tensor, gradient: Tensor) -> None:
        """Do the outer step of some parameters, in place.

        Args:
            anchor: th.
            moment: m; left alone without momentum.
            gradient: D.
        """
        anchor.add_(gradient, alpha=-self.lr)
        if self.momentum:
            anchor.add_(moment.mul_(self.momentum).add_(gradient), alpha=-self.lr * self.momentum)


@dataclass(frozen=True)
class Report:
    """What a worker tells the others at an exchange.

    Attributes:
        loss: Its mean loss in the last step.
        samples: Its samples in that step.
        squares: Squared norm of its gradient in it; below 0 where that is not known.
        committed: Whether the step counted.
        trained: Its samples since the last exchange of the fragment, in steps that counted: its weight.
        stop: It wants to stop.
        save: It wants a checkpoint.
    """

    loss: float
    samples: int
    squares: float
    committed: bool
    trained: int
    stop: bool = False
    save: bool = False

    def numbers(self) -> list[float]:
        """As they are added up."""
        known = self.committed and self.squares >= 0
        counted = self.samples if self.committed and self.loss - self.loss == 0 else 0
        loss = self.loss * counted if counted else 0.0
        squares = self.squares if known else 0.0
        return [loss, counted, float(known), squares, self.samples, float(self.stop), float(self.save), self.trained]


@dataclass
class Flight:
    """An exchange under way.

    Attributes:
        fragment: Which parameters.
        flats: What is sent, and then what came of it, by bucket.
        message: What workers add up: a head, then the statistics.
        plain: The result is the mean, whatever the optimizer.
        whole: Weights are sent, not outer gradients.
        sound: 1 where what this worker sent was finite, else 0; 0-d.
        good: Whether what came of it is finite, and somebody had samples; on all workers alike.
        costs: What it cost.
        done: Passed when the result is there; None where nothing was sent, or it has been waited for.
    """

    fragment: int
    flats: list[Tensor]
    message: Tensor
    plain: bool
    whole: bool
    sound: Tensor
    good: Tensor
    costs: SyncCosts = field(default_factory=SyncCosts)
    done: Event | None = None


class Arrival(NamedTuple):
    """What all workers know of an exchange.

    Attributes:
        good: Whether it counts.
        head: The numbers of their reports, added up.
        costs: What it cost this worker.
        sent: Bytes that this worker sent.
    """

    good: bool
    head: list[float]
    costs: SyncCosts
    sent: int


class _Fragment:
    """Some of the parameters, which are exchanged together."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], limit: int) -> None:
        self.buckets = make_buckets(parameters, limit)
        #: By bucket, 1-D.
        self.anchors: list[Tensor] = []
        self.moments: list[Tensor] = []
        self.compression: Compression | None = None

    def by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            slot.name: view_like(flat, slot).clone()
            for bucket, flat in zip(self.buckets, flats, strict=True)
            for slot in bucket.slots
        }

    def fill(self, flats: Sequence[Tensor], saved: Mapping[str, Tensor]) -> None:
        for bucket, flat in zip(self.buckets, flats, strict=True):
            for slot in bucket.slots:
                if slot.name in saved:
                    view_like(flat, slot).copy_(saved[slot.name])

    def parameters(self, index: int) -> list[Tensor]:
        return [slot.parameter for slot in self.buckets[index].slots]


def divide(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Divide tensors, in order, into parts of nearly equal bytes, none of them empty.

    Args:
        sizes: Bytes of each tensor, at least as many as parts.
        parts: Number of parts.

    Returns:
        Indices of each part.
    """
    total, sums = sum(sizes), 0
    result: list[list[int]] = [[]]
    for index, size in enumerate(sizes):
        left, wanted = len(sizes) - index, parts - len(result)
        full = result[-1] and (2 * sums + size) * parts > 2 * total * len(result)
        if wanted and result[-1] and (left <= wanted or full):
            result.append([])
        result[-1].append(index)
        sums += size
    return result


class OuterLoop:
    """Exchanges the parameters of workers that train on their own.

    The calls: `begin` when workers part; for each exchange `send` and, in the same step or some steps later, `arrive`.
    At most one exchange is on its way. All are made between steps, on all workers after the same one.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Callable[[], Mapping[str, Tensor]],
        team: World,
        lanes: Lanes,
        outer: OuterStep,
        fragments: int = 1,
        delayed: bool = False,
        policy: str | Policy = "none",
        seed: int = 0,
        nodes: NodeWorlds | None = None,
        bucket_bytes: int = 8 << 20,
    ) -> None:
        self._team = team
        self._lanes = lanes
        self.step = outer
        self._delayed = delayed
        self._lane: Lane | None = lanes.open("outer", priority=-1) if team.size > 1 else None
        policy = read_policy(policy) if isinstance(policy, str) else policy
        self._compresses = not policy.changes_nothing and team.size > 1
        check_outer_policy(policy)
        trained = [(name, one) for name, one in parameters.items() if one.is_floating_point() and one.requires_grad]
        if len(trained) < fragments:
            raise UsageError(
                f"fragments={fragments} of {len(trained)} parameters",
                "A fragment holds one parameter at least.",
                f"Use fragments={max(1, len(trained))}, or fewer.",
            )
        self._trained = [one for _, one in trained]
        cuts = divide([one.numel() * one.element_size() for _, one in trained], fragments) if trained else [[]]
        self._fragments = [_Fragment([trained[index] for index in cut], bucket_bytes) for cut in cuts]
        self._buffers = buffers
        self._statistics = Statistics(buffers, team.rank, team.size)
        #: The buffers of the last exchange, by name.
        self._kept: dict[str, Tensor] = {}
        if self._compresses:
            for fragment in self._fragments:
                fragment.compression = Compression(policy, team, team.lane_groups[:1], seed, nodes)
                fragment.compression.cut(fragment.buckets)
        #: The exchange that is under way.
        self.flight: Flight | None = None

    @property
    def fingerprint(self) -> str:
        """Equal on workers that divide equal parameters alike."""
        layouts = [layout_fingerprint(fragment.buckets) for fragment in self._fragments]
        return hashlib.sha256(repr(layouts).encode()).hexdigest()[:16]

    @property
    def bytes(self) -> int:
        """Of the parameters that are exchanged."""
        return sum(bucket.bytes for fragment in self._fragments for bucket in fragment.buckets)

    @property
    def compressions(self) -> list[Compression]:
        """What compresses outer gradients, by fragment; empty where nothing does."""
        return [one.compression for one in self._fragments if one.compression is not None]

    @property
    def fragments(self) -> list[list[str]]:
        """Names of the parameters of each fragment."""
        return [[slot.name for bucket in one.buckets for slot in bucket.slots] for one in self._fragments]

    @torch.no_grad()
    def begin(self) -> None:
        """The weights as they are now, which all workers have, are those of the last exchange; there is no momentum."""
        self.reset_anchors()
        for fragment in self._fragments if self.step.momentum else ():
            fragment.moments = [torch.zeros_like(one) for one in fragment.anchors]

    @torch.no_grad()
    def load_last(self) -> None:
        """Give parameters and buffers the values of the last exchange, which are equal on all workers."""
        for fragment in self._fragments:
            for index, anchor in enumerate(fragment.anchors):
                self._scatter(fragment, index, anchor)
        buffers = self._buffers()
        for name, before in self._kept.items():
            buffers[name].copy_(before)

    # ------------------------------------------------------------- an exchange

    @torch.no_grad()
    def send(self, index: int, report: Report, *, plain: bool = False) -> None:
        """Send a fragment as it is now."""
        assert self.flight is None
        if not all(one.requires_grad for one in self._trained):
            raise UsageError(
                "a parameter was frozen after the outer loop had begun",
                "What is exchanged is decided at the start.",
                "Freeze parameters before the Trainer is made.",
            )
        fragment = self._fragments[index]
        whole = fragment.compression is None and (plain or self.step.is_mean)
        flats = [self._gather(fragment, number) for number in range(len(fragment.buckets))]
        if not whole:
            torch._foreach_neg_(flats)
            torch._foreach_add_(flats, fragment.anchors)
        device = self._team.device
        head = torch.tensor(report.numbers(), dtype=torch.float64).to(device)
        message = torch.cat((head, self._message_of(index, report.trained).to(device)))
        sound, good = (torch.ones((), dtype=torch.float64, device=device) for _ in range(2))
        flight = self.flight = Flight(index, flats, message, plain, whole, sound, good)
        if self._lane is None:
            self._weigh(flight)
            self._judge(flight)
            return
        lane = self._lane
        lane.wait(self._lanes.caller.record())
        lane.submit(lambda: self._exchange(fragment, flight), uses=[*flats, message, sound, good])
        flight.done = lane.record()

    def _message_of(self, index: int, weight: int) -> Tensor:
        """The statistics that go with a fragment."""
        if index < len(self._fragments) - 1 or self._team.size == 1:
            return torch.zeros(0, dtype=torch.float64)
        return self._statistics.message(float(weight))

    def _exchange(self, fragment: _Fragment, flight: Flight) -> None:
        """On the lane: agree on the weights, then add what was sent."""
        team, group = self._team, self._team.lane_groups[0]
        with torch.no_grad(), team.named_errors("exchanging outer gradients"):
            own = self._weigh(flight)
            group.all_reduce(flight.message)
            share = own / flight.message[_WEIGHT].clamp(min=1.0)
            for bucket, flat in zip(fragment.buckets, flight.flats, strict=True):
                flat.mul_(share.to(flat.dtype))
                if fragment.compression is not None:
                    cost = fragment.compression.add(bucket, flat, group)
                else:
                    cost = add_plainly(bucket, flat, group, team.size)
                flight.costs.buckets[bucket.index] = cost
            self._judge(flight)

    def _weigh(self, flight: Flight) -> Tensor:
        """This worker's weight, 0-d: 0 where its part is not finite, of which zeros are sent then."""
        sound, statistics = flight.sound, flight.message[_HEAD:]
        for part in (*flight.flats, statistics):
            sound.mul_(torch.isfinite(sum_of_squares(part)).to(sound))
        if sound.device.type != "cpu" or not float(sound):
            for part in (*flight.flats, statistics):
                part.copy_(torch.where(sound > 0, part, torch.zeros_like(part)))
            flight.message[_WEIGHT].mul_(sound)
        return flight.message[_WEIGHT].clone()

    def _judge(self, flight: Flight) -> None:
        """Note whether what came of an exchange can be used."""
        flight.good.copy_(flight.message[_WEIGHT] > 0)
        for flat in flight.flats:
            flight.good.mul_(torch.isfinite(sum_of_squares(flat)).to(flight.good))

    @torch.no_grad()
    def arrive(self) -> Arrival:
        """Take the outer step with the result of the exchange under way."""
        self.land()
        flight, self.flight = self.flight, None
        assert flight is not None
        good, sound, fragment = bool(flight.good), bool(flight.sound), self._fragments[flight.fragment]
        if good:
            self._take_step(fragment, flight, sound)
        else:  # the interval is lost: back to where all workers were
            for number, anchor in enumerate(fragment.anchors):
                self._scatter(fragment, number, anchor)
        if good and flight.fragment == len(self._fragments) - 1:  # with which the statistics go
            if self._team.size > 1 and flight.message.numel() > _HEAD:
                self._statistics.load(flight.message[_HEAD:], float(flight.message[_WEIGHT]))
            self._keep_buffers()
        sent = all_reduce_bytes(8 * flight.message.numel(), self._team.size) + flight.costs.sent
        return Arrival(good, flight.message[:_HEAD].tolist(), flight.costs, sent)

    def land(self) -> None:
        """Wait until what is under way is there, and let codecs keep what they did not send."""
        flight = self.flight
        if flight is None or flight.done is None:
            return
        self._lanes.caller.wait(flight.done)
        flight.done = None
        compression = self._fragments[flight.fragment].compression
        if compression is not None:
            compression.settle(bool(flight.good), costs=flight.costs)

    def _take_step(self, fragment: _Fragment, flight: Flight, sound: bool) -> None:
        outer = OuterStep() if flight.plain else self.step
        for number, flat in enumerate(flight.flats):
            result = flat
            if flight.whole:
                fragment.anchors[number].copy_(flat)
            else:
                result = fragment.anchors[number]
                outer.take(result, fragment.moments[number] if fragment.moments else flat, flat)
            # A worker that had no finite weights of its own takes those of the others.
            mixes = self._delayed and sound and not flight.plain
            self._scatter(fragment, number, result, _OWN_SHARE if mixes else 0.0)

    # ------------------------------------------------------------------ memory

    def _gather(self, fragment: _Fragment, index: int) -> Tensor:
        """The parameters of a bucket in new memory, 1-D."""
        bucket = fragment.buckets[index]
        first = bucket.slots[0].parameter
        flat = torch.empty(bucket.numel, dtype=first.dtype, device=first.device)
        torch._foreach_copy_(_views(bucket, flat), fragment.parameters(index))
        return flat

    def _scatter(self, fragment: _Fragment, index: int, flat: Tensor, own: float = 0.0) -> None:
        """Give the parameters of a bucket new values, of which a share are their own."""
        parameters, views = fragment.parameters(index), _views(fragment.buckets[index], flat)
        if own:
            torch._foreach_lerp_(parameters, views, 1.0 - own)
        else:
            torch._foreach_copy_(parameters, views)

    # ------------------------------------------------------------------- state

    def common_state(self) -> dict[str, Any]:
        """What is equal on all workers: the weights of the last exchange and the momentum, by name."""
        state: dict[str, Any] = {"anchors": {}, "momentum": {}, "buffers": dict(self._kept)}
        for fragment in self._fragments:
            state["anchors"] |= fragment.by_name(fragment.anchors)
            state["momentum"] |= fragment.by_name(fragment.moments) if fragment.moments else {}
        return state

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `common_state` returned, of parameters that are exchanged here; after `begin`."""
        for fragment in self._fragments:
            fragment.fill(fragment.anchors, state["anchors"])
            if fragment.moments:
                fragment.fill(fragment.moments, state["momentum"])
        self._kept |= {name: state["buffers"][name] for name in self._kept if name in state["buffers"]}

    @torch.no_grad()
    def reset_anchors(self) -> None:
        """The weights as they are now are those of the last exchange; momentum stays."""
        self.flight = None
        for fragment in self._fragments:
            fragment.anchors = [self._gather(fragment, index) for index in range(len(fragment.buckets))]
        self._keep_buffers()

    def _keep_buffers(self) -> None:
        now = {name: one.detach().clone() for name, one in self._buffers().items()}
        changed = [name for name, before in self._kept.items() if name in now and now[name].shape != before.shape]
        if changed:
            raise UsageError(
                f"sync='outer:...' with {changed[0]}, a buffer that forward makes another size",
                "Workers take the mean of their buffers, which needs one size on all of them.",
                "Use a buffer of one size, or exchange gradients in every step.",
            )
        self._kept = now

    def state_dict(self) -> dict[str, Any]:
        """What this worker alone has: what its codecs keep, and the exchange under way, which is waited for."""
        self.land()
        codecs = {
            str(index): one.compression.state_dict()
            for index, one in enumerate(self._fragments)
            if one.compression is not None
        }
        state: dict[str, Any] = {"map": self.fingerprint, "codecs": codecs}
        if (flight := self.flight) is not None:
            names = ("fragment", "plain", "whole")
            state["flight"] = {name: getattr(flight, name) for name in names} | {
                "flats": [one.clone() for one in flight.flats],
                "message": flight.message.clone(),
                "sound": flight.sound.clone(),
                "good": flight.good.clone(),
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Of other fragments, only what codecs keep."""
        self.flight = None
        same = state.get("map") == self.fingerprint
        for index, fragment in enumerate(self._fragments):
            if fragment.compression is not None:
                saved = state.get("codecs", {}).get(str(index), {}) if same else {}
                fragment.compression.load_state_dict(saved)
        if same and "flight" in state:
            device = self._team.device
            moved: dict[str, Any] = {
                name: one.to(device) if isinstance(one, Tensor) else one for name, one in state["flight"].items()
            }
            moved["flats"] = [one.to(device) for one in moved["flats"]]
            self.flight = Flight(**moved)


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


def _views(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    return [view_like(flat, slot) for slot in bucket.slots]
