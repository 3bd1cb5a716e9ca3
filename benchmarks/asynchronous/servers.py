"""Command for the tables of parameter servers: their cost on equal workers, their gain on unequal ones.

python -m benchmarks.asynchronous.servers                       # both tables, as root for the shaped link
python -m benchmarks.asynchronous.servers --table cost --links loopback
python -m benchmarks.asynchronous.servers --quick               # small, and nothing is written: does it run?
"""

from __future__ import annotations

import contextlib
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

from benchmarks.rig.checks import Check, check_of, write_checks
from benchmarks.rig.launch import measure_in_ranks, possible_links, run_command
from benchmarks.rig.network import LOOPBACK, Network
from benchmarks.rig.paired import LEAST_ROUNDS, Paired, highest, paired, total
from benchmarks.rig.rank import link, process_group
from benchmarks.rig.task import TINY, Setting
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import SyncError
from hybridpar.lanes import Lanes
from hybridpar.optim.losses import as_sum
from hybridpar.pipeline.step import StepRequest
from hybridpar.planner.resolve import resolve
from hybridpar.server import Rules
from hybridpar.server.engine import ServedEngine
from hybridpar.server.link import Servers, shard_starts
from hybridpar.server.process import this_host
from hybridpar.server.serve import ShardServer
from hybridpar.server.wire import Weights
from hybridpar.train.engine import EngineParts
from hybridpar.train.trainer import Trainer

#: Throughput over that of an all-reduce, at least, by method; on the shaped link.
TARGETS = {"masters": 0.65, "servers": 0.65}
#: Images per second over those of `ps` with one worker of three slowed four times.
SLOW_TARGET, SLOWED = 2.0, 4.0
WORKERS, SERVERS = 2, 2
#: Milliseconds in place of a backward pass in `slow`, and seconds of a block.
WAIT_MS, BLOCK_SECONDS = 40.0, 4.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure parameter servers."""

    table: Literal["cost", "slow", "all"] = "all"
    """`cost`: steps on servers beside steps with an all-reduce; `slow`: images per second with one slow worker."""
    links: tuple[str, ...] = (LOOPBACK, "1gbit")
    """Links of `cost`."""
    rounds: int = 30
    """Rounds of `cost` to keep, and blocks of `slow` per mode."""
    quick: bool = False
    """Small settings, busy rounds kept, nothing written."""
    output: Path = Path(__file__).parent / "results" / "servers.csv"
    """Table to add rows to."""


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
            server = ShardServer(config, Rules.of(config, workers), hosts.index(self._rank), name, this_host())
            address = server.address
            self._thread = threading.Thread(target=_serve, args=(server,), daemon=True)
            self._thread.start()
        addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, address)
        self.engine: ServedEngine | None = None
        if self._rank < workers:
            self._open(name, config, model, [addresses[host] for host in hosts])
        dist.barrier()

    def _open(self, name: str, config: TrainConfig, model: nn.Module, addresses: list[str]) -> None:
        self._servers = servers = Servers(model, config, self._rank, addresses, name)
        servers.come(partial(shard_starts, model, servers, limit=10**9) if self._rank == 0 else None)
        plain, loss = TrainConfig(lr=config.lr), as_sum(nn.CrossEntropyLoss())
        self._lanes = Lanes(torch.device("cpu"))
        parts = EngineParts(model, resolve(plain, 1), None, _no_optimizer, loss, plain, World(), self._lanes)
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
    setting = Setting(TINY, 16, 4) if quick else Setting("resnet18", 32, 16)
    with process_group(timeout=180) as (rank, ranks), contextlib.ExitStack() as stack:
        world = World.join(lanes=2)
        stack.callback(world.close)
        team = world.split([list(range(WORKERS)), *([server] for server in range(WORKERS, ranks))])
        stack.callback(team.close)
        batch = setting.noise(rank)
        methods: dict[str, Callable[[], object]] = {"allreduce": lambda: None}
        if rank < WORKERS:
            trainer = stack.enter_context(Trainer(setting.build(), config=TrainConfig(lr=1e-3), world=team))
            methods["allreduce"] = partial(trainer.step, batch)
        for kind, servers, hosts in (("masters", 0, range(WORKERS)), ("servers", SERVERS, range(WORKERS, ranks))):
            config = TrainConfig(lr=1e-3, sync=f"ps:servers={servers}")
            party = Party(kind, config, WORKERS, list(hosts), setting.build())
            stack.callback(party.close)
            methods[kind] = partial(party.step, *batch, WORKERS)
        result = paired(methods, rounds, keep_busy=quick)
        if rank == 0:
            what = f"{setting} per worker, {WORKERS} workers, {SERVERS} servers"
            write_checks(_cost_rows(result, what), output, "servers, cost")


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


def measure_slow(quick: bool, rounds: int, output: str | None) -> None:
    """Count images per second in blocks of some seconds, modes in turn; three workers, the last rank serves."""
    seconds = 0.5 if quick else BLOCK_SECONDS
    with process_group(timeout=180) as (rank, ranks):
        workers = ranks - 1
        modes = ("ps", "ps-async", "softsync:2")
        rates: dict[str, list[float]] = {mode: [] for mode in modes}
        for block in range(2 if quick else rounds):
            for mode in (*modes[block % 3 :], *modes[: block % 3]):
                rates[mode].append(_block(f"{mode}-{block}", mode, workers, seconds))
        if rank:
            return
        setting = (
            f"{workers} workers that wait {WAIT_MS:g} ms in place of computing, worker 0 {SLOWED:g} times as long; "
            "1 MB of parameters, 1 server"
        )
        rows = []
        for mode, values in rates.items():
            ratios = [value / base for value, base in zip(values, rates["ps"], strict=True)]
            extra = f"{statistics.median(values):.0f} images/s; {len(values)} blocks of {seconds:g} s, modes in turn"
            at_least = None if mode == "ps" else SLOW_TARGET
            what = f"images/s of {mode} over those of ps"
            rows.append(check_of(setting, link(), what, ratios, at_least=at_least, extra=extra))
        write_checks(rows, output, "servers, one slow worker")


def _block(name: str, mode: str, workers: int, seconds: float) -> float:
    """Images per second of all workers together."""
    rank = dist.get_rank()
    model = Waiting(WAIT_MS / 1e3 * (SLOWED if rank == 0 else 1.0))
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
    taken = time.perf_counter() - began if party.engine is not None else 0.0
    party.close()
    images_done = total(float(8 * done))
    return images_done / highest([taken])[0]


# ------------------------------------------------------------------------ main


def main(options: Options) -> None:
    """Take every table that is asked for."""
    arguments: dict[str, Any] = {"quick": options.quick, "output": None if options.quick else options.output}
    arguments["rounds"] = LEAST_ROUNDS if options.quick else options.rounds
    for rate in possible_links(options.links) if options.table != "slow" else ():
        with Network(WORKERS + SERVERS, rate) as network:
            measure_in_ranks(network, "benchmarks.asynchronous.servers", arguments | {"table": "cost"})
    if options.table != "cost":
        with Network(4, LOOPBACK) as network:
            slow = {"table": "slow", "rounds": min(options.rounds, 10)}
            measure_in_ranks(network, "benchmarks.asynchronous.servers", arguments | slow)


def measure(table: str, **arguments: Any) -> None:
    """Measure one table in this rank."""
    (measure_cost if table == "cost" else measure_slow)(**arguments)


if __name__ == "__main__":
    run_command(main, Options)
