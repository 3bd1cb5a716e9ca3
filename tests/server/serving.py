"""Runs parameter servers and workers on threads of one process, connected by real sockets, for tests."""

from __future__ import annotations

import contextlib
import copy
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.compress import read_policy
from hybridpar.config import OptimizerConfig, TrainConfig
from hybridpar.errors import HybridparError
from hybridpar.lanes import Lanes
from hybridpar.models import model_fingerprint
from hybridpar.optim.build import build_optimizer
from hybridpar.optim.losses import as_sum
from hybridpar.pipeline.step import StepInput
from hybridpar.planner.resolve import resolve
from hybridpar.server import Rules, cut_model, described_parameters, optimizer_of
from hybridpar.server.checkpoints import shard_starts
from hybridpar.server.clipping import Clipping
from hybridpar.server.engine import ServedEngine
from hybridpar.server.gradients import Servers
from hybridpar.server.link import LinkOptions, Links
from hybridpar.server.running import flat_buffers
from hybridpar.server.serve import ServerOptions, ShardServer
from hybridpar.server.stripe_optimizer import needs_whole_parameters
from hybridpar.server.stripes import trained_parameters
from hybridpar.server.wire import Welcome
from hybridpar.train.engine import EngineParts

TOKEN = "let me in, I work here"


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Net(nn.Module):
    """A little of everything; the part `spare` is not used."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.spare = nn.Linear(10, 10)
        self.head = nn.Linear(width * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.norm(self.conv(x))).flatten(1))
        return out


def images(seed: int, count: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 8, 8, generator=draw), torch.randint(10, (count,), generator=draw)


@dataclass
class Served:
    """Shards on threads.

    Attributes:
        servers: By number.
        problems: What each ended with, if not well.
    """

    servers: list[ShardServer]
    problems: dict[int, HybridparError] = field(default_factory=dict)
    enough: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number, server in enumerate(self.servers):
            thread = threading.Thread(target=self._run, args=(number, server), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _run(self, number: int, server: ShardServer) -> None:
        try:
            server.run(self.enough.is_set)
        except HybridparError as error:
            self.problems[number] = error

    def kill(self, number: int) -> None:
        """As the system would: all sockets of a shard are closed."""
        server = self.servers[number]
        with contextlib.suppress(OSError):
            server._listener.shutdown(socket.SHUT_RDWR)
        for connection in list(server._hellos):
            connection.end()


@contextlib.contextmanager
def serving(
    rules: Rules,
    shards: int = 1,
    *,
    codec: str = "none",
    half: bool = False,
    timeout: float = 20.0,
    optimizer: OptimizerConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Served]:
    made = optimizer_of(optimizer or OptimizerConfig(lr=0.1, momentum=0.9, weight_decay=0.01))
    policy = read_policy(codec)
    options = [ServerOptions(n, rules, made, policy, half, TOKEN, timeout) for n in range(shards)]
    served = Served([ShardServer(one, clock=clock) for one in options])
    served.start()
    try:
        yield served
    finally:
        served.enough.set()
        for thread in served.threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in served.threads)


class Worker:
    """One worker with a model of its own."""

    def __init__(
        self,
        served: Served,
        number: int,
        model: nn.Module,
        rules: Rules,
        *,
        codec: str = "none",
        timeout: float = 20.0,
        limit: int = 10**6,
        returns: bool | None = None,
        facts: dict[str, Any] | None = None,
        scales: dict[str, float] | None = None,
        amp: str = "none",
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        self.number, self.model, self.rules = number, model, rules
        shards = len(served.servers)
        config = optimizer or OptimizerConfig()
        self.clipping = Clipping.of(config, model, build_optimizer(model, config))
        self.stripes = cut_model(described_parameters(model), shards, scales, whole=needs_whole_parameters(config))
        policy = read_policy(codec)
        tensors = {name: own.data for name, own in trained_parameters(model).items()}
        comes_again = not rules.barrier if returns is None else returns
        options = LinkOptions(number, model_fingerprint(model), policy, TOKEN, timeout, comes_again)
        self.links = Links([server.address for server in served.servers], self.stripes, tensors, options)
        self._limit, self._facts = limit, facts or {}
        self._amp, self._tensors = amp, tensors
        self._thread = ThreadPoolExecutor(1)  # lanes take work from the thread that made them
        self._lanes = self._thread.submit(Lanes, torch.device("cpu")).result()
        self.engine: ServedEngine | None = None

    def begin(self) -> list[Welcome]:
        welcome = self.links.hello(flat_buffers(self.model).numel(), 0 if self.number == 0 else None)
        if self.number == 0:
            starts = shard_starts(
                self.model, self.stripes, limit=self._limit, clipping=self.clipping, facts=self._facts
            )
            welcome = self.links.start(starts, welcome)
        self.engine = self._thread.submit(self._open_engine).result()
        self.engine.gradients.take_weights()
        return welcome

    def _open_engine(self) -> ServedEngine:
        config = TrainConfig(amp=self._amp)
        parts = EngineParts(
            *(self.model, resolve(config, 1), None, lambda _: None, as_sum(nn.CrossEntropyLoss()), config),
            *(World(), self._lanes),
        )
        servers = Servers(self.number, self.links, self._tensors, self.rules.barrier, self.clipping)
        return ServedEngine(parts, servers)

    def step(self, seed: int, workers: int = 1, **more: Any) -> Any:
        return self.step_on(images(seed), workers, **more)

    def step_on(self, batch: tuple[Tensor, Tensor], workers: int = 1, lowered: float | None = None, **more: Any) -> Any:
        """The answer to a push, the norm that was added up, and bytes pushed and pulled."""
        assert self.engine is not None
        before = self.links.traffic
        self.engine.gradients.lowered = lowered
        given = StepInput([batch], 4, 4 * workers, **more)
        self._thread.submit(self.engine.step, given).result()
        pushed, pulled = (now - then for now, then in zip(self.links.traffic, before, strict=True))
        answer = vars(self.engine.gradients.answer)
        return SimpleNamespace(**answer, norm=self.links.squares, pushed=pushed, pulled=pulled)

    def close(self, *, graceful: bool = True) -> None:
        if self.engine is not None:
            self._thread.submit(self.engine.close).result()
        self._thread.submit(self._lanes.__exit__, None, None, None).result()
        self.links.close(graceful=graceful)
        self._thread.shutdown()


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all at the same time; results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def copies(count: int, **options: Any) -> list[nn.Module]:
    """Equal models."""
    torch.manual_seed(0)
    model = Net(**options)
    return [copy.deepcopy(model) for _ in range(count)]
