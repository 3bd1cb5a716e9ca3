"""Dynamic loss scaling, with which small gradients do not vanish in float16 (Micikevicius et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class LossScale:
    """What a loss is multiplied with before its backward pass, and gradients of parameters are divided by in it.

    The scale follows the rule of `torch.amp.GradScaler`: it is halved by a step whose gradients are not all finite, and
    doubled after `interval` steps in a row whose gradients are. Scales are powers of two, so that scaling itself rounds
    nothing. All numbers are tensors on the device; the host reads none of them.
    """

    #: Steps in a row that may be skipped while the scale falls from the highest that is usual, 2^24, to 1.
    falls = 24

    def __init__(self, device: torch.device, *, initial: float = 2.0**16, interval: int = 2000) -> None:
        self.value = torch.full((), initial, device=device)
        #: What gradients are multiplied with.
        self.inverse = 1.0 / self.value
        self._steps = torch.zeros((), dtype=torch.int32, device=device)  # since the scale last changed
        self._interval = interval
        self._handles: list[RemovableHandle] = []

    def attach(self, module: nn.Module) -> None:
        """From now on divide gradients of a module's parameters by the scale, before they are added up.

        Frozen parameters are included, since they may be thawed between steps.
        """
        divide = partial(torch.mul, self.inverse)
        for parameter in module.parameters():
            if not parameter.is_floating_point():
                continue
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # without it torch takes no hook
            self._handles.append(parameter.register_hook(divide))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)

    def detach(self) -> None:
        """Leave gradients as they are again."""
        for handle in self._handles:
            handle.remove()

    def update(self, commit: bool | Tensor) -> None:
        """Follow a step."""
        bad = torch.logical_not(torch.as_tensor(commit, device=self.value.device)).float()
        torch._amp_update_scale_(self.value, self._steps, bad, 2.0, 0.5, self._interval)
        torch.reciprocal(self.value, out=self.inverse)

    def state_dict(self) -> dict[str, float]:
        """Scale and number of steps since it last changed."""
        return {"scale": float(self.value), "steps": float(self._steps)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Put saved values back."""
        self.value.fill_(state["scale"])
        self._steps.fill_(int(state["steps"]))
        torch.reciprocal(self.value, out=self.inverse)
