"""Sets up the compared methods, which train the same model and differ only in how gradients are exchanged.

A method is a name, as it stands in the table:

    none                      no exchange at all: the floor, which no method can be below
    ddp, ddp-fp16             DistributedDataParallel, and with torch's own hook
    ddp-psgd1, ddp-psgd4      torch's PowerSGD hook of rank 1 and 4, in one bucket; with several it can hang on gloo
    epfml-..., grace-..., seed-...   see `benchmarks.sync.peers`
    own:CODEC[@LANES]         hybridpar's trainer with `--compress CODEC --sync allreduce:lanes=LANES`
    hook:CODEC                hybridpar's hook on DistributedDataParallel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.rig.task import Loop, Setting, fast_ddp
from benchmarks.sync.peers import FULL_STEPS, PEERS, make_powersgd, make_reduce
from hybridpar.comm.world import World
from hybridpar.compress.ddp import ddp_hook
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.train.trainer import Trainer

#: What every method does, for the table.
WORK = "forward, backward, exchange, SGD with momentum 0.9 (fused); fp32"

_OWN, _HOOK = "own:", "hook:"


@dataclass
class Job:
    """What all methods of a rank share.

    Attributes:
        setting: What is trained; the batch is that of a rank.
        rank: This worker.
        ranks: How many there are.
        peers: Folder with the peers' checkouts.
    """

    setting: Setting
    rank: int
    ranks: int
    peers: Path | None = None
    _worlds: dict[int, World] = field(default_factory=dict)

    def world(self, lanes: int) -> World:
        """The workers with so many sync lanes; methods never run at the same time, so they can share it."""
        if lanes not in self._worlds:
            self._worlds[lanes] = World.join(lanes=lanes)
        return self._worlds[lanes]

    def close(self) -> None:
        """Leave all worlds."""
        for world in self._worlds.values():
            world.close()


class Method(Loop):
    """A step of one way to exchange gradients; as it is, a loop by hand without any exchange.

    Attributes:
        note: What its row should say of it.
        declared_bytes: What the method says that this worker sent in the last step; None where it does not count.
    """

    note = ""
    declared_bytes: int | None = None

    def close(self) -> None:
        """End threads and process groups."""


def make_method(name: str, job: Job) -> Method:
    """The method of that name. A collective.

    Raises:
        UsageError: There is no such method or codec.
    """
    if name.startswith(_OWN):
        return _Own(job, *split_lanes(name.removeprefix(_OWN)))
    if name.startswith(_HOOK):
        return _Hooked(job.setting, name.removeprefix(_HOOK))
    if name == "none":
        return Method(job.setting)
    if name == "ddp":
        return Method(job.setting, fast_ddp)
    if name == "ddp-fp16":
        return Method(job.setting, partial(_ddp_with, None, default_hooks.fp16_compress_hook))
    if name.startswith("ddp-psgd"):
        return _ddp_powersgd(job.setting, int(name.removeprefix("ddp-psgd")))
    if name not in PEERS or job.peers is None:
        raise UsageError(f"no method {name!r}", fix="See benchmarks/sync/methods.py for their names.")
    return _Epfml(job, name) if PEERS[name].project == "epfml" else _Reduced(job, name)


def codec_of(name: str) -> str | None:
    """The codec of one of our methods; None for the methods of other projects."""
    for prefix in (_OWN, _HOOK):
        if name.startswith(prefix):
            return split_lanes(name.removeprefix(prefix))[0]
    return None


def split_lanes(text: str) -> tuple[str, int]:
    """`onebit@4` is codec onebit on 4 lanes; without a number, on as many as a user gets."""
    codec, at, lanes = text.partition("@")
    if at and not (lanes.isdigit() and 1 <= int(lanes) <= 8):
        raise UsageError(f"{lanes!r} lanes in {text!r}", "There are 1 to 8.", f"Try {codec}@2.")
    return codec, int(lanes) if at else TrainConfig().exchange.lanes


def make_methods(names: Sequence[str], job: Job) -> dict[str, Method]:
    """The methods that can be made; a line on rank 0 says why another cannot. A collective."""
    made = {}
    for name in names:
        try:
            made[name] = make_method(name, job)
        except UsageError as error:  # the same on all ranks, before anything was sent
            if job.rank == 0:
                print(f"no row for {name}: {error.what}", flush=True)
    return made


def _ddp_with(state: object, hook: Callable[..., Any], model: nn.Module, **options: Any) -> nn.Module:
    ddp = fast_ddp(model, **options)
    ddp.register_comm_hook(state, hook)
    return ddp


def _ddp_powersgd(setting: Setting, rank: int) -> Method:
    """Torch's PowerSGD hook in one bucket: its callbacks chain collectives, which several buckets can interleave."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=FULL_STEPS)
    module: Any = dist
    first = module._DEFAULT_FIRST_BUCKET_BYTES
    module._DEFAULT_FIRST_BUCKET_BYTES = 10**9
    try:
        method = Method(setting, partial(_ddp_with, state, powerSGD_hook.powerSGD_hook, bucket_cap_mb=1000))
    finally:
        module._DEFAULT_FIRST_BUCKET_BYTES = first
    method.note = f"one bucket; full precision in the first {FULL_STEPS} steps"
    return method


class _Reduced(Method):
    """A peer that replaces gradients after backward."""

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job.setting)
        assert job.peers is not None
        self._reduce = make_reduce(name, self.model, job.ranks, job.peers)
        self.note = PEERS[name].note

    def exchange(self) -> None:
        self._reduce(dict(self.model.named_parameters()))


class _Epfml(Method):
    """epfml/powersgd as its README says: it keeps its error in `.grad`, which is not set to zero."""

    note = f"full precision in the first {FULL_STEPS} steps"

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job.setting)
        assert job.peers is not None
        self._step = make_powersgd(name, list(self.model.parameters()), job.peers)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self._step(self.optimizer)
        return loss.detach()


class _Hooked(Method):
    """A codec of hybridpar as a hook of DistributedDataParallel."""

    def __init__(self, setting: Setting, codec: str) -> None:
        super().__init__(setting, partial(self._wrap, codec, setting.seed))

    def _wrap(self, codec: str, seed: int, model: nn.Module) -> nn.Module:
        self._state, hook = ddp_hook(codec, model, seed=seed)
        return _ddp_with(self._state, hook, model)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = super().step(images, labels)
        self.declared_bytes = self._state.traffic.wire
        return loss

    def close(self) -> None:
        self._state.close()


class _Own(Method):
    """hybridpar's trainer as `hybridpar train --compress CODEC` sets it up, guard and pooled BatchNorm included."""

    def __init__(self, job: Job, codec: str, lanes: int) -> None:
        setting, world = job.setting, job.world(lanes)
        config = TrainConfig(compress=codec, sync=f"allreduce:lanes={lanes}", seed=setting.seed)
        self.model = setting.build()
        self._trainer = Trainer(self.model, setting.optimizer, nn.CrossEntropyLoss(), config, world=world)
        self.note = f"{lanes} lanes, {world.transport}"

    def step(self, images: Tensor, labels: Tensor) -> Any:
        result = self._trainer.step((images, labels))
        self.declared_bytes = result.outcome.bytes_sent
        return result.loss

    def close(self) -> None:
        self._trainer.close()
