"""Buffers of a model: a step that is rolled back puts them back, replicas take those of the first, and workers that
trained alone take their mean.

Two BatchNorm layers with means m_k and variances v_k saw, together, data with

    mean = sum w_k m_k        variance = sum w_k (v_k + m_k^2) - mean^2

(w_k: the worker's share of the samples), which is not the mean of the variances: the means may lie apart. Counters of
batches become the largest; other floating-point buffers become their weighted mean. Other integers stay, and so do
buffers that are not finite when training begins, such as masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hybridpar.comm.group import split
from hybridpar.comm.world import World
from hybridpar.errors import SyncError
from hybridpar.models.state_dicts import copy_of, is_extra
from hybridpar.sync.batchnorm import BatchNormPool

_MEAN, _VARIANCE, _COUNTER = "running_mean", "running_var", "num_batches_tracked"


class BufferRollback:
    """Puts the buffers of a model back to what they were at the beginning of a step, which is rolled back.

    Stock BatchNorm moves its running statistics in every forward call, and one NaN in them would stay for ever. So
    the buffers that a forward pass may change are copied at the beginning of a step; they are small. What is pooled
    needs no copy. A pass may write into a buffer, resize it, or assign another tensor: buffers are looked up by name.
    """

    def __init__(self, model: nn.Module, spared: Iterable[nn.Module] = ()) -> None:
        ignored = set(spared)  # but not what is in them, as observers are
        self._held = [module._buffers for module in model.modules() if module not in ignored]
        self._before: list[dict[str, Any]] = []  # the tensors of each module, and None
        self._tensors: list[Tensor] = []
        self._forms: list[Any] = []
        self._saved: list[Tensor] = []
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the buffers; called before the first forward pass of a step."""
        self._before = list(map(dict, self._held))
        tensors = list(filter(torch.is_tensor, chain.from_iterable(map(dict.values, self._before))))
        forms = _forms(tensors)
        if forms != self._forms:
            self._saved = [torch.empty_like(tensor) for tensor in tensors]
        self._tensors, self._forms = tensors, forms
        if tensors:
            torch._foreach_copy_(self._saved, tensors)

    @torch.no_grad()
    def restore(self, unless: Tensor | None = None) -> None:
        """Put back what `keep` saw, the tensors and their values; where `unless` is not 0, the tensors only."""
        tensors, values = self._tensors, self._saved
        pairs = list(zip(self._held, self._before, strict=True))
        now: list[Any] = [
            held.get(name) for held, before in pairs for name, buffer in before.items() if buffer is not None
        ]
        resized = [index for index, form in enumerate(_forms(tensors)) if form != self._forms[index]]
        if unless is not None:
            # What was assigned is written into the tensors from before; one with two names may now be two tensors.
            alike = all(held.keys() == before.keys() for held, before in pairs) and _forms(now) == self._forms
            if alike and not resized and len(set(map(id, tensors))) == len(tensors):
                values = [torch.where(unless != 0, new, old) for new, old in zip(now, values, strict=True)]
            elif bool(unless):
                return
        for index in resized:
            tensors[index].data = torch.empty_like(values[index])
        # `.data`: another stage may have saved a constant of both for a backward pass of the next step.
        if tensors:
            torch._foreach_copy_([tensor.data for tensor in tensors], values)
        for held, before in pairs:
            if [*map(id, held.values())] != [*map(id, before.values())]:
                held.clear()
                held.update(before)


def _forms(tensors: Sequence[Any]) -> list[Any]:
    return [None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


class ReplicaBuffers:
    """Gives all replicas of a stage the first one's buffers, once per step.

    DistributedDataParallel broadcasts all buffers before the first forward pass of a step. Here it is done behind the
    last one, beside the backward passes; the values are taken over with the update of the parameters. On CPUs that is
    left out where no replica's buffers have changed, as those of tables and masks.
    """

    def __init__(self, module: nn.Module, replicas: World, pool: BatchNormPool | None) -> None:
        norms = (
            {inside for inside in module.modules() if isinstance(inside, _BatchNorm)}
            if pool is None
            else set(pool.layers)
        )
        self._modules = [inside for inside in module.modules() if inside not in norms]
        self._replicas = replicas
        self._common: Tensor | None = None  # what all had after the last exchange
        self._latest: Tensor | None = None
        #: Whether there are other replicas, and buffers that are no statistics of BatchNorm; all know the same.
        self.shared = replicas.size > 1 and any(inside._buffers for inside in self._modules)

    def share(self, *, new: bool = False) -> None:
        """Give all replicas the first one's values between two steps; a collective. With `new`, where none had any."""
        if self.shared or (new and self._replicas.size > 1):
            self.look()
            self.exchange()
            self.shared = self.shared or self._latest is not None
            self.take()

    @torch.no_grad()
    def look(self) -> None:
        """Note what this replica has, as bytes: of them sums with zeros are exact, whatever the dtype."""
        device, nothing = self._replicas.device, torch.empty(0, dtype=torch.uint8)
        parts = [buffer.contiguous().view(-1).view(torch.uint8) for buffer in self._present()]
        flat = torch.cat([part.to(device) for part in (nothing, *parts)])
        self._latest = functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)

    def exchange(self) -> None:
        """Receive the first replica's values, on a lane of control messages; a collective."""
        latest, group = self._latest, self._replicas.control_group
        assert latest is not None
        assert group is not None
        with self._replicas.named_errors("exchanging buffers"):
            if latest.device.type == "cpu" or not self.shared:
                size = latest.numel()
                changed = self._common is None or not torch.equal(self._common, latest)
                facts = torch.tensor([changed, size, size * size], dtype=torch.float64, device=latest.device)
                group.all_reduce(facts)
                anywhere, total, squares = facts.tolist()
                if not (anywhere and total):
                    self._latest = None
                    return
                if self._replicas.size * squares != total**2:
                    raise SyncError(
                        "the buffers of the model do not have the same sizes on all workers",
                        "All take worker 0's; on a worker without samples a buffer does not change its size.",
                        "Give every worker samples in the first steps.",
                    )
            if self._replicas.rank:
                latest.zero_()
            group.all_reduce(latest)
            self._common = latest

    @torch.no_grad()
    def take(self) -> None:
        """Write what was received into the buffers."""
        latest, self._latest = self._latest, None
        if latest is None or not self._replicas.rank:
            return
        buffers = self._present()
        sizes = [buffer.nbytes for buffer in buffers]
        for part, buffer in zip(split(latest.view(torch.uint8), sizes), buffers, strict=True):
            # A copy begins where every dtype may; for `.data` see `BufferRollback.restore`.
            buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _present(self) -> list[Tensor]:
        return [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]


