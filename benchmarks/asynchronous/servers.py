"""Command for the tables of parameter servers: their cost on equal workers, their gain on unequal ones.

python -m benchmarks.asynchronous.servers                       # both tables, as root for the shaped link
python -m benchmarks.asynchronous.servers --table cost --links loopback
python -m benchmarks.asynchronous.servers --quick               # small, and nothing is written: does it run?
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.rig.command import measure_in_ranks, run_command
from benchmarks.rig.network import LOOPBACK, Network, missing
from benchmarks.rig.paired import FOREIGN_LOAD, LEAST_ROUNDS, Paired, paired
from benchmarks.rig.rank import link, process_group
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import SyncError
from hybridpar.lanes import Lanes
from hybridpar.models import build_model, seed_everything
from hybridpar.optim.losses import as_sum
from hybridpar.pipeline.step import StepRequest
from hybridpar.planner.resolve import resolve
from hybridpar.server import Rules
from hybridpar.server.checkpoints import shard_starts
from hybridpar.server.engine import ServedEngine
from hybridpar.server.link import Servers
from hybridpar.server.process import own_host
from hybridpar.server.serve import ShardServer
from hybridpar.server.wire import Weights
from hybridpar.train.engine import EngineParts
from hybridpar.train.trainer import Trainer

RESULTS = Path(__file__).parent / "results"
_HERE = "benchmarks.asynchronous.servers"
_TINY = "benchmarks.pipeline.setups:tiny_net"

#: Throughput over that of an all-reduce, at least, by method; on the shaped link.
TARGETS = {"masters": 0.65, "servers": 0.65}
#: Images per second over those of `ps` with one worker of three slowed four times.
SLOW_TARGET, SLOWED = 2.0, 4.0
WORKERS, SERVERS = 2, 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure parameter servers."""

    table: Literal["cost", "slow", "all"] = "all"
    """`cost`: steps on servers beside steps with an all-reduce; `slow`: images per second with one slow worker."""
    links: tuple[str, ...] = (LOOPBACK, "1gbit")
    """Links of `cost`."""
    rounds: int = 30
    """Rounds of `cost` to keep, and blocks of `slow` per mode."""
    wait_ms: float = 40.0
    """What takes the place of a backward pass in `slow`."""
    quick: bool = False
    """Small settings, busy rounds kept, nothing written."""
    output: Path = RESULTS
    """Folder of the tables to add rows to."""


