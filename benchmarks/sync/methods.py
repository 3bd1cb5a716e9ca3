"""Sets up the compared methods, which train the same model and differ only in how gradients are exchanged.

A method is a name, as it stands in the table:

    none                      no exchange at all: the floor, which no method can be below
    ddp, ddp-fp16             DistributedDataParallel, and with torch's own hook
    ddp-psgd1, ddp-psgd4      torch's PowerSGD hook of rank 1 and 4, in one bucket; with several it can hang on gloo
    epfml-..., grace-..., seed-...   see `benchmarks.sync.peers`
    own:CODEC[@LANES]         hybridpar's trainer with `--compress CODEC --sync allreduce:lanes=LANES`
    own:auto[:FIDELITY]       the same, with a codec that it measures and chooses itself
    hook:CODEC                hybridpar's hook on DistributedDataParallel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.sync.peers import FULL_STEPS, PEERS, Reduce, make_powersgd, make_reduce
from hybridpar.comm.world import World
from hybridpar.compress.ddp import ddp_hook
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.models import build_model, seed_everything
from hybridpar.train.trainer import Trainer

CLASSES = 10
#: For `--quick`: whether a table runs shows as well on a net of milliseconds.
TINY = "benchmarks.pipeline.setups:tiny_net"
#: What every method does, for the table.
WORK = "forward, backward, exchange, SGD with momentum 0.9 (fused); fp32"

_OWN, _HOOK = "own:", "hook:"


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        model: A torchvision model, with the stem that it has for ImageNet, or module:factory.
        side: Height and width of the images.
        batch: Samples of a worker in a step.
        rate: Learning rate.
        seed: Of the weights, and of what codecs draw.
    """

    model: str = "resnet18"
    side: int = 32
    batch: int = 16
    rate: float = 1e-3
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.model}, {self.side}x{self.side} images, batch {self.batch} per rank"

    def build(self) -> nn.Module:
        """The model, with the same weights for every method."""
        seed_everything(self.seed)
        return build_model(self.model, CLASSES)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, alike for every method."""
        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=0.9, fused=True)

    def noise(self, rank: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a worker, for timing."""
        generator = torch.Generator().manual_seed(rank)
        images = torch.randn(self.batch, 3, self.side, self.side, generator=generator)
        return images, torch.randint(0, CLASSES, (self.batch,), generator=generator)


@dataclass
class Workplace:
    """What all methods of a rank share.

    Attributes:
        setting: What is trained.
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


class Method:
    """A step of one way to exchange gradients.

    Attributes:
        model: What it trains.
        note: What its row should say of it.
    """

    model: nn.Module
    note = ""

    def step(self, images: Tensor, labels: Tensor) -> float:
        """One step, to its end; the loss before it, of this worker's samples or of all."""
        raise NotImplementedError

    @property
    def declared_bytes(self) -> int | None:
        """What the method says that this worker sent in the last step; None where it does not count."""
        return None

    def close(self) -> None:
        """End threads and process groups."""


def make_method(name: str, place: Workplace) -> Method:
    """The method of that name. A collective.

    Raises:
        UsageError: There is no such method or codec.
    """
    if name.startswith(_OWN):
        codec, lanes = split_lanes(name.removeprefix(_OWN))
        return _Own(place, codec, lanes)
    if name.startswith(_HOOK):
        return _Hooked(place, name.removeprefix(_HOOK))
    if name == "none":
        return _ByHand(place.setting, None)
    if name in ("ddp", "ddp-fp16"):
        return _Ddp(place.setting, default_hooks.fp16_compress_hook if name == "ddp-fp16" else None)
    if name.startswith("ddp-psgd"):
        return _DdpPowerSgd(place.setting, int(name.removeprefix("ddp-psgd")))
    if name not in PEERS or place.peers is None:
        raise UsageError(f"no method {name!r}", fix="See benchmarks/sync/methods.py for their names.")
    if PEERS[name].project == "epfml":
        return _Epfml(place.setting, name, place.peers)
    model = place.setting.build()
    method = _ByHand(place.setting, make_reduce(name, model, place.ranks, place.peers), model)
    method.note = PEERS[name].note
    return method


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


