"""Why: buckets are cut anew while training goes on, and what a codec keeps of a parameter must outlive them.

Coders are made once per parameter and live as long as training; the `Exchange` of a bucket lives as long as the buckets
are cut as they are. It runs on the sync lane that the bucket's sum would have run on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress import Codec, Coder, Exchange, TensorSpec, TorchGroup, bind, format_codec, parse_codec
from hybridpar.compress.hierarchy import NodeExchange
from hybridpar.compress.redivide import put_together as put_together
from hybridpar.compress.redivide import restore
from hybridpar.errors import SyncError
from hybridpar.pipeline.buckets import Bucket
from hybridpar.pipeline.collective import BackendSum, SumGroup
from hybridpar.pipeline.control import all_reduce_bytes
from hybridpar.pipeline.node_worlds import NodeWorlds
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
        nodes: Where gradients travel in full precision inside of nodes, and as the codec says between them.

    Raises:
        SyncError: The workers meet in shared memory, where only sums can be taken.
    """

    def __init__(
        self,
        codec: Codec,
        world: World,
        groups: Sequence[SumGroup],
        seed: int = 0,
        nodes: NodeWorlds | None = None,
    ) -> None:
        if not all(isinstance(group, BackendSum) for group in groups):
            raise SyncError(
                f"codec {format_codec(codec)!r} between workers that share memory",
                "Shared memory only adds; a codec needs the collectives of a process group.",
                "Join with World.join(shared_memory=False).",
            )
        self._codec = codec
        self._world = world
        self._seed = seed
        self._nodes = nodes
        self._groups = list(groups)
        # Who exchanges by the codec: all workers, or those of equal place on all nodes.
        self._party = world if nodes is None else nodes.across
        self._coders: dict[str, Coder] = {}
        self._saved: dict[str, Any] = {}
        self._exchanges: dict[int, Exchange | NodeExchange] = {}

    def cut(self, buckets: Sequence[Bucket]) -> None:
        """Follow how the buckets are cut; no step is under way. Only float32 is compressed."""
        self._exchanges = {bucket.index: self._exchange(bucket) for bucket in buckets if bucket.dtype == torch.float32}

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
        if isinstance(exchange, NodeExchange):
            assert self._nodes is not None
            return self._nodes.run(exchange, self._groups.index(group), flat)
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
        """What this worker needs to go on bit for bit: the codec, its state by parameter, and the worker's place."""
        parameters = {name: coder.state_dict() for name, coder in self._coders.items()}
        place = {"rank": self._party.rank, "workers": self._party.size, "nodes": self._node_sizes}
        leaders = {} if self._nodes is None else {"leaders": dict(self._nodes.leaders.chosen)}
        return {"codec": format_codec(self._codec), **place, **leaders, "parameters": parameters}

    @property
    def _node_sizes(self) -> list[int]:
        return [] if self._nodes is None else [len(node) for node in self._nodes.nodes.members]

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of this worker's own place and parameters; else those of all workers are needed."""
        own = (self._party.rank, self._party.size, self._node_sizes)
        theirs = (state.get("rank"), state.get("workers"), state.get("nodes"))
        return own == theirs and (not self._coders or self._coders.keys() == state["parameters"].keys())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, or what `put_together` made of what it returned on all workers of a run.

        What another codec kept means nothing to this one, and is left; so is one worker's state that does not fit.

        Raises:
            CheckpointError: A parameter's state does not fit it.
        """
        whole = "rank" not in state
        if state["codec"] != format_codec(self._codec) or not (whole or self.fits(state)):
            return
        self._saved = dict(state["parameters"])
        if self._nodes is not None and "leaders" in state:
            self._nodes.leaders.adopt(state["leaders"])
            self._coders.clear()  # made again, by those who lead now, when buckets are cut
            return
        for name, coder in self._coders.items():
            if name in self._saved:
                restore(coder, self._saved.pop(name))

    def close(self) -> None:
        """Leave the groups that were made for it. Safe to call twice."""
        if self._nodes is not None:
            self._nodes.close()

    def _exchange(self, bucket: Bucket) -> Exchange | NodeExchange:
        if self._nodes is None:
            return Exchange([self._coder(slot.name, slot.parameter) for slot in bucket.slots])
        sizes = [slot.parameter.numel() for slot in bucket.slots]
        coders = [
            self._coder(slot.name, slot.parameter) if self._nodes.leads(slot.name, size) else None
            for slot, size in zip(bucket.slots, sizes, strict=True)
        ]
        return NodeExchange(sizes, coders)

    def _coder(self, name: str, parameter: Tensor) -> Coder:
        if name not in self._coders:
            party = self._party
            spec = TensorSpec(
                name, tuple(parameter.shape), party.rank, party.size, self._seed, parameter.device, average=False
            )
            self._coders[name] = coder = bind(self._codec, spec)
            if name in self._saved:
                restore(coder, self._saved.pop(name))
        return self._coders[name]


def codec_states(state: Any) -> list[Mapping[str, Any]]:
    """What codecs kept, found in what an engine's `state_dict` returned on a worker; one entry per stage."""
    if not isinstance(state, Mapping):
        return []
    if "parameters" in state and "codec" in state:
        return [state]
    return [found for entry in state.values() for found in codec_states(entry)]


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


def make_compression(
    text: str, world: World, groups: Sequence[SumGroup], seed: int, hierarchy: bool = False
) -> Compression | None:
    """What `--compress` asks for; None where gradients are added as they are; a collective.

    Args:
        text: Name and options of a codec.
        world: The workers.
        groups: What the sync lanes add on.
        seed: For what the codec draws at random.
        hierarchy: Use the codec between nodes alone, where there are several and one of them has several workers.

    Raises:
        UsageError: The text names no codec.
        SyncError: See `Compression`.
    """
    codec = parse_codec(text)
    if format_codec(codec) == "none":
        return None
    nodes = NodeWorlds.open(world, len(groups)) if hierarchy else None
    return Compression(codec, world, groups, seed, nodes)
