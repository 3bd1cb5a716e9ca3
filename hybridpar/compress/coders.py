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

from hybridpar.comm.group import split
from hybridpar.compress.codec import Coder, TensorSpec
from hybridpar.compress.exchange import Exchange
from hybridpar.compress.feedback import RescaledCoder
from hybridpar.compress.nodes import Leaders, NodeExchange, Nodes
from hybridpar.compress.policy import Policy


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
    parts = zip(split(flat, [one.numel() for one in parameters]), parameters, strict=True)
    views = [(part, part.as_strided(one.shape, one.stride())) for part, one in parts if not has_rows(one)]
    for part, view in views:
        part.copy_(view.flatten())
    yield
    for part, view in views:
        view.copy_(part.clone().view(view.shape))


class ParameterCoders:
    """The coders of a worker's parameters."""

    def __init__(
        self,
        policy: Policy,
        rank: int,
        workers: int,
        seed: int,
        *,
        average: bool,
        nodes: Nodes | None = None,
        place: int = 0,
    ) -> None:
        self.policy = policy
        self._place = rank, workers
        self._seed = seed
        self._average = average
        self._members = nodes.members if nodes is not None else ()
        self._own_place = place
        self._leaders = Leaders(nodes.leaders if nodes is not None else 1)
        self._coders: dict[str, Coder] = {}
        #: Those that are to know learning rates.
        self.rescaling: list[RescaledCoder] = []
        self._rate: float | None = None
        self._saved: dict[str, Any] = {}
        self._samples = 1.0

    def exchange_of(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Exchange | NodeExchange:
        """A new exchange of some parameters; for between nodes with coders of those alone that this worker leads."""
        if not self._members:
            return Exchange([self._coder(name, one) for name, one in zip(names, parameters, strict=True)])
        coders = [
            self._coder(name, one) if self._leaders.of(name, one.numel()) == self._own_place else None
            for name, one in zip(names, parameters, strict=True)
        ]
        # A node hands over the part of the mean that it has to add.
        share = len(self._members) / sum(map(len, self._members)) if self._average else 1.0
        return NodeExchange([one.numel() for one in parameters], coders, share)

    def set_rate(self, learning_rate: float) -> None:
        """Say which learning rate the coming steps use, for error feedback with `rescale`.

        It counts once the step before is settled, which is of another rate.
        """
        self._rate = learning_rate

    def use_rate(self) -> None:
        """All steps before are settled: the coming ones have the rate that was said last."""
        if self._rate is not None:
            for coder in self.rescaling:
                coder.set_rate(self._rate)

    def set_batch_scale(self, samples: float) -> None:
        """Say how many samples the coming steps have."""
        self._samples = samples
        for coder in self._coders.values():
            coder.set_samples(samples)

    def state_dict(self) -> dict[str, Any]:
        """What this worker needs to go on bit for bit: the policy, the codecs' state, and the worker's place."""
        rank, workers = self._place
        return {
            "codec": str(self.policy),
            "rank": rank,
            "workers": workers,
            "nodes": self._node_sizes,
            "leaders": dict(self._leaders.chosen),
            "parameters": {name: coder.state_dict() for name, coder in self._coders.items()},
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of this worker's own place, among as many workers."""
        return (*self._place, self._node_sizes) == tuple(state.get(key) for key in ("rank", "workers", "nodes"))

    def _load(self, state: Mapping[str, Any]) -> None:
        """Forget all coders; those that are made from now on go on from a state."""
        self._coders, self.rescaling, self._saved = {}, [], dict(state.get("parameters", {}))
        if self._members and "leaders" in state:
            self._leaders.chosen = dict(state["leaders"])

    @property
    def _node_sizes(self) -> list[int]:
        return [len(node) for node in self._members]

    def _coder(self, name: str, parameter: Tensor) -> Coder:
        if name not in self._coders:
            shape = tuple(parameter.shape)
            spec = TensorSpec(name, shape, *self._place, self._seed, parameter.device, average=self._average)
            self._coders[name] = coder = self.policy.bind(spec)
            coder.set_samples(self._samples)
            if isinstance(coder, RescaledCoder):
                self.rescaling.append(coder)
            saved = self._saved.pop(name, None)
            if saved is not None:
                coder.load_state_dict(saved)
        return self._coders[name]
