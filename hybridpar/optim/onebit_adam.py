"""1-bit Adam, for the trainer (`FrozenAdam`) and for any training loop (`OnebitAdam`).

1-bit Adam (arXiv 2102.02888; see `hybridpar.compress.codecs.onebit_adam` for its Algorithm 1): Adam for the first
steps, until the variance v has settled; then v stays as it is and the workers exchange the momentum m in one bit, with
error feedback on both sides:

    p <- p - lr m / (1 - beta1^t) / (sqrt(v_w / (1 - beta2^w)) + eps)        t > w, the number of first steps

The correction of m goes on with t, that of v stands still with v. The paper leaves both out; with them the first steps
are those of `torch.optim.Adam` bit for bit, and nothing jumps after them. An element whose v is zero then never had a
gradient, and one bit of momentum over zero would throw it far: it is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.compress import Exchange, TensorSpec, TorchGroup, bind, parse_codec
from hybridpar.errors import UsageError
from hybridpar.optim.adagrad_sgd import ParameterOptimizer


class FrozenAdam(ParameterOptimizer):
    """Adam whose variance stands still after some steps.

    Weight decay is that of AdamW: it acts on the weights alone, as no gradient is there to add it to.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Factors of momentum and variance.
        eps: Against division by zero.
        weight_decay: Of the weights, times the rate.
        freeze_steps: Steps in which the variance follows.
        momentum_arrives: After these, `.grad` holds the momentum that workers share; else gradients, as before.
    """

    #: Name of the codec whose momentum it takes; see `hybridpar.compress.check_optimizer`.
    codec = "onebit_adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_steps: int,
        momentum_arrives: bool = True,
    ) -> None:
        for name, value, holds, rule in (
            ("lr", lr, lr >= 0, "at least 0"),
            ("betas", betas, all(0 <= beta < 1 for beta in betas), "at least 0 and below 1"),
            ("eps", eps, eps > 0, "greater than 0"),
            ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
            ("freeze_steps", freeze_steps, freeze_steps >= 1, "at least 1: without a step there is no variance"),
        ):
            if not holds:
                raise UsageError(f"{name} is {value}", f"It must be {rule}.")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self.freeze_steps = freeze_steps
        self._momentum_arrives = momentum_arrives

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        frozen = step > self.freeze_steps
        if frozen and self._momentum_arrives:
            m.copy_(gradient)
        else:
            m.lerp_(gradient, 1 - beta1)
        if not frozen:
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        counted = min(step, self.freeze_steps)
        denominator = (v.sqrt() / (1 - beta2**counted) ** 0.5).add_(group["eps"])
        if frozen:
            denominator.masked_fill_(v == 0, torch.inf)
        parameter.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**step))


class OnebitAdam(FrozenAdam):
    """1-bit Adam, exchange included, for a training loop that does not average gradients.

    Every worker calls `backward` on its own loss and then `step`. Do not wrap the model in DistributedDataParallel, or
    do so and leave its gradients alone (`no_sync`): they are averaged here. Parameters must start equal. A step in
    which a gradient is not finite on any worker changes nothing on all of them.

    Args:
        params: As of `FrozenAdam`; float32.
        lr: As of `FrozenAdam`.
        betas: As of `FrozenAdam`; the first is the same for all groups.
        eps: As of `FrozenAdam`.
        weight_decay: As of `FrozenAdam`.
        freeze_steps: First steps, whose gradients are sent in full precision. The paper takes 15 to 25 % of all.
        group: The workers; default: all of them. Without `torch.distributed` it is Adam with frozen variance.
        levels: See the codec `onebit_adam`.

    Example:
        >>> optimizer = OnebitAdam(model.parameters(), lr=1e-3, freeze_steps=1000)          # doctest: +SKIP
        >>> loss.backward()                                                                 # doctest: +SKIP
        >>> optimizer.step()                                                                # doctest: +SKIP
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_steps: int,
        group: dist.ProcessGroup | None = None,
        levels: str = "means",
    ) -> None:
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        super().__init__(params, lr, betas, eps, weight_decay, freeze_steps=freeze_steps, momentum_arrives=many)
        self._exchange: Exchange | None = None
        self._skipped = 0
        if not many:
            return
        firsts = {entry["betas"][0] for entry in self.param_groups}
        if len(firsts) > 1:
            raise UsageError(
                f"groups with first betas {sorted(firsts)}", "All momentum is exchanged alike.", "Use one."
            )
        self._group = TorchGroup(group)
        codec = parse_codec(f"onebit_adam:warm={freeze_steps},beta={firsts.pop()},levels={levels}")
        rank, size = self._group.rank, self._group.size
        specs = [
            TensorSpec(str(index), tuple(one.shape), rank, size, device=one.device)
            for index, one in enumerate(self._parameters())
        ]
        self._exchange = Exchange([bind(codec, spec) for spec in specs])

    @property
    def skipped_steps(self) -> int:
        """Steps that did not count, because a gradient was not finite."""
        return self._skipped

    def _ready(self) -> bool:
        return self._exchange is None or self._meet(self._exchange)

    def _meet(self, exchange: Exchange) -> bool:
        """Put what the workers share in place of the gradients; whether the step counts, which is the same on all."""
        parameters = self._parameters()
        flats = [
            torch.zeros_like(one).reshape(-1) if one.grad is None else one.grad.detach().reshape(-1).clone()
            for one in parameters
        ]
        exchange.run(self._group, flats, flats)
        if not all(bool(torch.isfinite(flat).all()) for flat in flats):
            exchange.rollback()
            self._skipped += 1
            return False
        exchange.commit()
        for parameter, flat in zip(parameters, flats, strict=True):
            parameter.grad = flat.view(parameter.shape)
        return True

    def _parameters(self) -> list[Tensor]:
        return [one for group in self.param_groups for one in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer; and under `exchange` what this worker did not send yet, so each saves its own."""
        state = super().state_dict()
        if self._exchange is not None:
            state["exchange"] = [coder.state_dict() for coder in self._exchange.coders]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this worker.

        Raises:
            CheckpointError: It belongs to other parameters, or to another number of workers.
        """
        plain = {key: value for key, value in state_dict.items() if key != "exchange"}
        super().load_state_dict(plain)
        if self._exchange is not None and "exchange" in state_dict:
            for coder, saved in zip(self._exchange.coders, state_dict["exchange"], strict=True):
                coder.load_state_dict(saved)
