"""Runs parameter servers and workers on threads of one process, connected by real sockets, for tests."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config import OptimizerConfig, TrainConfig
from hybridpar.errors import HybridparError
from hybridpar.lanes import Lanes
from hybridpar.optim.losses import as_sum
from hybridpar.pipeline.step import StepRequest
from hybridpar.planner.resolve import resolve
from hybridpar.server import Rules
from hybridpar.server.engine import ServedEngine
from hybridpar.server.link import Servers, shard_starts
from hybridpar.server.serve import ShardServer
from hybridpar.server.wire import Weights
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
        server._door.close()
        for peer in list(server._peers):
            peer.connection.end()


OPTIMIZER = OptimizerConfig(lr=0.1, optimizer="sgd:momentum=0.9", weight_decay=0.01)


def config_of(rules: Rules, optimizer: OptimizerConfig = OPTIMIZER, **more: Any) -> TrainConfig:
    """Options of a run with such rules."""
    return TrainConfig(**{"sync": "ps" if rules.barrier else "ps-async", **vars(optimizer), **more})


@contextlib.contextmanager
def serving(
    rules: Rules,
    shards: int = 1,
    *,
    codec: str = "none",
    half: bool = False,
    timeout: float = 20.0,
    optimizer: OptimizerConfig = OPTIMIZER,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Served]:
    pull = {"sync": "ps-async:pull=fp16"} if half else {}
    config = config_of(rules, optimizer, compress=codec, timeout=timeout, **pull)
    served = Served([ShardServer(config, rules, number, TOKEN, clock=clock) for number in range(shards)])
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
        optimizer: OptimizerConfig = OPTIMIZER,
        **more: Any,
    ) -> None:
        self.number, self.model, self._limit = number, model, limit
        self.config = config_of(rules, optimizer, compress=codec, timeout=timeout, **more)
        addresses = [server.address for server in served.servers]
        self.servers = Servers(model, self.config, number, addresses, TOKEN)
        self._thread = ThreadPoolExecutor(1)  # lanes take work from the thread that made them
        self._lanes = self._thread.submit(Lanes, torch.device("cpu")).result()
        self.engine: ServedEngine | None = None

    def begin(self) -> Weights:
        starts = partial(shard_starts, self.model, self.servers, limit=self._limit)
        self.servers.heard = 0 if self.number == 0 else None
        welcome = self.servers.come(starts if self.number == 0 else None)
        self.engine = self._thread.submit(self._open_engine).result()
        self.engine.gradients.take_weights()
        return welcome

    def _open_engine(self) -> ServedEngine:
        config = TrainConfig(amp=self.config.amp)
        loss, world = as_sum(nn.CrossEntropyLoss()), World()
        parts = EngineParts(self.model, resolve(config, 1), None, no_optimizer, loss, config, world, self._lanes)
        return ServedEngine(parts, self.servers)

    def step(self, seed: int, workers: int = 1, **more: Any) -> Any:
        return self.step_on(images(seed), workers, **more)

    def step_on(self, batch: tuple[Tensor, Tensor], workers: int = 1, **more: Any) -> Any:
        """The answer to a push, the norm that was added up, and bytes pushed and pulled."""
        assert self.engine is not None
        before = self.servers.traffic
        given = StepRequest([batch], 4, 4 * workers, **more)
        self._thread.submit(self.engine.step, given).result()
        pushed, pulled = (now - then for now, then in zip(self.servers.traffic, before, strict=True))
        answer = vars(self.engine.gradients.answer)
        return SimpleNamespace(**answer, norm=self.servers.squares, pushed=pushed, pulled=pulled)

    def close(self, *, graceful: bool = True) -> None:
        if self.engine is not None:
            self._thread.submit(self.engine.close).result()
        self._thread.submit(self._lanes.__exit__, None, None, None).result()
        self.servers.close(graceful=graceful)
        self._thread.shutdown()


def no_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    raise AssertionError("servers run the optimizer")


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all at the same time; results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def copies(count: int, **options: Any) -> list[nn.Module]:
    """Equal models."""
    torch.manual_seed(0)
    model = Net(**options)
    return [copy.deepcopy(model) for _ in range(count)]
