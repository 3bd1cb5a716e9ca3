"""A worker's connections to all servers, which it asks at the same time, each on a thread.

Without a barrier, a worker whose connection breaks connects again and repeats its push under the same number, and the
shard knows whether it has seen it. So a push is applied exactly once.

A checkpoint holds a model and its optimizer by parameter name, whatever the shards are. So a run on servers can be
resumed on other servers, on more or fewer of them, or on none, and the other way round. What belongs to shards alone
(clocks, counts) lies beside it and is used where the shards are the same.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.handshake import HandshakeError, knock
from hybridpar.comm.transport import flat_view
from hybridpar.compress import check_optimizer, read_policy
from hybridpar.config import TrainConfig
from hybridpar.errors import SyncError
from hybridpar.models import learning_rate_scales, model_fingerprint
from hybridpar.models.state_dicts import copy_of
from hybridpar.optim.build import build_optimizer, counters_of
from hybridpar.server import wire
from hybridpar.server.encoding import PushEncoder
from hybridpar.server.rules import Clipping
from hybridpar.server.shard import StepRow
from hybridpar.server.stripes import (
    Piece,
    Stripe,
    cut_model,
    described_parameters,
    flat_buffers,
    needs_whole_parameters,
    piece_views,
    put_buffers,
    trained_parameters,
)


class ServerLink:
    """A worker's way to a server, `name` in messages; `hello` is what the worker says when it comes."""

    def __init__(
        self,
        name: str,
        address: str,
        token: str,
        config: TrainConfig,
        hello: wire.Hello,
        stripe: Stripe,
        tensors: Mapping[str, Tensor],
    ) -> None:
        assert config.parameter_servers is not None
        self._returns = not config.parameter_servers.waits_for_all
        self._name, self._address, self._token, self._timeout = name, address, token, config.timeout
        self.hello, self.stripe = hello, stripe
        self.encoder = PushEncoder(read_policy(config.compress), stripe)
        self._views = piece_views(stripe, tensors)
        self._connection: wire.Connection | None = None
        #: Bytes sent and received.
        self.traffic = [0, 0]
        self._closed = False
        self.clock = self.sequence = 0
        #: Running statistics as they came last.
        self.statistics = torch.empty(0)

    def push(self, push: wire.Gradient, gradients: Sequence[Tensor]) -> Any:
        """Push a gradient, and wait for the weights, or for what is to be added up before."""
        self.sequence += 1
        pieces, states = self.encoder.encode(gradients)
        message = replace(push, sequence=self.sequence, clock=self.clock, pieces=pieces, states=states)
        return self.ask(message, again=self._returns)  # computed on the weights of its clock, whenever it arrives

    def ask(self, message: wire.ServerMessage, *, again: bool = False) -> Any:
        """What the server answers; where the connection breaks, the worker may come and ask again."""
        try:
            try:
                return self._ask(message)
            except (OSError, wire.Garbled):
                if self._closed or not again:
                    raise
                if self._connection is not None:
                    self._connection.end()
                    self._connection = None
                self._ask(replace(self.hello, pushes=self.sequence))
                return self._ask(message)
        except (OSError, wire.Garbled, HandshakeError) as error:
            silent = isinstance(error, TimeoutError)
            reason = f"did not answer within {self._timeout:g} s" if silent else f"is gone ({error})"
            raise SyncError(
                f"shard {self._name} at {self._address} {reason}, and worker {self.hello.worker} needs it",
                "Each shard holds a stripe of the parameters that exists nowhere else.",
                "A launched job restarts from its last checkpoint; else start it again with --resume.",
            ) from error

    def dismiss(self) -> None:
        """Have a server end to which no worker comes: all that it hears is the goodbye of `close`."""
        with contextlib.suppress(OSError, wire.Garbled, HandshakeError):  # it has ended already
            self._connect()

    def close(self, *, graceful: bool = True) -> None:
        """Leave."""
        self._closed = True
        if self._connection is not None:
            with contextlib.suppress(OSError):
                if graceful:
                    self._connection.send(wire.Bye())
            self._connection.end()

    def _connect(self) -> wire.Connection:
        if self._connection is None:
            host, _, port = self._address.rpartition(":")
            connected = socket.create_connection((host, int(port)), self._timeout)
            self._connection = wire.Connection(connected, self._timeout, self._timeout, traffic=self.traffic)
            knock(connected, self._token, self._address)
        return self._connection

    @torch.no_grad()
    def _ask(self, message: wire.ServerMessage) -> Any:
        connection = self._connect()
        with contextlib.suppress(ConnectionError):  # a server that has ended has said why
            connection.send(message)
        while isinstance(answer := connection.receive(1 << 62), wire.Wait):
            pass
        if isinstance(answer, wire.Refused):
            raise answer.error
        if isinstance(answer, wire.Weights):
            self.clock, self.statistics = answer.clock, answer.statistics
            if answer.values is not None:
                for view, (first, last) in zip(self._views, self.stripe.ranges, strict=True):
                    view.copy_(answer.values[first:last])
            if answer.applied:
                self.encoder.commit()
        return answer


