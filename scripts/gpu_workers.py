"""Two workers on one GPU that exchange gradients over sockets: a part of the pack `codecs` of `scripts/gpu_check.py`.

NCCL refuses two workers on one GPU. So messages, encoded on the GPU, are copied to page-locked memory of the host,
exchanged there, and copied back to be decoded. Who does that waits, which a stream cannot: here a sync lane is a thread
with a stream of its own, as many as a row says. What the workers train is compared with one process that has both
workers' samples, then whole steps are timed in interleaved rounds, for some codecs and numbers of lanes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rig.in_process import InProcessGroup, Meeting
from benchmarks.rig.launch import measure_in_ranks
from benchmarks.rig.network import Network
from benchmarks.rig.paired import paired
from benchmarks.rig.rank import process_group
from benchmarks.rig.rows import row, write_rows
from benchmarks.rig.task import TINY, Setting
from hybridpar import TrainConfig, Trainer
from hybridpar.comm.group import Group, Reduction, split
from hybridpar.comm.world import World
from hybridpar.compress.coders import ParameterCoders
from hybridpar.compress.policy import read_policy
from hybridpar.errors import HybridparError
from hybridpar.lanes import Lanes
from hybridpar.lanes.base import Family, Work
from hybridpar.lanes.cpu import CpuLane, Worker
from hybridpar.run.worker import device_name
from scripts.gpu_common import Outcome, Pack, Result, run_each, versions

#: What checks and rows are called by.
NAME = "two workers on one GPU"
CODECS = ("none", "onebit", "powersgd:rank=4", "qsgd_mn:bits=8")
LANES = (1, 2, 4)
WORKERS = 2

#: What is trained, and megabytes of a bucket: several for each lane. In a dry run:
SETTING, BUCKET = Setting("resnet18", 32, 64), 2.0
TINY_SETTING, TINY_BUCKET = Setting(TINY, 16, 4), 0.01

#: Steps that are compared, and the largest relative differences of losses and of how all parameters moved. Kernels add
#: in an order of their own, and a value next to a threshold is then sent as another level.
STEPS = 4
LOSS_LIMIT, UPDATE_LIMIT = 1e-3, 2e-2

#: Seconds that a worker waits for the other.
PATIENCE = 60.0

#: One name for it, so that tests can put a stand-in here.
cuda: Any = torch.cuda


class HostGroup(Group):
    """Workers that exchange tensors of a GPU through page-locked memory of the host; who calls waits for it.

    Args:
        group: What exchanges tensors of the host.
        device: The GPU; on a CPU there is a copy as well.
        spent: Where the seconds of each call go: those of both copies, and those of the exchange between.
    """

    def __init__(self, group: Group, device: torch.device, spent: list[tuple[float, float]]) -> None:
        self.group, self.device, self.spent = group, device, spent
        self.rank, self.size, self.transport = group.rank, group.size, group.transport

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> None:
        self._on_host(tensor, tensor, lambda out, inp: self.group.all_reduce(out, reduction))

    def all_to_all(self, out: Tensor, inp: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        self._on_host(out, inp, lambda out, inp: self.group.all_to_all(out, inp, out_sizes, in_sizes))

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        self._on_host(out, inp, self.group.all_gather)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._on_host(tensor, tensor, lambda out, inp: self.group.send(inp, rank))

    def recv(self, tensor: Tensor, rank: int) -> None:
        self._on_host(tensor, tensor, lambda out, inp: self.group.recv(out, rank))

    def close(self) -> None:
        self.group.close()

    def _on_host(self, out: Tensor, inp: Tensor, exchange: Callable[[Tensor, Tensor], None]) -> None:
        def room_for(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda")

        if self.device.type == "cuda":
            cuda.current_stream().synchronize()  # to wait for kernels is no part of the copy
        times = [time.perf_counter()]
        sent = room_for(inp).copy_(inp)
        received = sent if out is inp else room_for(out)
        times.append(time.perf_counter())
        exchange(received, sent)
        times.append(time.perf_counter())
        out.copy_(received)
        down, between, up = (end - start for start, end in pairwise([*times, time.perf_counter()]))
        self.spent.append((down + up, between))


class StreamThread(CpuLane):
    """A thread whose work runs on its own stream, behind all that was issued before it, and is over when it returns."""

    def __init__(self, family: Family, name: str, worker: Worker, stream: Any) -> None:
        super().__init__(family, name, worker)
        self._stream = stream

    def _submit(self, work: Work, uses: Sequence[Tensor], marks: Sequence[Any]) -> None:
        issued = cuda.Event()
        issued.record(cuda.current_stream())

        def run() -> None:
            with cuda.stream(self._stream):
                self._stream.wait_event(issued)
                work()
                self._stream.synchronize()

        super()._submit(run, uses, marks)


class ThreadLanes(Lanes):
    """Lanes of a GPU that are threads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("cpu")
        self.device = self.caller.device = device

    def open(self, name: str, *, priority: int = 0, threads: int = 1) -> StreamThread:
        self._workers.append(worker := Worker(name, threads))
        lane = StreamThread(self, name, worker, cuda.Stream(self.device, priority=priority))
        self.others.append(lane)
        self._lanes[name] = lane
        return lane


