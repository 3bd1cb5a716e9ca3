"""A case in plain PyTorch and as hybridpar trains it, and everything in which the two may differ."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from hybridpar import Trainer
from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from tests.state.cases import Case

#: What every module has; the rest are attributes of the user's.
_PLAIN = frozenset(vars(nn.Module()))

#: Of all that is compared, which is in float64.
TOLERANCE = 1e-6


@dataclass
class Trained:
    """What came of a case.

    Attributes:
        model: The model after the last step.
        losses: Of each step, then accuracy and loss of the test.
        refused: Why it was refused, and after how many steps.
        held: Modules that the stages of this worker call in training, where others have stages, too.
    """

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    refused: tuple[str, int] | None = None
    held: list[nn.Module] = field(default_factory=list)


# ---------------------------------------------------------------- plain PyTorch


def plain_loop(case: Case, replica: int = 0) -> Trained:
    """Train in a loop of stock PyTorch; replicas are models that step by the sum of their gradients.

    A test is of the first of them.
    """
    models = [case.build() for _ in range(case.replicas)]
    optimizers = [case.make_optimizer(model) for model in models]
    trained = Trained(models[replica])
    *batches, (test_x, test_y) = case.batches()
    thawed = [case.thawed(model) for model in models]
    for step, (x, y) in enumerate(batches):
        if step == 2:
            for parameter in (one for parameters in thawed for one in parameters):
                parameter.requires_grad_(True)
        trained.losses.append(_plain_step(case, models, optimizers, x, y))
        if step == 1 and case.tested:
            shares = [(test_x[rank :: case.workers], test_y[rank :: case.workers]) for rank in range(case.workers)]
            trained.losses += _plain_test(models[0], shares)
    return trained


def _plain_step(
    case: Case, models: list[nn.Module], optimizers: list[torch.optim.Optimizer], x: Tensor, y: Tensor
) -> float:
    total = 0.0
    with ExitStack() as stack:
        undo = [stack.enter_context(_buffers(model)) for model in models]
        commit = (
            _pooled(models, stack) if case.batch_norm == "pooled" and case.micro_batches * len(models) > 1 else None
        )
        for model, mine_x, mine_y in zip(models, x.tensor_split(len(models)), y.tensor_split(len(models)), strict=True):
            model.zero_grad()
            parts = mine_x.tensor_split(case.micro_batches), mine_y.tensor_split(case.micro_batches)
            for part_x, part_y in zip(*parts, strict=True):
                loss = cross_entropy(model(part_x), part_y) * (len(part_y) / len(y))
                loss.backward()
                total += float(loss.detach())
        gradients = _summed(models)
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None):
            for restore in undo:
                restore()
            return total
        if commit is not None:
            commit()
    for model in models[1:]:
        _take_buffers(model, models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
    return total


def _take_buffers(model: nn.Module, first: nn.Module) -> None:
    """Give a replica the buffers of the first, but for statistics that all have in common anyway."""
    for mine, other in zip(model.modules(), first.modules(), strict=True):
        for name, buffer in other._buffers.items() if not _pools(mine) else ():
            if buffer is None or (present := mine._buffers.get(name)) is None or present.shape != buffer.shape:
                mine._buffers[name] = buffer if buffer is None else buffer.clone()
            else:
                present.copy_(buffer)


def _summed(models: list[nn.Module]) -> list[Tensor | None]:
    """Add the gradients of the replicas up, on all of them."""
    gradients: list[Tensor | None] = []
    for same in zip(*(model.parameters() for model in models), strict=True):
        given = [one.grad for one in same if one.grad is not None]
        gradients.append(torch.stack(given).sum(0) if given else None)
        for one in same:
            one.grad = None if gradients[-1] is None else gradients[-1].clone()
    return gradients


@contextmanager
def _buffers(model: nn.Module) -> Iterator[Any]:
    """Yields what puts all buffers back to what they are now."""
    before = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(one, one.detach().clone()) for _, held in before for one in held.values() if one is not None]

    @torch.no_grad()
    def restore() -> None:
        for module, held in before:
            module._buffers.clear()
            module._buffers.update(held)
        for one, value in values:
            if (one.shape, one.dtype) == (value.shape, value.dtype) and 0 not in one.stride():
                one.copy_(value)  # which may share memory with another
            else:
                one.set_(value)

    yield restore


def _pooled(models: list[nn.Module], stack: ExitStack) -> Any:
    """Let BatchNorm layers collect the inputs of a step; what is returned moves their statistics by all of them."""
    pools = [_Pool(list(same)) for same in zip(*(filter(_pools, model.modules()) for model in models), strict=True)]
    for pool in pools:
        stack.callback(pool.release)
    return lambda: [pool.commit() for pool in pools]


class _Pool:
    """A BatchNorm layer of all replicas, whose statistics wait for the end of the step."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.inputs = layers, []
        self.momentum, self.batches = layers[0].momentum, int(layers[0].num_batches_tracked)
        self.hooks = [layer.register_forward_hook(self.note) for layer in layers]
        for layer in layers:
            layer.momentum = 0.0

    def note(self, layer: Any, given: Any, made: Any) -> None:
        if layer.training:
            layer.num_batches_tracked.fill_(self.batches)
            self.inputs.append(given[0].detach().transpose(0, 1).flatten(1))

    def commit(self) -> None:
        for layer in self.layers if self.inputs else ():
            values = torch.cat(self.inputs, 1)
            layer.num_batches_tracked.fill_(self.batches + 1)
            factor = 1 / (self.batches + 1) if self.momentum is None else self.momentum
            layer.running_mean.lerp_(values.mean(1), factor)
            layer.running_var.lerp_(values.var(1), factor)

    def release(self) -> None:
        for layer, hook in zip(self.layers, self.hooks, strict=True):
            layer.momentum = self.momentum
            hook.remove()


