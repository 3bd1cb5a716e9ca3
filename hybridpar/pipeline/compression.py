"""Why: buckets are cut anew while training goes on, and what a codec keeps of a parameter must outlive them.

Coders are made once per parameter and live as long as training; the `Exchange` of a bucket lives as long as the buckets
are cut as they are. It runs on the sync lane that the bucket's sum would have run on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress import (
    Codec,
    Coder,
    Exchange,
    TensorSpec,
    TorchGroup,
    bind,
    check_optimizer,
    format_codec,
    parse_codec,
)
from hybridpar.errors import SyncError
from hybridpar.pipeline.buckets import Bucket
from hybridpar.pipeline.collective import BackendSum, SumGroup
from hybridpar.pipeline.control import all_reduce_bytes
from hybridpar.pipeline.world import World

_log = logging.getLogger(__name__)


class Compression:
    """Adds gradients over the workers as a codec's messages, and remembers what was not sent.

    The calls of a step: `add` for each bucket, on its sync lane; then `settle`, when it is known whether the step
    counts, before the next step's first `add`.

    Args:
        codec: What gradients travel as.
        world: The workers, at least two.
        groups: What the sync lanes add on.
        seed: For what the codec draws at random; equal on all workers.

    Raises:
        SyncError: The workers meet in shared memory, where only sums can be taken.
    """

    def __init__(self, codec: Codec, world: World, groups: Sequence[SumGroup], seed: int = 0) -> None:
        if not all(isinstance(group, BackendSum) for group in groups):
            raise SyncError(
                f"codec {format_codec(codec)!r} between workers that share memory",
                "Shared memory only adds; a codec needs the collectives of a process group.",
                "Join with World.join(shared_memory=False).",
            )
        self._codec = codec
        self._world = world
        self._seed = seed
        self._coders: dict[str, Coder] = {}
        self._saved: dict[str, Any] = {}
        self._exchanges: dict[int, Exchange] = {}

    def cut(self, buckets: Sequence[Bucket]) -> None:
        """Follow how the buckets are cut; no step is under way. Only float32 is compressed."""
        self._exchanges = {
            bucket.index: Exchange([self._coder(slot.name, slot.parameter) for slot in bucket.slots])
            for bucket in buckets
            if bucket.dtype == torch.float32
        }

    def add(self, bucket: Bucket, flat: Tensor, group: SumGroup) -> int:
        """Replace a bucket's gradients by what the workers make of their sum; equal bit for bit on all of them.

        Args:
            bucket: The bucket.
            flat: Its gradients, 1-D.
            group: What the sync lane adds on.

        Returns:
            Bytes that this worker sent.

        Raises:
            RuntimeError: A peer died or did not come in time.
        """
        exchange = self._exchanges.get(bucket.index)
        if exchange is None:
            group.all_reduce(flat)
            return all_reduce_bytes(bucket.bytes, self._world.size)
        assert isinstance(group, BackendSum)
        sizes = [slot.parameter.numel() for slot in bucket.slots]
        parts: list[Tensor] = list(torch.split(flat, sizes))
        return exchange.run(TorchGroup(group.group), parts, parts).wire

    def settle(self, committed: bool, unused: Collection[str] = ()) -> None:
        """A step is over, in which all buckets were added.

        Args:
            committed: Whether it counts. If not, all that codecs keep is as it was before.
            unused: Names of parameters for which it does not: no worker had a gradient for them.
        """
        for exchange in self._exchanges.values():
            if committed:
                exchange.commit(unused)
            else:
                exchange.rollback()

    def set_rate(self, learning_rate: float) -> None:
        """Say which learning rate the coming steps use."""
        for coder in self._coders.values():
            coder.rescale(learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """What this worker needs to go on bit for bit: the codec, and its state by parameter."""
        parameters = {name: coder.state_dict() for name, coder in self._coders.items()}
        return {"codec": format_codec(self._codec), "parameters": parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; what another codec kept means nothing to this one, and is left.

        Raises:
            CheckpointError: A parameter's state does not fit it.
        """
        if state["codec"] != format_codec(self._codec):
            return
        self._saved = dict(state["parameters"])
        for name, coder in self._coders.items():
            if name in self._saved:
                coder.load_state_dict(self._saved.pop(name))

    def _coder(self, name: str, parameter: Tensor) -> Coder:
        if name not in self._coders:
            world = self._world
            spec = TensorSpec(
                name, tuple(parameter.shape), world.rank, world.size, self._seed, parameter.device, average=False
            )
            self._coders[name] = coder = bind(self._codec, spec)
            if name in self._saved:
                coder.load_state_dict(self._saved.pop(name))
        return self._coders[name]


def check_compression(text: str, replicas: int) -> None:
    """Check what `--compress` says also where nothing is exchanged, and say so.

    Args:
        text: Name and options of a codec.
        replicas: Workers that exchange gradients.

    Raises:
        UsageError: The text names no codec.
    """
    if format_codec(parse_codec(text)) != "none" and replicas == 1:
        _log.warning("--compress %s can gain nothing: there is one replica, and its gradients go nowhere", text)


def check_momentum(text: str, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Check that no momentum is kept twice: by the codec, and by an optimizer.

    Raises:
        UsageError: One is, or the text names no codec.
    """
    codec = parse_codec(text)
    for optimizer in optimizers:
        check_optimizer(codec, optimizer)


def make_compression(text: str, world: World, groups: Sequence[SumGroup], seed: int) -> Compression | None:
    """What `--compress` asks for; None where gradients are added as they are.

    Raises:
        UsageError: The text names no codec.
        SyncError: See `Compression`.
    """
    codec = parse_codec(text)
    return None if format_codec(codec) == "none" else Compression(codec, world, groups, seed)