class Waiting(nn.Module):
    """A model whose forward pass takes a given time and no core, as on a device of its own."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10, 25_000))  # 1 MB to send
        self.bias = nn.Parameter(torch.zeros(10))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return x @ self.weight.t() + self.bias


class Party:
    """This rank's part in some workers with some shards: a worker, a shard on a thread, or both.

    Args:
        name: Unlike that of every other party.
        config: Mode and optimizer.
        workers: The first so many ranks train.
        hosts: Ranks that hold a shard.
        model: This rank's model.
    """

    def __init__(self, name: str, config: TrainConfig, workers: int, hosts: list[int], model: nn.Module) -> None:
        self._rank = dist.get_rank()
        self._thread: threading.Thread | None = None
        address = None
        if self._rank in hosts:
            server = ShardServer(config, Rules.of(config, workers), hosts.index(self._rank), name, own_host())
            address = server.address
            self._thread = threading.Thread(target=_serve, args=(server,), daemon=True)
            self._thread.start()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, address)
        self.engine: ServedEngine | None = None
        if self._rank < workers:
            self._open(name, config, model, [told[host] for host in hosts])
        dist.barrier()

    def _open(self, name: str, config: TrainConfig, model: nn.Module, addresses: list[str]) -> None:
        self._servers = servers = Servers(model, config, self._rank, addresses, name)
        servers.come(partial(shard_starts, model, servers, limit=10**9) if self._rank == 0 else None)
        alone = TrainConfig(lr=config.lr)
        self._lanes = Lanes(torch.device("cpu"))
        parts = EngineParts(
            model, resolve(alone, 1), None, _no_optimizer, as_sum(nn.CrossEntropyLoss()), alone, World(), self._lanes
        )
        self.engine = ServedEngine(parts, servers)
        self.engine.gradients.take_weights()

    def step(self, images: Tensor, labels: Tensor, workers: int, *, stop: bool = False) -> Weights | None:
        """Push a gradient, where this rank trains; what came for it."""
        if self.engine is None:
            return None
        self.engine.step(StepRequest([(images, labels)], len(labels), workers * len(labels), stop=stop))
        return self.engine.gradients.answer

    def close(self) -> None:
        """Leave; the shard ends when all have."""
        if self.engine is not None:
            self.engine.close()
            self._lanes.__exit__(None, None, None)
            self._servers.close()
        if self._thread is not None:
            self._thread.join(30)


def _no_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    raise AssertionError("servers run the optimizer")


def _serve(server: ShardServer) -> None:
    with contextlib.suppress(SyncError):  # the workers are told
        server.run()


# ------------------------------------------------------------------------ cost


def measure_cost(quick: bool, rounds: int, output: str | None) -> None:
    """Time steps in this rank; workers are the first ranks, servers the last."""
    with process_group(timeout=180) as (rank, ranks):
        side, batch, name = (16, 4, _TINY) if quick else (32, 16, "resnet18")
        world = World.join(lanes=2)
        party = world.split([list(range(WORKERS)), *([one] for one in range(WORKERS, ranks))])
        images = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(rank))
        labels = torch.randint(0, 10, (batch,), generator=torch.Generator().manual_seed(rank))

        def build() -> nn.Module:
            seed_everything(0)
            return build_model(name, 10)

        with contextlib.ExitStack() as stack:
            stack.callback(world.close)
            stack.callback(party.close)
            methods: dict[str, Callable[[], object]] = {}
            trainer = Trainer(build(), config=TrainConfig(lr=1e-3), world=party) if rank < WORKERS else None
            if trainer is not None:
                stack.callback(trainer.close)
            own_trainer = trainer
            methods["allreduce"] = lambda: own_trainer.step((images, labels)) if own_trainer is not None else None
            for kind, config, hosts in (
                ("masters", TrainConfig(lr=1e-3, sync="ps,servers=0"), list(range(WORKERS))),
                (
                    "servers",
                    TrainConfig(lr=1e-3, sync=f"ps,servers={SERVERS}"),
                    list(range(WORKERS, WORKERS + SERVERS)),
                ),
            ):
                made = Party(kind, config, WORKERS, hosts, build())
                stack.callback(made.close)
                methods[kind] = partial(made.step, images, labels, WORKERS)
            limit = math.inf if quick else FOREIGN_LOAD
            result = paired(methods, rounds, warmup=3, foreign_load=limit)
        if rank == 0:
            setting = f"{name}, {side}x{side} images, batch {batch} per worker, {WORKERS} workers, {SERVERS} servers"
            write_checks(_cost_rows(result, setting), output, title="servers, cost")


def _cost_rows(result: Paired, setting: str) -> list[Check]:
    rows = []
    for name, target in TARGETS.items():
        ratio = result.ratio("allreduce", name)  # throughput of the method over that of the all-reduce
        rows.append(
            Check(
                setting=setting,
                link=link(),
                what=f"images/s of {name} over those of an all-reduce",
                value=ratio.median,
                low=ratio.low,
                high=ratio.high,
                at_least=None if link() == LOOPBACK else target,
                extra=f"{result.median_ms(name):.1f} ms over {result.median_ms('allreduce'):.1f} ms a step, "
                f"{result.rounds} rounds{', loaded' if result.loaded else ''}; all-reduce as the trainer does it here",
            )
        )
    return rows


# ------------------------------------------------------------------------ slow


def measure_slow(quick: bool, blocks: int, wait_ms: float, output: str | None) -> None:
    """Count images per second in blocks of some seconds, modes in turn; three workers, the last rank serves."""
    seconds = 0.5 if quick else 4.0
    with process_group(timeout=180) as (rank, ranks):
        workers = ranks - 1
        modes = {"ps": "ps", "ps-async": "ps-async", "softsync:2": f"softsync:{min(2, workers)}"}
        rates: dict[str, list[float]] = {mode: [] for mode in modes}
        for block in range(blocks):
            for mode in sorted(modes, key=lambda mode: (block + list(modes).index(mode)) % len(modes)):
                rates[mode].append(_block(f"{mode}-{block}", modes[mode], workers, wait_ms / 1e3, seconds))
        if rank == 0:
            write_checks(_slow_rows(rates, workers, wait_ms, seconds), output, title="servers, one slow worker")


def _block(name: str, mode: str, workers: int, wait: float, seconds: float) -> float:
    """Images per second of all workers together."""
    rank = dist.get_rank()
    model = Waiting(wait * (SLOWED if rank == 0 else 1.0))
    party = Party(name, TrainConfig(lr=1e-3, sync=mode), workers, [workers], model)
    images, labels = torch.randn(8, 25_000), torch.zeros(8, dtype=torch.int64)
    done, began = 0, time.perf_counter()
    while party.engine is not None:
        late = time.perf_counter() - began > seconds
        answer = party.step(images, labels, workers, stop=late)
        assert answer is not None
        done += answer.applied
        if answer.stop:
            break
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, (done, time.perf_counter() - began if party.engine is not None else 0.0))
    party.close()
    dist.barrier()
    return 8 * sum(count for count, _ in facts) / max(taken for _, taken in facts)


def _slow_rows(rates: dict[str, list[float]], workers: int, wait_ms: float, seconds: float) -> list[Check]:
    rows = []
    for mode, own in rates.items():
        ratios = [value / base for value, base in zip(own, rates["ps"], strict=True)]
        rows.append(
            Check(
                setting=f"{workers} workers that wait {wait_ms:g} ms in place of computing, worker 0 {SLOWED:g} times "
                "as long; 1 MB of parameters, 1 server",
                link=link(),
                what=f"images/s of {mode} over those of ps",
                value=statistics.median(ratios),
                low=min(ratios),
                high=max(ratios),
                at_least=None if mode == "ps" else SLOW_TARGET,
                extra=f"{statistics.median(own):.0f} images/s; {len(own)} blocks of {seconds:g} s, modes in turn",
            )
        )
    return rows


# ------------------------------------------------------------------------ main


def main(options: Options) -> int:
    """Take every table that is asked for."""
    output = None if options.quick else str((options.output / "servers.csv").resolve())
    rounds = LEAST_ROUNDS if options.quick else options.rounds
    told: dict[str, Any] = {"quick": options.quick, "output": output}
    for rate in options.links if options.table != "slow" else ():
        if rate != LOOPBACK and (lack := missing()):
            print(f"{rate}: skipped, {lack}")
            continue
        with Network(WORKERS + SERVERS, rate) as network:
            measure_in_ranks(network, _HERE, told | {"what": "cost", "rounds": rounds})
    if options.table in ("slow", "all"):
        told |= {"blocks": 2 if options.quick else min(rounds, 10), "wait_ms": options.wait_ms}
        with Network(4, LOOPBACK) as network:
            measure_in_ranks(network, _HERE, told | {"what": "slow"})
    return 0


def measure(what: str, **told: Any) -> None:
    """Measure one table in this rank."""
    measures: dict[str, Callable[..., None]] = {"cost": measure_cost, "slow": measure_slow}
    measures[what](**told)


if __name__ == "__main__":
    run_command(main, Options)