def _pools(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and layer.track_running_stats and type(layer).forward is _BatchNorm.forward


def _plain_test(model: nn.Module, shares: list[tuple[Tensor, Tensor]]) -> list[float]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(x) for x, _ in shares])
    for module, training in modes:
        module.training = training
    y = torch.cat([y for _, y in shares])
    return [float((scores.argmax(1) == y).double().mean()), float(cross_entropy(scores, y))]


# ---------------------------------------------------------------- hybridpar


def with_trainer(case: Case, world: World | None = None) -> Trained:
    """Train the same with a Trainer, on this worker."""
    trained = Trained(case.build())
    *batches, (test_x, test_y) = case.batches()
    rank, replicas = 0 if world is None else world.rank, case.replicas
    example = batches[0][0][: max(2, case.sizes[0] // case.micro_batches // replicas)].nan_to_num()
    thawed = case.thawed(trained.model)
    step = 0
    try:
        with Trainer(
            trained.model, case.make_optimizer, config=case.config, world=world or World(), example=example
        ) as trainer:
            for step, (x, y) in enumerate(batches):
                if step == 2:
                    trainer.wait()
                    for parameter in thawed:
                        parameter.requires_grad_(True)
                mine = rank % replicas
                result = trainer.step((x.tensor_split(replicas)[mine], y.tensor_split(replicas)[mine]))
                trained.losses.append(float(result.loss))
                if step == 1 and case.tested:
                    tested = trainer.evaluate([(test_x[rank :: case.workers], test_y[rank :: case.workers])])
                    trained.losses += [tested.accuracy, tested.loss]
            step = len(batches)
            if case.is_spread:
                trained.held = [
                    inside
                    for stage in trainer.engine.pipeline.stages.values()
                    for node in stage.module.graph.nodes  # type: ignore[union-attr]
                    if node.op == "call_module"
                    for inside in stage.module.get_submodule(str(node.target)).modules()
                ]
    except UsageError as error:
        trained.refused = str(error), step
    return trained


# ---------------------------------------------------------------- what differs


def differences(case: Case, expected: Trained, found: Trained) -> list[str]:
    """Everything in which two trained models differ, and in what they compute after that."""
    differ = list(_compare(expected.losses, found.losses, "losses"))
    mine, right = facts(found.model), facts(expected.model)
    for name, module in found.model.named_modules():
        for kept in (one["modules"][name] for one in (mine, right) if name in one["modules"]):
            if case.is_spread and module not in found.held:  # Python values are not sent
                kept.update(attributes={}, keys=[])
            elif case.stages > 1:  # stages hand activations on, without the attributes of modules
                kept["attributes"].pop("activation", None)
                kept["keys"] = sorted({*kept["keys"]} - {"activation"})
    differ += _compare(right, mine, "")
    if not differ and not (case.is_spread and (case.has("counts") or "counter" in case.joining)):
        *_, (x, _) = case.batches()
        for model in (expected.model, found.model):
            model.zero_grad()
        differ += _compare(expected.model(x), found.model(x), "output afterwards")
    return differ


def facts(model: nn.Module) -> dict[str, Any]:
    """Everything that a model keeps, in a form that can be compared."""
    modules = {
        name: {
            "class": type(module).__name__,
            "training": module.training,
            "keys": sorted(vars(module)),
            "attributes": {key: value for key, value in vars(module).items() if key not in _PLAIN},
            "hooks": [len(getattr(module, key)) for key in sorted(_PLAIN) if key.endswith("_hooks")],
            "none": sorted(key for key, held in module._buffers.items() if held is None),
        }
        for name, module in model.named_modules()
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = parameters | dict(model.named_buffers(remove_duplicate=False))
    same = [[name for name, other in tensors.items() if other is one] for one in dict.fromkeys(tensors.values())]
    hooks = {
        name: (one.requires_grad, len(one._backward_hooks or ()), len(one._post_accumulate_grad_hooks or ()))
        for name, one in parameters.items()
    }
    return {"modules": modules, "tensors": tensors, "same": sorted(same), "hooks": hooks, "state": model.state_dict()}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The tensors and texts in a value, by where they are."""
    if isinstance(value, (list, tuple, deque)):
        value = dict(enumerate(value))
    if type(value).__module__.startswith("tests.") and not isinstance(value, nn.Module):
        value = vars(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path} {key}")
    elif isinstance(value, (Tensor, float)):
        yield path, torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    elif isinstance(value, (torch.Generator, random.Random)):
        yield path, str(value.get_state().tolist() if isinstance(value, torch.Generator) else value.getstate())
    else:
        value = sorted(value) if isinstance(value, set) else value
        yield path, repr(value) if isinstance(value, (int, str, list)) else type(value).__name__


def _compare(expected: Any, found: Any, name: str) -> Iterator[str]:
    right, ours = dict(_leaves(expected, name)), dict(_leaves(found, name))
    for path in right.keys() | ours.keys():
        pair = right.get(path), ours.get(path)
        if all(isinstance(one, Tensor) for one in pair):
            try:
                torch.testing.assert_close(*pair, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
            except AssertionError as error:
                yield f"{path}: {error}"
        elif any(isinstance(one, Tensor) for one in pair) or pair[0] != pair[1]:
            yield f"{path}: {pair[0]!r:.200} and {pair[1]!r:.200}"
