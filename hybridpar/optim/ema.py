"""The exponential moving average (EMA) of a model's parameters and buffers, on the device of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.models.state_dicts import copy_of, is_extra, load_values


class ModelAverage:
    """The moving average of all that is in a module's state dict, number for number as timm's ModelEmaV3 has it.

    After step t: average = d average + (1 - d) value, with d = `decay`, or with `warmup` the smaller one of `decay` and
    1 - (1 + n)^(-2/3) at the n-th update after the first. The first update copies the module. Integer buffers, extra
    states, and buffers that are not finite at first are copied in every update. Tensors of fewer bits than float32 are
    averaged in float32.

    Args:
        module: A model, or a part of it; it is not changed, and the average begins as a copy of it.
        decay: Part of the average that an update keeps, 0 to 1.
        warmup: Let the decay grow from 0, so that the first values do not count for long.
        every: Steps from one update to the next.

    Example:
        >>> average = ModelAverage(model, decay=0.999)                    # doctest: +SKIP
        >>> for step, (images, labels) in enumerate(loader, start=1):     # doctest: +SKIP
        ...     train_step(model, images, labels)
        ...     average.update(step)
        >>> with average.applied():                                       # doctest: +SKIP
        ...     accuracy = evaluate(model)
    """

    def __init__(self, module: nn.Module, decay: float = 0.9998, *, warmup: bool = False, every: int = 1) -> None:
        self.module = module
        self.decay = decay
        self.warmup = warmup
        self.every = every
        # Masks, and observers that have seen nothing yet.
        self._copied = {name for name, buffer in module.named_buffers() if not bool(torch.isfinite(buffer).all())}
        self._average = {name: _averaged(name, tensor) for name, tensor in module.state_dict().items()}

    @torch.no_grad()
    def update(self, step: int, commit: Tensor | None = None) -> None:
        """Move the average towards what the module is now; only every `every` steps.

        Args:
            step: Number of the step that was just made, from 1.
            commit: 0-d tensor on the device; where it is false, the step was rolled back and the average stays.
        """
        number, left = divmod(step, self.every)
        if left:
            return
        decay = min(1.0 - math.pow(max(1, number), -2 / 3), self.decay) if self.warmup else self.decay
        weight = 1.0 if number <= 1 else 1.0 - decay
        moved: tuple[list[Tensor], list[Tensor]] = [], []
        copied: tuple[list[Tensor], list[Tensor]] = [], []
        for name, value in self.module.state_dict(keep_vars=True).items():
            average = self._average.get(name)
            if average is None or is_extra(name) or _kind(average) != _kind(value):
                self._average[name] = _averaged(name, value)  # or a buffer that forward has assigned
            else:
                averages, values = moved if _has_mean(value) and name not in self._copied and weight < 1.0 else copied
                averages.append(average)
                values.append(value.to(average.dtype))
        if copied[0]:
            torch._foreach_copy_(*copied)
        if moved[0] and commit is None:
            torch._foreach_lerp_(*moved, weight)
        elif moved[0] and commit is not None:
            # By few kernels: to launch one for each tensor would take the host longer than they run.
            moves = torch._foreach_sub(moved[1], moved[0])
            torch._foreach_mul_(moves, commit * weight)
            torch._foreach_add_(moved[0], moves)

    def state_dict(self) -> dict[str, Tensor]:
        """The average under the names of the module's own state dict, which can be loaded into the module.

        Returns:
            The tensors themselves: later updates change them.
        """
        return dict(self._average)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over an average.

        Args:
            state: What `state_dict` returned, of this module or of one that holds it; other names are ignored.

        Raises:
            KeyError: It has no tensor for a name of the module.
        """
        for name, average in self._average.items():
            if is_extra(name):
                self._average[name] = copy_of({name: state[name]})[name]
            else:
                average.resize_(state[name].shape).copy_(state[name])  # buffers of observers have grown

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the module holds the average; afterwards what it held before, bit for bit."""
        before = copy_of(self.module.state_dict())
        self.copy_to_module()
        try:
            yield
        finally:
            load_values(self.module, before)

    def copy_to_module(self) -> None:
        """Overwrite the module with the average."""
        load_values(self.module, self._average)


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex()


def _averaged(name: str, value: Any) -> Any:
    """A copy in which an average can be kept."""
    if is_extra(name) or not _has_mean(value):
        return copy_of({name: value})[name]
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