class Servers:
    """The servers as a worker sees them; `config` has no recipe."""

    def __init__(
        self, model: nn.Module, config: TrainConfig, worker: int, addresses: Sequence[str], token: str
    ) -> None:
        assert config.parameter_servers is not None
        #: This worker's number, and whether all workers are in step.
        self.worker, self.barrier = worker, config.parameter_servers.waits_for_all
        policy, trained = read_policy(config.compress), trained_parameters(model)
        policy.check(list(trained))
        optimizer = build_optimizer(model, config)
        for codec in policy.codecs:
            check_optimizer(codec, optimizer)
        self.clipping = Clipping.of(config, model, optimizer)
        #: Name of the optimizer's class, by which checkpoints know its state.
        self.kind = type(optimizer).__name__
        groups = config.optim.groups
        scales = learning_rate_scales(model, groups.layer_decay, groups.head_lr) if groups.scales_rates else None
        described, uncut = described_parameters(model, groups), needs_whole_parameters(config)
        self.stripes = cut_model(described, len(addresses), scales, uncut=uncut)
        #: Where weights arrive, by name: in the parameters, or for those of a GPU in memory of the host.
        self.host: dict[str, Tensor] = {
            name: held.data if held.device.type == "cpu" else torch.empty_like(held.data, device="cpu").pin_memory()
            for name, held in trained.items()
        }
        known = f"{model_fingerprint(model)} {flat_buffers(model).numel()}"
        self.links = []
        for number, (address, stripe) in enumerate(zip(addresses, self.stripes, strict=True)):
            name, model_and_stripe = f"{number} of {len(addresses)}", f"{known} {stripe.fingerprint}"
            hello = wire.Hello(worker=worker, model=model_and_stripe, policy=str(policy))
            self.links.append(ServerLink(name, address, token, config, hello, stripe, self.host))
        self._threads = ThreadPoolExecutor(len(self.links), thread_name_prefix="server")
        #: Step up to which this worker has heard what the steps did; None where it is not to hear.
        self.heard: int | None = None
        #: Squared norm of the last gradient of all workers, where it was added up.
        self.squares: float | None = None

    def come(self, starts: Callable[[], Sequence[wire.Start]] | None = None) -> wire.Weights:
        """Come to all servers, and wait until they have weights; what shard 0 said.

        Worker 0 makes what servers without weights start with.
        """
        answers = self._all(lambda link: link.ask(link.hello))
        if starts is not None and any(isinstance(answer, wire.Missing) for answer in answers):

            def start(link: ServerLink, answer: Any, start: wire.Start) -> Any:
                return link.ask(start) if isinstance(answer, wire.Missing) else answer

            answers = self._all(start, answers, starts())
        first: wire.Weights = answers[0]
        return first

    def push(self, pushes: Sequence[wire.Gradient], gradients: Sequence[Sequence[Tensor]]) -> wire.Weights:
        """Push a gradient, for each server its part, and wait for the weights of all; what shard 0 said."""
        self.squares = None
        answers = self._all(ServerLink.push, pushes, gradients)
        if any(isinstance(answer, wire.Squares) for answer in answers):
            self.squares = squares = sum(answer.squares for answer in answers)
            answers = self._all(lambda link: link.ask(wire.Squares(squares=squares)))
        first: wire.Weights = answers[0]
        self._note(first.rows)
        return first

    def states(self) -> list[wire.ShardState]:
        """All that a checkpoint keeps of each shard."""
        # Servers may have closed connections while this worker was testing, as others waited for it.
        answers = self._all(lambda link: link.ask(wire.AskState(heard=self.heard), again=not self.barrier))
        self._note(answers[0].rows)
        return answers

    def gather(self, tag: str, item: object) -> dict[int, Any]:
        """Tell all workers something, and hear what they say under the same tag, over shard 0."""
        message = wire.GatherItem(tag=tag, item=item)
        gathered: wire.GatheredItems = self.links[0].ask(message, again=not self.barrier)
        return gathered.items

    def _note(self, rows: Sequence[StepRow]) -> None:
        self.heard = rows[-1].step if rows else self.heard

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received."""
        sent, received = zip(*(link.traffic for link in self.links), strict=True)
        return sum(sent), sum(received)

    def close(self, *, graceful: bool = True) -> None:
        """Leave all servers. Where nothing was to be trained worker 0 comes for that, so that they end."""
        if graceful and self.worker == 0:
            self._all(ServerLink.dismiss)
        for link in self.links:
            link.close(graceful=graceful)
        self._threads.shutdown()

    def _all(self, call: Callable[..., Any], *parts: Sequence[Any]) -> list[Any]:
        """The results of a call for each server, with its parts of the arguments."""
        return list(self._threads.map(call, self.links, *parts))


#: What a checkpoint has of a shard beside the parameters and the optimizer.
_PROGRESS = ("clock", "taken", "histogram")


def shard_starts(
    model: nn.Module,
    servers: Servers,
    *,
    limit: int,
    optimizer: Mapping[str, Any] | None = None,
    progress: Sequence[Mapping[str, Any]] = (),
    taken: int = 0,
    clock: int = 0,
) -> list[wire.Start]:
    """What each shard is to begin with."""
    parameters = {name: held.detach() for name, held in trained_parameters(model).items()}
    saved = (optimizer or {}).get("state", {})
    counters = {name: counters_of(group) for group in (optimizer or {}).get("groups", ()) for name in group["names"]}
    starts = []
    for number, stripe in enumerate(servers.stripes):
        counts = {"clock": clock, "histogram": {}} if len(progress) != len(servers.stripes) else progress[number]
        state = {
            "values": torch.cat([view.to("cpu", copy=True) for view in piece_views(stripe, parameters)]),
            "statistics": torch.empty(0) if number else flat_buffers(model),
            "optimizer": [_cut(saved.get(piece.name, {}), parameters[piece.name], piece) for piece in stripe.pieces],
            "counters": [counters.get(piece.name, {}) for piece in stripe.pieces],
            **counts,
            "taken": taken,
        }
        rest = {} if number else copy_of({k: v for k, v in model.state_dict().items() if k not in parameters}, "cpu")
        pieces, clipping = list(stripe.pieces), servers.clipping
        starts.append(wire.Start(pieces=pieces, state=state, clipping=clipping, limit=limit, rest=rest))
    return starts


def merged_states(
    model: nn.Module, stripes: Sequence[Stripe], states: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Put the shards' states together: weights and statistics into the model; the optimizer's, and progress."""
    if states[0]["statistics"].numel():
        put_buffers(model, states[0]["statistics"])
    parameters = {name: held.data for name, held in trained_parameters(model).items()}
    optimizer: dict[str, dict[str, Any]] = {}
    groups, progress = [], []
    for stripe, state in zip(stripes, states, strict=True):
        for view, (first, last) in zip(piece_views(stripe, parameters), stripe.ranges, strict=True):
            view.copy_(state["values"][first:last])
        for piece, part, counters in zip(stripe.pieces, state["optimizer"], state["counters"], strict=True):
            for key, value in part.items():
                merged = optimizer.setdefault(piece.name, {})
                if isinstance(value, Tensor) and value.shape == piece.shape:
                    like = torch.zeros_like(parameters[piece.name], device="cpu", dtype=value.dtype)
                    flat = flat_view(merged.setdefault(key, like))
                    flat[piece.start : piece.start + piece.count] = value.flatten()
                else:
                    merged[key] = value
            if counters:
                groups.append({"names": [piece.name], **counters})
        progress.append({key: state[key] for key in _PROGRESS})
    return {"groups": groups, "state": optimizer}, progress


def _cut(state: Mapping[str, Any], like: Tensor, piece: Piece) -> dict[str, Any]:
    """A parameter's optimizer state, cut to a piece; what has another shape than the parameter stays whole."""
    part = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == like.shape:
            flat = flat_view(torch.empty_like(like, device="cpu", dtype=value.dtype).copy_(value))
            part[key] = flat[piece.start : piece.start + piece.count].clone().view(piece.shape)
    return part
