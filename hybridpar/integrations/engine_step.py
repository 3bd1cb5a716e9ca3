"""A LightningModule's `training_step` on hybridpar's engine.

In one piece, the whole `training_step` is the forward pass. With stages its one call of a model is, which is found out
by its first call; everything else of `training_step` runs on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridpar.comm.replicate import replicate
from hybridpar.comm.world import World
from hybridpar.compress import Policy
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError, nearest
from hybridpar.integrations.pipelined import PipelinedModel
from hybridpar.models.random_state import random_state, restore_random_state
from hybridpar.planner.resolve import join_workers, resolve
from hybridpar.sync.policy import is_auto

#: Types that stages compute in, by Lightning's `precision`.
_PRECISIONS: dict[str, Any] = {"32-true": "none", "bf16-mixed": "bf16"}


class EngineStep:
    """Has `training_step`, or the model's call in it, run on the engine, which is made at the first one.

    Args:
        stages: Stages that the model is cut into; 1 for none.
        replicas: Copies of the pipeline; None for as many as the workers allow.
        micro_batches: Micro-batches of a batch.
        compress: How gradients are sent between replicas.
        seed: For what codecs and dropout draw at random.
        fidelity: What `auto` may choose from.
        sync_batch_norm: BatchNorm layers normalise over the replicas.

    Attributes:
        model: Runs the passes; None before the first step.
        joined: The workers have met, and `replica` of `replicas` is known.
        restored: What the checkpoint that training goes on from says of the pipeline.
    """

    def __init__(
        self,
        *,
        stages: int,
        replicas: int | None,
        micro_batches: int,
        compress: str | Policy,
        seed: int,
        fidelity: str,
        sync_batch_norm: bool,
    ) -> None:
        asked: dict[str, Any] = {"compress": str(compress), "seed": seed, "fidelity": fidelity, "guard": False}
        asked["batch_norm"] = "sync" if sync_batch_norm else "pooled"
        if stages > 1:
            asked |= {"stages": stages, "replicas": replicas, "micro_batches": micro_batches}
            asked |= {"schedule": "gpipe", "placement": "linear"}
        self._config = TrainConfig(**asked)
        self._is_whole = stages == 1
        self.model: PipelinedModel | None = None
        self.joined = False
        self.replica, self.replicas = 0, 1
        self.restored: dict[str, Any] | None = None
        self._world: World | None = None
        self._peers: Any = None
        self._target: nn.Module | None = None
        self._name = ""
        self._is_checked = False

    def join(self, module: nn.Module, workers: int, precision: Any) -> None:
        """Meet the other workers, which then draw the same random numbers as those of their pipeline; a collective.

        Args:
            module: What is trained; it becomes that of rank 0 everywhere.
            workers: Processes of the job, which have a process group.
            precision: Lightning's plugin.

        Raises:
            UsageError: Stages, replicas and workers do not fit, or stages cannot compute in that precision.
        """
        amp = _PRECISIONS.get(precision.precision, "none")  # in one piece, Lightning's own contexts are around the step
        if precision.precision not in _PRECISIONS and not self._is_whole:
            raise UsageError(
                f"precision={precision.precision!r} with stages",
                nearest(str(precision.precision), _PRECISIONS),
                "Use 32-true or bf16-mixed.",
            )
        self._config = replace(self._config, amp="none" if self._is_whole else amp)
        if is_auto(self._config.compress) and self.restored is not None:  # measured when the run began
            self._config = replace(self._config, compress=self.restored["codec"])
        positions = resolve(self._config, workers).placement.workers
        self._world = world = join_workers(self._config)
        self.replicas = world.size // positions
        self.replica = world.rank % self.replicas
        self.joined = True
        if positions > 1:
            groups = [dist.new_group([*range(first, world.size, self.replicas)]) for first in range(self.replicas)]
            self._peers = groups[self.replica]
            states = [random_state(world.device)]
            dist.broadcast_object_list(states, self.replica, group=self._peers, device=world.device)
            restore_random_state(states[0], world.device)
            precision.clip_grad_by_norm = self._clip
        replicate(module, world)

    def step(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call `training_step`.

        Args:
            module: The LightningModule.
            arguments: Of `training_step`.
            options: Of `training_step`.

        Returns:
            What it returns.

        Raises:
            UsageError: It does not call the model once, with one tensor.
        """
        if self.model is None:
            self._open(module, arguments, options)
        model, target = self.model, self._target
        assert model is not None
        assert target is not None
        if self._is_whole:

            def whole(name: str, forward: Callable[..., Any], nothing: Tensor) -> Any:
                _put_back(module, None if own is None else forward)  # training_step may want to call it
                return module.training_step(*arguments, **options)

            own = module.__dict__.get("forward")
            with _instead(whole, {"": module}):
                return model(torch.empty(1, 0))
        calls = 0

        def call(name: str, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 or not torch.is_grad_enabled():
                raise _refused(module, f"calls {name} {'again' if calls > 1 else 'without gradients'}")
            return model(_only_tensor(module, name, given, named), (arguments, options))

        with _instead(call, {self._name: target}):
            result = module.training_step(*arguments, **options)
        if not calls:
            raise _refused(module, f"does not call {self._name} for this batch")
        return result

    def backward(self, module: Any) -> None:
        """Run the backward passes of the engine, after that of the loss.

        Args:
            module: The LightningModule.

        Raises:
            UsageError: The loss has given parameters a gradient, so they were used outside of the model's call.
        """
        if self.model is None:
            return
        if not self._is_checked:
            self._refuse_outside(module, [key for key, one in module.named_parameters() if one.grad is not None])
            self._is_checked = True
        self.model.backward()

    def close(self) -> None:
        """Release the pipeline; the module stays as trained."""
        if self.model is not None:
            self.model.close()
        if self._world is not None:
            self._world.close()
        if self._peers is not None and dist.is_initialized():
            dist.destroy_process_group(self._peers)
        self.model = self._world = self._peers = self._target = self.restored = None
        self.joined = False

    def _open(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Find out what `training_step` calls, by its first call, and make a pipeline of that; a collective."""

        def found(name: str, forward: Callable[..., Any], *given: Any, **named: Any) -> None:
            raise _Found(name, _only_tensor(module, name, given, named))

        if self._is_whole:
            self._target, self._name = module, "training_step"
            self._make(None)
            return
        assert self._world is not None
        states = random_state(self._world.device)
        try:
            with _instead(found, {name: one for name, one in module.named_modules() if _is_trained(one)}):
                module.training_step(*arguments, **options)
            raise _refused(module, "calls no module with anything that is trained")
        except _Found as one:
            name, inputs = one.name, one.inputs
        finally:
            restore_random_state(states, self._world.device)
        self._target = target = module.get_submodule(name)
        self._name = name or "forward"
        inside = set(map(id, target.parameters()))
        self._refuse_outside(
            module, [key for key, one in module.named_parameters() if one.requires_grad and id(one) not in inside]
        )
        self._make(inputs[: max(1, len(inputs) // self._config.micro_batches)])

    def _refuse_outside(self, module: Any, names: Sequence[str]) -> None:
        """Refuse a module that trains more than what its call of a model uses."""
        if names:
            raise _refused(module, f"calls {self._name}, and trains {', '.join(names[:3])} outside of it")

    def _make(self, example: Tensor | None) -> None:
        asked, world, restored, target = self._config, self._world, self.restored, self._target
        assert world is not None
        assert target is not None
        self.model = PipelinedModel(target, asked, world, example, self._peers)
        if restored is not None:
            self.model.load_state_dict(restored)

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        """In the place of a precision plugin's `clip_grad_by_norm`, which knows the gradients of some stages."""
        if self.model is not None:
            self.model.clip(float(clip_val))


class _Found(BaseException):
    """Ends a `training_step` at its first call of a module."""

    def __init__(self, name: str, inputs: Tensor) -> None:
        super().__init__(name)
        self.name, self.inputs = name, inputs


@contextmanager
def _instead(call: Callable[..., Any], modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, `call(name, forward, ...)` is what the modules' `forward` does."""
    before: dict[str, Any] = {name: one.__dict__.get("forward") for name, one in modules.items()}
    for name, one in modules.items():
        one.forward = partial(call, name, one.forward)
    try:
        yield
    finally:
        for name, one in modules.items():
            _put_back(one, before[name])


def _put_back(module: nn.Module, forward: Any) -> None:
    """Give a module the `forward` that it had of its own, or none but its class's."""
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.forward = forward


def _is_trained(module: nn.Module) -> bool:
    return any(one.requires_grad for one in module.parameters())


def _only_tensor(module: Any, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """The input of a call, which is to have no other."""
    values = [*given, *named.values()]
    if len(values) != 1 or not isinstance(values[0], Tensor):
        kinds = ", ".join(type(one).__name__ for one in values)
        raise _refused(module, f"calls {name or 'forward'} with {kinds or 'nothing'}")
    return values[0]


def _refused(module: Any, what: str) -> UsageError:
    return UsageError(
        f"training_step of {type(module).__name__} {what}",
        "With stages, its one call of a model, with one tensor, is the forward passes of a pipeline.",
        "Let it call one module (forward, or a sub-module), which holds all that is trained, once; or use stages=1.",
    )