class _ByHand(Method):
    """A loop by hand, with whatever a peer does between backward and the optimizer."""

    def __init__(self, setting: Setting, reduce: Reduce | None, model: nn.Module | None = None) -> None:
        self.model = setting.build() if model is None else model
        self._optimizer = setting.optimizer(self.model)
        self._reduce = reduce
        self._parameters: Mapping[str, nn.Parameter] = dict(self.model.named_parameters())

    def step(self, images: Tensor, labels: Tensor) -> float:
        """See `Method`."""
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        if self._reduce is not None:
            self._reduce(self._parameters)
        self._optimizer.step()
        return loss.item()


class _Epfml(Method):
    """epfml/powersgd as its README says: it keeps its error in `.grad`, which is not set to zero."""

    note = f"full precision in the first {FULL_STEPS} steps"

    def __init__(self, setting: Setting, name: str, folder: Path) -> None:
        self.model = setting.build()
        self._optimizer = setting.optimizer(self.model)
        self._step = make_powersgd(name, list(self.model.parameters()), folder)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """See `Method`."""
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self._step(self._optimizer)
        return loss.item()


class _Ddp(Method):
    """DistributedDataParallel in its fastest documented form, with or without a hook."""

    def __init__(
        self, setting: Setting, hook: Callable[..., Any] | None = None, state: object = None, **options: Any
    ) -> None:
        self.model = setting.build()
        self._ddp = DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True, **options
        )
        if hook is not None:
            self._ddp.register_comm_hook(state, hook)
        self._optimizer = setting.optimizer(self.model)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """See `Method`."""
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self._ddp(images), labels)
        loss.backward()
        self._optimizer.step()
        return loss.item()


class _DdpPowerSgd(_Ddp):
    """Torch's PowerSGD hook in one bucket: its callbacks chain collectives, which several buckets can interleave."""

    note = f"one bucket; full precision in the first {FULL_STEPS} steps"

    def __init__(self, setting: Setting, rank: int) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=FULL_STEPS)
        module: Any = dist
        first = module._DEFAULT_FIRST_BUCKET_BYTES
        module._DEFAULT_FIRST_BUCKET_BYTES = 10**9
        try:
            super().__init__(setting, powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=1000)
        finally:
            module._DEFAULT_FIRST_BUCKET_BYTES = first


class _Hooked(_Ddp):
    """A codec of hybridpar as a hook of DistributedDataParallel."""

    def __init__(self, place: Workplace, codec: str) -> None:
        super().__init__(place.setting)
        self._state, hook = ddp_hook(codec, self.model, seed=place.setting.seed)
        self._ddp.register_comm_hook(self._state, hook)

    @property
    def declared_bytes(self) -> int | None:
        """See `Method`."""
        return self._state.traffic.wire

    def close(self) -> None:
        """See `Method`."""
        self._state.close()


class _Own(Method):
    """hybridpar's trainer as `hybridpar train --compress CODEC` sets it up, guard and pooled BatchNorm included."""

    def __init__(self, place: Workplace, codec: str, lanes: int) -> None:
        setting = place.setting
        name, _, fidelity = codec.partition(":")
        options: dict[str, Any] = {"compress": codec}
        if name == "auto":  # chooses the codec alone
            options = {"compress": name, "plan": "none", **({"fidelity": fidelity} if fidelity else {})}
        config = TrainConfig(**options, sync=f"allreduce:lanes={lanes}", seed=setting.seed)
        world = place.world(lanes)
        self.model = setting.build()
        # As in `hybridpar train`, the codec is searched for: by the inputs, for a run that is long enough.
        known: dict[str, Any] = {}
        if name == "auto":
            known = {"example": torch.zeros(setting.batch, 3, setting.side, setting.side), "total_steps": 10**6}
        self._trainer = Trainer(self.model, setting.optimizer, nn.CrossEntropyLoss(), config, world=world, **known)
        self._sent = 0
        self.note = f"{lanes} lanes, {world.transport}"
        if name == "auto":
            engine: Any = self._trainer.engine
            self.note += f", chose {engine.pipeline.options.sync.policy}"

    def step(self, images: Tensor, labels: Tensor) -> float:
        """See `Method`."""
        result = self._trainer.step((images, labels))
        self._sent = result.outcome.bytes_sent
        return result.loss

    @property
    def declared_bytes(self) -> int | None:
        """See `Method`."""
        return self._sent

    def close(self) -> None:
        """See `Method`."""
        self._trainer.close()