class Statistics:
    """Buffers whose mean over the workers is taken by adding a message of each."""

    def __init__(self, buffers: Callable[[], Mapping[str, Tensor]], rank: int, workers: int) -> None:
        self._buffers = buffers  # by name, as they are now: forward may assign others
        self._rank, self._workers = rank, workers
        now = buffers()
        floats = {name: buffer for name, buffer in now.items() if buffer.is_floating_point() and buffer.numel()}
        self._means = [name for name in floats if name.endswith(_MEAN) and _variance_of(name) in floats]
        self._variances = [_variance_of(name) for name in self._means]
        taken = {*self._means, *self._variances}
        self._others = [name for name, buffer in floats.items() if name not in taken and bool(buffer.isfinite().all())]
        self._counters = [name for name in now if name.endswith(_COUNTER)]

    @torch.no_grad()
    def message(self, weight: float) -> Tensor:
        """What this worker adds: weighted moments and values, then its counters, which no other worker writes to."""
        now = self._buffers()
        means = [now[name].double() for name in self._means]
        parts = [mean.flatten() for mean in means]
        parts += [
            (now[name].double() + mean.square()).flatten() for name, mean in zip(self._variances, means, strict=True)
        ]
        parts += [now[name].double().flatten() for name in self._others]
        device = next((part.device for part in parts), torch.device("cpu"))
        values = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
        values = values * weight if weight else torch.zeros_like(values)
        counts = torch.zeros(self._workers, len(self._counters), dtype=torch.float64, device=device)
        if self._counters:
            counts[self._rank] = torch.stack([now[name].detach().reshape(()) for name in self._counters]).to(counts)
        return torch.cat((values, counts.flatten()))

    @torch.no_grad()
    def load(self, total: Tensor, weight: float) -> None:
        """Take over the means."""
        now = self._buffers()
        names = (*self._means, *self._variances, *self._others)
        sizes = [now[name].numel() for name in names]
        moments = dict(zip(names, torch.split(total[: sum(sizes)] / weight, sizes), strict=True))
        for mean, variance in zip(self._means, self._variances, strict=True):
            moments[variance] = (moments[variance] - moments[mean].square()).clamp_(min=0)
        for name, value in moments.items():
            now[name].copy_(value.view(now[name].shape))
        if self._counters:
            largest = total[sum(sizes) :].view(self._workers, -1).amax(0)
            for name, value in zip(self._counters, largest, strict=True):
                now[name].copy_(value)


def _variance_of(mean: str) -> str:
    return mean.removesuffix(_MEAN) + _VARIANCE


@torch.no_grad()
def average_model(model: nn.Module, world: World) -> dict[str, Tensor]:
    """The mean of the workers' models, in new memory; a collective. Every worker counts alike."""
    state = copy_of(model.state_dict())
    if world.control_group is None:
        return state
    buffers = {name for name, _ in model.named_buffers()}
    with world.named_errors("averaging the model"):
        for name, tensor in state.items():
            if name not in buffers and not is_extra(name) and tensor.is_floating_point() and tensor.numel():
                flat = tensor.flatten().div_(world.size)
                world.control_group.all_reduce(flat)
                tensor.copy_(flat.view(tensor.shape))
        held = {name: state[name] for name in state if name in buffers}
        statistics = Statistics(lambda: held, world.rank, world.size)
        message = statistics.message(1.0)
        if message.numel():
            world.control_group.all_reduce(message)
            statistics.load(message, world.size)
    return state
