"""SGD with AdaGrad and momentum: what 1-bit SGD's owners of stripes do, for one worker.

In tests it is the reference: without quantisation, workers that share the rule by stripes do what this optimizer does
to the whole gradient, but for the length that AdaGrad's steps are given, which is that of a stripe there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hybridpar.compress.codecs.onebit_sgd import OneBitSgd, adagrad_
from hybridpar.compress.memory import State


class AdaGradSGD(torch.optim.Optimizer):
    """SGD on gradients that AdaGrad has scaled, before momentum or after it; see the codec `onebit_sgd`."""

    def __init__(self, params: Iterable[Any], lr: float, rule: OneBitSgd, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": rule.momentum})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step with what is in `.grad`; a parameter whose `.grad` is None stays as it is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        adagrad, state = self._rule.adagrad, self.state[parameter]
        assert parameter.grad is not None
        update = parameter.grad.detach().clone(memory_format=torch.contiguous_format)
        if adagrad in ("owner", "worker"):
            self._scale(update, parameter)
        if group["momentum"]:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            update.add_(state["momentum_buffer"], alpha=group["momentum"])
            state["momentum_buffer"].copy_(update)
        if adagrad == "after":
            self._scale(update, parameter)
        if group["weight_decay"]:
            update.add_(parameter, alpha=group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])

    def _scale(self, values: torch.Tensor, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        squares = State(state["squares"].reshape(-1) if "squares" in state else torch.zeros_like(values.view(-1)))
        adagrad_(values.view(-1), squares, memory=self._rule.memory, level=self._rule.level)
        state["squares"] = squares.next.view(parameter.shape)