def lanes_of(device: torch.device) -> Lanes:
    """Lanes that are threads; on a CPU they are so anyway."""
    return ThreadLanes(device) if device.type == "cuda" else Lanes(device)


def join(device: torch.device, lanes: int) -> World:
    """The world of the workers, connected by sockets, whose tensors are on the GPU."""
    world = World.join(lanes=lanes, timeout=PATIENCE, device=torch.device("cpu"), shared_memory=False)
    spent: list[tuple[float, float]] = []
    world.lane_groups = [HostGroup(group, device, spent) for group in world.lane_groups]
    assert world.control_group is not None
    world.control_group, world.device = HostGroup(world.control_group, device, []), device
    return world


def state_of(model: nn.Module) -> Tensor:
    """All parameters as one vector, float64 on the CPU."""
    return torch.cat([parameter.detach().cpu().double().flatten() for parameter in model.parameters()])


def train_alone(setting: Setting, codec: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The plain reference in one process: a loop with both workers' batches, whose gradients meet as threads.

    Returns:
        The loss of each step, and by how much the parameters moved.
    """
    model = setting.build().to(device)
    before, optimizer, parameters = state_of(model), setting.optimizer(model), dict(model.named_parameters())
    meeting, losses = Meeting(WORKERS), []
    groups = [InProcessGroup(meeting, rank) for rank in range(WORKERS)]
    coders = [
        ParameterCoders(read_policy(codec), World(rank, WORKERS, device), average=True) for rank in range(WORKERS)
    ]
    exchanges = [each.exchange_of([*parameters], [*parameters.values()]) for each in coders]
    with ThreadPoolExecutor(WORKERS) as pool:
        for step in range(STEPS):
            flats, parts = [], []
            for rank in range(WORKERS):
                images, labels = (part.to(device) for part in setting.noise(WORKERS * step + rank))
                loss = F.cross_entropy(model(images), labels)
                gradients = torch.autograd.grad(loss, [*parameters.values()])
                flats.append(torch.cat([gradient.flatten() for gradient in gradients]))
                parts.append(loss.detach())
            losses.append(float(sum(parts)) / WORKERS)
            list(pool.map(lambda exchange, flat, group: exchange.add(flat, group), exchanges, flats, groups))
            mean = split(flats[0], [parameter.numel() for parameter in parameters.values()])
            for parameter, part in zip(parameters.values(), mean, strict=True):
                parameter.grad = part.view_as(parameter)
            optimizer.step()
            for exchange in exchanges:
                exchange.commit()
    return torch.tensor(losses, dtype=torch.float64), state_of(model) - before


class Method:
    """Training on one of the workers, with a codec on as many lanes as its world has."""

    def __init__(self, setting: Setting, bucket: float, codec: str, world: World) -> None:
        self.world, self.model, self._opened = world, setting.build(), ExitStack()
        lanes = self._opened.enter_context(lanes_of(world.device))
        sync = f"allreduce:lanes={len(world.lane_groups)},bucket={bucket}"
        config = TrainConfig(compress=codec, sync=sync, plan="none", cuda_graph="off")
        self._trainer = self._opened.enter_context(
            Trainer(self.model, setting.optimizer, nn.CrossEntropyLoss(), config, world=world, lanes=lanes)
        )
        #: Milliseconds of each phase in each step, over all lanes.
        self.phases: dict[str, list[float]] = defaultdict(list)

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """A step, to its end on the GPU; the loss of both workers' samples."""
        (group, *_) = self.world.lane_groups
        assert isinstance(group, HostGroup)
        group.spent.clear()
        result = self._trainer.step(batch)
        if self.world.device.type == "cuda":
            cuda.synchronize()
        copies, exchanges = (1e3 * sum(each) for each in zip(*group.spent, strict=True))
        sync = result.outcome.sync
        phases = {"encode": sync.encode_ms, "copy": copies, "exchange": exchanges, "decode": sync.decode_ms}
        for phase, ms in phases.items():
            if ms is not None:  # where there is no codec, on a GPU
                self.phases[phase].append(ms)
        return result.loss

    def median_ms(self) -> dict[str, float]:
        """The median of each phase."""
        return {f"{phase}_ms": round(statistics.median(times), 4) for phase, times in self.phases.items()}

    def close(self) -> None:
        """End the lanes."""
        self._opened.close()


def compare(setting: Setting, bucket: float, codec: str, world: World) -> Outcome:
    """Train with the other worker and beside it the reference; the difference that is nearer to its limit."""
    method = Method(setting, bucket, codec, world)
    try:
        before = state_of(method.model)
        losses = torch.tensor([method.step(setting.noise(WORKERS * step + world.rank)) for step in range(STEPS)])
        state = state_of(method.model)
    finally:
        method.close()
    if len(set(map(str, world.gather(hashlib.sha256(state.numpy()).hexdigest())))) > 1:
        raise HybridparError("the workers' parameters differ")
    expected, moved = train_alone(setting, codec, world.device)
    loss = float(((losses - expected) / expected).abs().max())
    update = float((state - before - moved).norm() / moved.norm())
    worst = max((loss, LOSS_LIMIT), (update, UPDATE_LIMIT), key=lambda pair: pair[0] / pair[1])
    return *worst, worst[0] <= worst[1]


def measure(device: str, out: str, dry: bool) -> int:
    """Check and time in this worker; worker 0 writes the tables."""
    pack = Pack(torch.device(device), out=Path(out), dry=dry)
    torch.backends.cudnn.allow_tf32 = False
    setting, bucket = (TINY_SETTING, TINY_BUCKET) if dry else (SETTING, BUCKET)
    with process_group(PATIENCE) as (rank, _), ExitStack() as opened:
        worlds = [join(pack.device, lanes) for lanes in LANES]
        for world in worlds:
            opened.callback(world.close)
        checks = {
            f"{NAME}, {codec}, lanes={len(world.lane_groups)}": partial(compare, setting, bucket, codec, world)
            for codec, world in zip(CODECS, itertools.cycle(worlds), strict=False)
        }
        results = list(run_each(checks))
        passed = rank > 0 or pack.write_checks(results)
        methods: dict[str, Method] = {}
        for codec, world in itertools.product(CODECS, worlds):
            methods[f"{codec}, lanes={len(world.lane_groups)}"] = method = Method(setting, bucket, codec, world)
            opened.callback(method.close)
        images, labels = setting.noise(rank)
        batch = images.to(pack.device), labels.to(pack.device)
        timed = paired({name: partial(method.step, batch) for name, method in methods.items()})
        if rank == 0:
            rows = [
                row(
                    timed,
                    name,
                    next(iter(methods)),
                    claim="gpu",
                    setting=f"{setting}, {NAME}",
                    link="loopback",
                    ranks=WORKERS,
                    device=device_name(pack.device),
                    extra=method.median_ms() | versions(),
                )
                for name, method in methods.items()
            ]
            write_rows(rows, pack.out / "workers.csv")
        return 0 if passed else 1


def run(pack: Pack) -> bool:
    """Start both workers; whether no check failed."""
    if not pack.has_time_for(NAME):
        return True
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    try:
        with Network(WORKERS) as network:
            measure_in_ranks(
                network,
                "scripts.gpu_workers",
                {"device": str(pack.device), "out": pack.out, "dry": pack.dry},
                timeout=pack.left,
                environment={"CUDA_VISIBLE_DEVICES": first},
            )
    except HybridparError as error:
        print(error, flush=True)
        return pack.write_checks([Result(NAME, error.what, "", "FAILED")])
    return True
