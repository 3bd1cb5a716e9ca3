"""What crosses the borders of stages: shape, dtype and memory format of every tensor, for each size of micro-batch.

Both ends of a transfer must know them before it is sent. They are found by running all stages once on the first
micro-batch of every size, on every worker, so nothing has to be sent for them, and autocast, memory formats and
operations that are not about batches are all taken as they are. The run leaves no trace: buffers and generators are put
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridpar.comm.transport import MessagePart
from hybridpar.errors import ScheduleError, UsageError
from hybridpar.models.deferred import imagined
from hybridpar.models.state import same_attributes, storage_of
from hybridpar.pipeline.stage_module import BorderFacts, StageModule, consumers_of, module_of
from hybridpar.pipeline.stage_run import numbers_of_its_own
from hybridpar.pipeline.step import PipelineOptions
from hybridpar.schedule.layout import Edge
from hybridpar.sync.batchnorm import BufferRollback, without_replicas


class BorderTable:
    """Knows what crosses the borders of stages, for every size of micro-batch."""

    def __init__(
        self,
        stages: Sequence[StageModule],
        forwards: Sequence[Callable[..., Any]],
        options: PipelineOptions,
        loss: Callable[[Any, Any], Tensor],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.stages = stages
        self._options = options
        self._context = context
        self._forwards = [module_of(stage) for stage in stages] if options.own_only else forwards
        self._loss = loss
        #: Facts of the first micro-batch.
        self.first: BorderFacts | None = None
        self._known: dict[tuple[Any, ...], BorderFacts] = {}
        self._parameters = [parameter for stage in stages for parameter in module_of(stage).parameters()]
        #: Which parameters are trained, of which the facts are known.
        self.trainable: tuple[bool, ...] = ()
        self._consumers = [consumers_of(stages, index) for index in range(len(stages))]

    def names(self, source: int, target: int) -> list[str]:
        """What a stage uses of an earlier one, in the order in which it is sent."""
        return self._consumers[source].get(target, [])

    def follow_trainable(self) -> None:
        """Forget all facts where parameters were frozen or thawed since they were found."""
        trainable = tuple([parameter.requires_grad for parameter in self._parameters])
        if trainable != self.trainable:
            self.trainable = trainable
            self._known.clear()

    def at(self, inputs: Mapping[str, Tensor], target: Any, wait: Callable[[], None] = lambda: None) -> BorderFacts:
        """The facts for a micro-batch; where they are not known the stages are run, once who uses them has ended."""
        key = tuple([(name, tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in inputs.items()])
        if key not in self._known:
            wait()
            self._known[key] = self._run(inputs, target)
            self.first = self.first or self._known[key]
        return self._known[key]

    def evaluated(self, inputs: Mapping[str, Tensor]) -> dict[str, MessagePart]:
        """What crosses the borders in evaluation, where no worker holds all stages; these are in that mode."""
        key = "evaluation", *[(name, tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in inputs.items()]
        if key not in self._known:
            facts = BorderFacts()
            device = next(iter(inputs.values())).device
            with imagined(nn.ModuleList(map(module_of, self.stages)), device) as mode:
                values: dict[str, Tensor] = tree_map_only(Tensor, mode.from_tensor, dict(inputs))
                for stage in self.stages[:-1]:
                    result = module_of(stage)(*(values[border.name] for border in stage.inputs))
                    values.update(zip((border.name for border in stage.outputs), result, strict=True))
                    facts.parts |= {border.name: MessagePart.of(values[border.name]) for border in stage.outputs}
            self._known[key] = facts
        return self._known[key].parts

    def edges(self, facts: BorderFacts) -> tuple[Edge, ...]:
        """All pairs of stages between which tensors flow, with their bytes."""
        edges = []
        for source, consumers in enumerate(self._consumers):
            for target, names in consumers.items():
                sizes = {name: facts.bytes_of(name) for name in names}
                back = sum(size for name, size in sizes.items() if name in facts.gradients)
                edges.append(Edge(source, target, sum(sizes.values()), back))
        return tuple(edges)

    def _run(self, inputs: Mapping[str, Tensor], target: Any) -> BorderFacts:
        if self._options.own_only:
            device = next(iter(inputs.values())).device
            with imagined(nn.ModuleList(map(module_of, self.stages)), device) as mode:
                imagine = partial(tree_map_only, Tensor, mode.from_tensor)
                return self._run_all(imagine(dict(inputs)), imagine(target))
        return self._run_all(inputs, target)

    def _run_all(self, inputs: Mapping[str, Tensor], target: Any) -> BorderFacts:
        facts = BorderFacts()
        reached: list[dict[str, set[str]]] = []
        used: set[str] = set()
        values: dict[str, Tensor] = dict(inputs)
        device = next(iter(inputs.values())).device
        with numbers_of_its_own(device, self._options.compile), self._context():
            for stage, forward in zip(self.stages, self._forwards, strict=True):
                module = module_of(stage)
                rollback = BufferRollback(module)
                received = [values[border.name].detach() for border in stage.inputs]
                leaves = [
                    tensor.requires_grad_(border.requires_grad)
                    for tensor, border in zip(received, stage.inputs, strict=True)
                ]
                try:
                    with without_replicas(module), same_attributes(module):
                        result, saved = _call(forward, leaves, module)
                except (RuntimeError, ValueError, TypeError) as error:
                    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
                    raise UsageError(
                        f"stage {stage.index} cannot run on inputs of shape {shapes}: {error}",
                        "Stages are run once on a micro-batch of every size to learn what is sent between them.",
                        "Train with the shape of inputs that the model was partitioned for.",
                    ) from error
                finally:
                    rollback.restore()
                recomputed = stage.index in self._options.recompute
                if recomputed or stage.index in self._options.offload:
                    stays = leaves if recomputed or not stage.outputs else [*leaves, *result]
                    storages = {storage_of(tensor): tensor.untyped_storage() for tensor in stays}
                    saved = sum(storage.nbytes() for storage in storages.values())
                facts.saved_bytes.append(saved)
                named = dict(zip((border.name for border in stage.inputs), leaves, strict=True))
                if stage is self.stages[-1]:
                    used = _leaves_behind(tree_leaves(self._loss(result, target)), named)
                    break
                reached.append({})
                for border, tensor in zip(stage.outputs, result, strict=True):
                    _require_known_gradient(stage.index, border, tensor)
                    reached[-1][border.name] = _leaves_behind([tensor], named)
                    values[border.name] = tensor.detach()
                    facts.parts[border.name] = MessagePart.of(tensor)
        for outputs in reversed(reached):
            used = used.union(*(leaves for name, leaves in outputs.items() if name in used))
        facts.gradients = used & facts.parts.keys()
        return facts


def _leaves_behind(tensors: Iterable[Any], leaves: Mapping[str, Tensor]) -> set[str]:
    """Names of the leaves that a backward pass from some tensors would come to."""
    roots = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad]
    reached = {name for name, leaf in leaves.items() if any(root is leaf for root in roots)}
    names = {id(leaf): name for name, leaf in leaves.items()}
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (name := names.get(id(getattr(node, "variable", None)))) is not None:
            reached.add(name)
        after = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= after
        waiting += after
    return reached


def _require_known_gradient(stage: int, border: Any, tensor: Tensor) -> None:
    if tensor.requires_grad and not border.requires_grad:
        raise ScheduleError(
            f"{border.name!r}, which leaves stage {stage}, needs a gradient now, and did not when the model was cut",
            "Whether gradients flow back over a border is found out when the model is cut.",
            "Thaw all parameters that are to be trained at any time before that; they may be frozen after it.",
        )


def _call(forward: Callable[..., Any], leaves: Sequence[Tensor], module: nn.Module) -> tuple[Any, int]:
    """The result of a stage, and the bytes it would keep for its backward pass."""
    module_storages = {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
    sizes: dict[int, int] = {}
    holding = []  # so that no other storage gets the place of one
    # What enters may be a view, for instance one micro-batch of a whole batch: only its own part counts.
    entering = {storage_of(leaf): leaf.nbytes for leaf in leaves}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (number := storage_of(tensor)) not in module_storages:
            sizes[number] = entering.get(number, storage.nbytes())
            holding.append(storage)
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward(*leaves)
    return result, sum(sizes.values())
