"""Divides the state of codecs anew when a job resumes with another number of workers.

The rule: what a residual would have added to the result stays the same. All old workers' residuals of a key are put
together in the layout of the gradient. At each element the total is divided evenly among the new workers that keep a
residual there: all of them where each keeps a whole tensor, the owner alone where each keeps a stripe. So residuals of
stripes become one tensor and are cut anew, and every worker gets its share of those of workers.

Where results are means over the workers, a residual counts 1/K: the total is multiplied with new / old workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.compress.codec import WORKER, Codec, Coder, Kept, TensorSpec
from hybridpar.errors import CheckpointError


def divide(codec: Codec, spec: TensorSpec, saved: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The residuals of one worker, made of those of all workers of a job that had another number of them.

    Args:
        codec: What the residuals belong to, without error feedback around it.
        spec: The parameter, and the worker that goes on.
        saved: Residuals by key, for each old worker by rank.

    Returns:
        Residuals by key, 1-D float32.

    Raises:
        CheckpointError: Residuals are not as large as the codec's.
    """
    local = replace(spec, device=torch.device("cpu"))
    old = [codec.bind(replace(local, rank=rank, workers=len(saved))) for rank in range(len(saved))]
    new = [codec.bind(replace(local, rank=rank)) for rank in range(spec.workers)]
    for rank, (coder, residuals) in enumerate(zip(old, saved, strict=True)):
        sizes = {key: residual.numel() for key, residual in residuals.items()}
        if sizes != dict(coder.residuals):
            raise CheckpointError(
                f"the residuals of {spec.name!r} of worker {rank} of {len(saved)} have sizes {sizes}, and "
                f"{dict(coder.residuals)} are needed",
                "They depend on the codec, its options, the parameter's shape and the number of workers.",
                "Give the states of all workers, by rank, of a run with the same codec and model.",
            )
    scale = spec.divisor / old[0].spec.divisor
    mine = new[spec.rank]
    totals = {key: _zeros(spec) for key in mine.residuals}
    for coder, residuals in zip(old, saved, strict=True):
        for key, residual in residuals.items():
            # Two workers own no stripes: what owners had not sent is divided among all.
            coder.spread(key, residual.to("cpu", torch.float64), totals[key if key in totals else WORKER])
    divided = {}
    for key, size in mine.residuals.items():
        keepers = _zeros(spec)
        for coder in new:
            coder.spread(key, torch.ones(coder.residuals[key], dtype=torch.float64), keepers)
        shares = totals[key].mul_(scale).div_(keepers.clamp_(min=1))
        divided[key] = shares[places(mine, key, size)].float()
    return divided


def even_share(spec: TensorSpec, saved: Sequence[Tensor]) -> Tensor:
    """What one worker takes over of something that each old worker kept for the whole gradient.

    Args:
        spec: The parameter, and the worker that goes on.
        saved: What each old worker kept, of one shape.
    """
    scale = spec.divisor / (len(saved) if spec.average else 1) / spec.workers
    return torch.stack([one.double() for one in saved]).sum(0).mul_(scale).float()


class KeepingCoder(Coder):
    """A coder that keeps tensors, of which each step makes new ones; its state is these, and how many steps counted.

    Attributes:
        kept: The tensors, by their names in the state.
    """

    kept: dict[str, Kept]
    _steps = 0

    def commit(self) -> None:
        for one in self.kept.values():
            one.commit()
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, **{key: one.now.clone() for key, one in self.kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, one in self.kept.items():
            one.load(state[key], self.spec.name)
        self._steps = int(state["steps"])

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """What other than these many workers kept is divided."""
        same = len(states) == self.spec.workers
        self.load_state_dict(states[self.spec.rank] if same else {**states[0], **self._divided(states)})

    def _divided(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Of what is not equal on all workers the part of this one: here the same share for each."""
        return {key: even_share(self.spec, [state[key] for state in states]) for key in self.kept}


def _zeros(spec: TensorSpec) -> Tensor:
    return torch.zeros(spec.count, dtype=torch.float64)


def places(coder: Coder, key: str, size: int) -> Tensor:
    """Where in the gradient each element of a residual lies.

    Args:
        coder: Whose residual it is.
        key: Its key.
        size: Its elements.

    Returns:
        1-D int64.
    """
    numbers = _zeros(coder.spec)
    coder.spread(key, torch.arange(1, size + 1, dtype=torch.float64), numbers)
    (found,) = torch.nonzero(numbers, as_tuple=True)
    result = torch.empty(size, dtype=torch.int64)
    result[numbers[found].long() - 1] = found
    return result


def put_together(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all workers of a job saved, as one state that any number of workers can load.

    Args:
        states: What `state_dict` of the hook, or of the trainer's codecs, returned on each worker, in any order.

    Returns:
        The same with every parameter's states by rank, in a list.

    Raises:
        CheckpointError: The state of a worker is missing, or there are states of different runs.
    """
    found: dict[str, dict[int, Any]] = {}
    wanted: dict[str, int] = {}
    for state in states:
        if state["codec"] != states[0]["codec"]:
            raise CheckpointError(
                f"states of codecs {states[0]['codec']!r} and {state['codec']!r}",
                "All workers of a run use one codec.",
                "Give the states that one run saved at one step.",
            )
        for name, entry in state["parameters"].items():
            found.setdefault(name, {})[int(state["rank"])] = entry
            wanted[name] = int(state["workers"])
    for name, entries in found.items():
        if sorted(entries) != list(range(wanted[name])):
            raise CheckpointError(
                f"{name!r} was saved by {wanted[name]} workers, and there are the states of {sorted(entries)}",
                "Each worker keeps what it did not send, so all of them are needed.",
                "Give the states of all workers of the run.",
            )
    parameters = {name: [entries[rank] for rank in sorted(entries)] for name, entries in found.items()}
    return {"codec": states[0]["codec"] if states else "", "parameters": parameters}
