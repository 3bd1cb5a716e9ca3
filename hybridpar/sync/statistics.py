"""Means over workers that trained alone: of a whole model, and of its buffers.

Two BatchNorm layers with means m_k and variances v_k saw, together, data with

    mean = sum w_k m_k        variance = sum w_k (v_k + m_k^2) - mean^2

(w_k: the worker's share of the samples), which is not the mean of the variances: the means may lie apart. Counters of
batches become the largest; other floating-point buffers become their weighted mean. Other integers stay, and so do
buffers that are not finite when training begins, such as masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hybridpar.comm.world import World
from hybridpar.models.state_dicts import copy_of, is_extra

_MEAN, _VARIANCE, _COUNTER = "running_mean", "running_var", "num_batches_tracked"


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
        _average({name: state[name] for name in state if name in buffers}, world)
    return state


def average_statistics(model: nn.Module, world: World) -> None:
    """Make the running statistics of BatchNorm those of all workers' data; a collective. Every worker counts alike."""
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    held = {f"{path}.{name}": buffer for path, layer in layers for name, buffer in layer.named_buffers()}
    with world.named_errors("averaging buffers"):
        _average(held, world)


@torch.no_grad()
def _average(buffers: Mapping[str, Tensor], world: World) -> None:
    statistics = Statistics(lambda: buffers, world.rank, world.size)
    message = statistics.message(1.0)
    if world.control_group is not None and message.numel():
        world.control_group.all_reduce(message)
        statistics.load(message, world.size)
