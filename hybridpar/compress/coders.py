"""The coders of all parameters of a worker, and the exchanges that buckets are sent by.

Coders are made once per parameter and live as long as training: they keep what was not sent. Buckets are cut anew while
training goes on, so exchanges are made of the coders as buckets need them. The hook of DDP and the trainer's sync of
gradients are both made from this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.comm.group import Group, split
from hybridpar.comm.world import World
from hybridpar.compress.codec import Coder, TensorSpec
from hybridpar.compress.exchange import Exchange, PhaseTimer
from hybridpar.compress.nodes import Leaders, NodeWorlds
from hybridpar.compress.policy import Policy
from hybridpar.errors import SyncError


def has_rows(parameter: Tensor) -> bool:
    """Whether the parameter's memory is row after row of its first dimension: contiguous, channels last, or similar.

    What is not dense gets a contiguous gradient.
    """
    dense = parameter.dim() > 1 and torch.ops.aten.is_non_overlapping_and_dense(parameter)
    return not dense or len(parameter) == 1 or parameter.stride(0) * len(parameter) == parameter.numel()


@contextlib.contextmanager
def in_rows(flat: Tensor, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the gradients of a bucket lie row after row, as codecs take them.

    A transposed matrix would be another matrix to a codec.
    """
    parts = zip(split(flat, list(map(torch.numel, parameters))), parameters, strict=True)
    views = [(part, part.as_strided(each.shape, each.stride())) for part, each in parts if not has_rows(each)]
    for part, view in views:
        part.copy_(view.flatten())
    yield
    for part, view in views:
        view.copy_(part.clone().view(view.shape))


class BucketExchange(Exchange):
    """Exchanges the gradients of a bucket by codecs; where there are nodes, between them (`hybridpar.compress.nodes`).

    Coders are None for parameters that another worker of the node leads; `share` is what a node multiplies its sum
    with.
    """

    def __init__(self, parameters: Sequence[Tensor], coders: Sequence[Coder | None], share: float = 1.0) -> None:
        super().__init__([coder for coder in coders if coder is not None])
        self._parameters, self._share = parameters, share
        self._sizes = list(map(torch.numel, parameters))
        self._leads = [coder is not None for coder in coders]

    def add(self, flat: Tensor, across: Group | None, inside: Group | None = None) -> PhaseTimer | None:
        """Replace gradients by their sum or mean, over those who lead and this worker's node."""
        with in_rows(flat, self._parameters):
            if inside is not None:
                inside.all_reduce(flat)
            if self._share != 1:
                flat.mul_(self._share)
            parts = split(flat, self._sizes)
            mine = [part for part, leads in zip(parts, self._leads, strict=True) if leads]
            timer = None
            if mine:
                assert across is not None
                timer = self.run(across, mine, mine)
            for part, leads in zip(parts, self._leads, strict=True):
                if not leads:
                    part.zero_()
            if inside is not None:
                inside.all_reduce(flat)
        return timer


class ParameterCoders:
    """The coders of a worker's parameters."""

    def __init__(
        self, policy: Policy, world: World, seed: int = 0, nodes: NodeWorlds | None = None, *, average: bool
    ) -> None:
        alike = world.gather(policy.prepare(world.device))
        if len(set(map(str, alike))) > 1:
            raise SyncError(
                f"codec {str(policy)!r} has compiled kernels on some workers only: {', '.join(map(str, alike))}",
                "They round otherwise than torch in the last bits, so that replicas would drift apart.",
                "Install TVM on all machines, or set HYBRIDPAR_KERNELS=off on all.",
            )
        self.policy, self._seed, self._average, self._nodes = policy, seed, average, nodes
        # Who exchanges by the codec: all workers, or one of each node.
        self._party = world if nodes is None else nodes.across
        self._ranks = self._party.rank, self._party.size
        self._node_sizes = [] if nodes is None else [len(node) for node in nodes.nodes]
        self._leaders = Leaders(min(self._node_sizes, default=1))
        self._coders: dict[str, Coder] = {}
        self._saved: dict[str, Any] = {}
        self._samples = 1.0

    def exchange_of(self, names: Sequence[str], parameters: Sequence[Tensor]) -> BucketExchange:
        """A new exchange of some parameters; for between nodes with coders of those alone that this worker leads."""
        share = 1.0
        if self._nodes is not None and self._average:  # a node hands over the part of the mean that it has to add
            share = len(self._node_sizes) / sum(self._node_sizes)
        coders = [
            self._coder(name, parameter) if self._leads(name, parameter) else None
            for name, parameter in zip(names, parameters, strict=True)
        ]
        return BucketExchange(parameters, coders, share)

    def set_batch_scale(self, samples: float) -> None:
        """Say how many samples the coming steps have."""
        self._samples = samples
        for coder in self._coders.values():
            coder.set_samples(samples)

    def state_dict(self) -> dict[str, Any]:
        """What this worker needs to go on bit for bit: the policy, the codecs' state, and the worker's place."""
        rank, workers = self._ranks
        return {
            "codec": str(self.policy),
            "rank": rank,
            "workers": workers,
            "nodes": self._node_sizes,
            "leaders": dict(self._leaders.chosen),
            "parameters": {**self._saved, **{name: coder.state_dict() for name, coder in self._coders.items()}},
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of this worker's own place, among as many workers."""
        return (*self._ranks, self._node_sizes) == tuple(state.get(key) for key in ("rank", "workers", "nodes"))

    def _load(self, state: Mapping[str, Any]) -> None:
        """Forget all coders; those that are made from now on go on from a state."""
        self._coders, self._saved = {}, dict(state.get("parameters", {}))
        if self._nodes is not None and "leaders" in state:
            self._leaders.chosen = dict(state["leaders"])

    def _leads(self, name: str, parameter: Tensor) -> bool:
        """Whether this worker exchanges a parameter by its codec."""
        # Ranks inside a node are in the order of places there.
        return self._nodes is None or self._leaders.of(name, parameter.numel()) == self._nodes.inside.rank

    def _coder(self, name: str, parameter: Tensor) -> Coder:
        if name not in self._coders:
            shape = tuple(parameter.shape)
            spec = TensorSpec(name, shape, *self._ranks, self._seed, parameter.device, average=self._average)
            self._coders[name] = coder = self.policy.codec_of(name).bind(spec)
            coder.set_samples(self._samples)
            saved = self._saved.pop(name, None)
            if saved is not None:
                coder.load_state_dict(saved)
        return self._coders[name]
