"""A model whose call, inside of somebody else's loop, is the forward passes of a pipeline.

The loop computes the loss and steps the optimizer, as ever; between the two, `backward` runs the backward passes from
the gradients that the loop's own backward pass has left at the outputs. So all forward passes come first (schedule
`gpipe`), and the loss sees the whole batch. Every worker of a pipeline gets the outputs and computes the same loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.sync.compression import settle_codecs
from hybridpar.train.engine import NoOptimizer
from hybridpar.train.trainer import Trainer

#: Numbers of a tensor of a batch that are compared between the workers of a pipeline.
_COMPARED = 1024


@dataclass
class _Box:
    """What a micro-batch leaves at the end of the model, and the gradients that its backward pass begins with."""

    outputs: list[Any] = field(default_factory=list)
    spec: TreeSpec | None = None
    gradients: list[Tensor | None] = field(default_factory=list)


class _Form(NamedTuple):
    """What an output of a batch is: shape, type, and whether a gradient comes back; or something that is no tensor."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    trained: bool = False
    constant: Any = None


class _Hand(torch.autograd.Function):
    """The end of the model: outputs are put in a box, and their gradients are taken out of it."""

    @staticmethod
    def forward(ctx: Any, box: _Box, *outputs: Tensor) -> Tensor:
        ctx.box = box
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> tuple[Tensor | None, ...]:
        return None, *ctx.box.gradients


def _hand(result: Any, box: Any) -> Tensor:
    """The `loss` of the pipeline: fills the box, and says nothing."""
    leaves, box.spec = tree_flatten(result)
    box.outputs = [(one.detach(), one.requires_grad) if isinstance(one, Tensor) else (one, False) for one in leaves]
    trained = [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]
    return _Hand.apply(box, *trained) if trained else torch.zeros(())


class PipelinedModel:
    """Runs a model's calls over stages, workers and replicas; a collective of all workers, as each of its methods.

    Args:
        model: The model. Its state is overwritten with that of rank 0.
        config: Options, of which those of stages, sync, codecs and precision are used. With more than one stage the
            schedule is `gpipe`.
        world: All workers.
        example: Inputs of one micro-batch, by which the model is cut.
        peers: Group of the workers of this replica; None where there is one.

    Attributes:
        trainer: Holds the engine.
        own: Parameters that are trained on this worker.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig, world: World, example: Tensor | None, peers: Any = None
    ) -> None:
        self.trainer = Trainer(
            model, NoOptimizer, _hand, config, world=world, example=example, name=type(model).__name__
        )
        self._pipeline = pipeline = self.trainer.engine.pipeline
        self._peers = peers
        self._parts = self.trainer.plan.pipeline.micro_batches
        self.own = [one for stage in pipeline.stages.values() for one in stage.module.parameters()]
        self._boxes: list[_Box] = []
        self._leaves: list[Any] = []
        self._step: Any = None
        self._forms: dict[tuple[Any, ...], tuple[TreeSpec, list[_Form]]] = {}
        self._steps = 0
        last = self.trainer.plan.placement.stages[-1]
        self._is_last = last.stage in pipeline.stages
        grid = pipeline.grid
        self._last_rank = last.worker if grid is None else grid.rank_of(last.worker, pipeline.replica)

    # ------------------------------------------------------------------ a step

    def __call__(self, inputs: Tensor, compared: Any = ()) -> Any:
        """Run the forward passes of a batch.

        Args:
            inputs: This replica's share, first dimension samples; the same on all workers of a pipeline.
            compared: Tensors of the batch, in any nesting, of which some numbers are compared between the workers.

        Returns:
            The model's output for the batch, on every worker, from where the loss's backward pass begins.

        Raises:
            UsageError: There are fewer samples than micro-batches, the output has no samples along its first dimension,
                or the workers of a pipeline were given different batches.
            SyncError: A worker died or did not answer in time.
        """
        if inputs.shape[0] < self._parts:
            raise UsageError(
                f"a batch of {inputs.shape[0]} samples cannot be divided into {self._parts} micro-batches",
                "Every micro-batch needs a sample.",
                "Use larger batches (drop_last=True for the last one), or fewer micro_batches.",
            )
        self._compare(inputs, compared)
        kept = [one.grad for one in self.own]  # of earlier batches, where gradients are accumulated
        self._boxes = [_Box() for _ in range(self._parts)]
        parts = inputs.tensor_split(self._parts)
        self._step = self._pipeline.begin(list(zip(parts, self._boxes, strict=True)))
        if self._is_last:
            self._pipeline.last_forward(self._step)
        self._steps += 1
        key = (tuple(inputs.shape), inputs.dtype)
        # Elsewhere the run that found out what crosses the borders has filled the first box.
        if self._is_last or key not in self._forms:
            self._forms[key] = self._form([len(part) for part in parts])
        spec, forms = self._forms[key]
        outputs = [self._output(place, form) for place, form in enumerate(forms)]
        for parameter, before in zip(self.own, kept, strict=True):
            parameter.grad = before  # the loop may set it to None before the backward passes
        self._leaves = [one.requires_grad_() if form.trained else one for one, form in zip(outputs, forms, strict=True)]
        return tree_unflatten(self._leaves, spec)

    def backward(self) -> None:
        """Run the backward passes: the gradients of this worker's parameters, the mean of all replicas, are in `.grad`.

        Does nothing where no forward passes are waiting for it.

        Raises:
            SyncError: A worker died or did not answer in time.
        """
        if self._step is None:
            return
        kept = [one.grad for one in self.own]
        for parameter in self.own:
            parameter.grad = None
        starts = [one.grad for one in self._leaves if isinstance(one, Tensor) and one.requires_grad]
        for place, box in enumerate(self._boxes):
            box.gradients = [None if one is None else self._part(one, place) for one in starts]
        step, self._step, self._leaves, self._boxes = self._step, None, [], []
        self._pipeline.executor.finish(step)
        self._pipeline.wait()
        for parameter, before in zip(self.own, kept, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad + before

    def _part(self, gradient: Tensor, place: int) -> Tensor:
        """What a micro-batch's backward pass begins with: replicas are averaged, as DistributedDataParallel does."""
        part = gradient if self._parts == 1 else gradient.tensor_split(self._parts)[place]
        return part / self._pipeline.replicas

    def _compare(self, inputs: Tensor, compared: Any) -> None:
        """See that the workers of a pipeline were given the same batch."""
        if self._peers is None:
            return
        numbers = [float(len(inputs))]
        for one in tree_leaves(compared):
            if isinstance(one, Tensor) and one.numel():
                flat = one.detach().reshape(-1)[:: max(1, one.numel() // _COMPARED)]
                numbers.append(float(flat.double().nan_to_num().sum()))
        mine = torch.tensor([len(numbers), sum(place * one for place, one in enumerate(numbers, 1))]).double()
        mine = mine.to(inputs.device)
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._peers))]
        dist.all_gather(theirs, mine, group=self._peers)
        if any(not torch.equal(one, mine) for one in theirs):
            raise UsageError(
                "the workers of a pipeline were given different batches",
                "They share each batch: the first stage takes the inputs, the loss is computed on every worker.",
                "Use a sampler that draws the same samples for them, such as the one that the trainer puts in, and "
                "seed what is random in the data.",
            )

    def _form(self, sizes: list[int]) -> tuple[TreeSpec, list[_Form]]:
        """What the model returns for a batch."""
        box, forms = self._boxes[0], []
        assert box.spec is not None
        for one, trained in box.outputs:
            if self._parts > 1 and not (isinstance(one, Tensor) and one.ndim and len(one) == sizes[0]):
                what = f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
                raise UsageError(
                    f"the model returns {what} for {sizes[0]} samples",
                    "Outputs of micro-batches are put together along their first dimension.",
                    "Let it return scores of samples, and compute the loss outside; or use micro_batches=1.",
                )
            if isinstance(one, Tensor):
                shape = tuple(one.shape) if self._parts == 1 else (sum(sizes), *one.shape[1:])
                forms.append(_Form(shape, one.dtype, trained))
            else:
                forms.append(_Form(constant=one))
        return box.spec, forms

    def _output(self, place: int, form: _Form) -> Any:
        """One output of the whole batch, brought to every worker of the pipeline."""
        if self._is_last:
            parts = [box.outputs[place][0] for box in self._boxes]
            value = parts[0] if len(parts) == 1 else torch.cat(parts)
        elif form.dtype is None:
            return form.constant
        else:
            value = torch.empty(form.shape, dtype=form.dtype, device=self.trainer.world.device)
        if self._peers is not None and isinstance(value, Tensor):
            value = value.contiguous()
            with self.trainer.world.named_errors("bringing outputs to all workers of a pipeline"):
                dist.broadcast(value, self._last_rank, group=self._peers)
        return value

    # ------------------------------------------------------------------- state

    def make_whole(self) -> None:
        """Bring parameters and buffers of all stages to every worker."""
        self.trainer.engine.synchronize_buffers()

    def clip(self, limit: float) -> None:
        """Scale the gradients of all stages so that their common norm is at most a limit.

        Args:
            limit: The limit.
        """
        gradients = [one.grad for one in self.own if one.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=self.trainer.world.device)
        for norm in torch._foreach_norm(gradients) if gradients else ():
            total += norm.double() ** 2
        if self._peers is not None:
            dist.all_reduce(total, group=self._peers)
        if gradients:
            torch._foreach_mul_(gradients, (limit / (total.sqrt() + 1e-6)).clamp(max=1.0).float())

    def gather_state(self, optimizer: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of an optimizer of the loop for the parameters of all stages, on rank 0; elsewhere as it is.

        Args:
            optimizer: Its state dict on this worker.
            groups: Its `param_groups`.
        """
        own = set(map(id, self.own))
        order = [parameter for group in groups for parameter in group["params"]]
        mine = {number: one for number, one in optimizer["state"].items() if id(order[number]) in own}
        parts = self._pipeline.gather_on_main(mine)
        return (
            optimizer
            if parts is None
            else {**optimizer, "state": {n: one for part in parts for n, one in part.items()}}
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beyond model and optimizers, of all workers, on rank 0."""
        world, engine = self.trainer.world, self.trainer.engine
        workers = world.gather_on_main(engine.state_dict(), range(world.size))
        return {"codec": str(self._pipeline.options.sync.policy), "steps": self._steps, "workers": workers or []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, also with another number of workers.

        Args:
            state: What `state_dict` returned on rank 0.
        """
        world, engine, workers = self.trainer.world, self.trainer.engine, state["workers"]
        self._steps = state["steps"]
        engine.go_on_from(self._steps)
        mine = workers[world.rank] if len(workers) == world.size else {}
        engine.load_state_dict(mine)
        settle_codecs(engine.codecs, world, workers[0] if workers else {})

    def close(self) -> None:
        """Release hooks and lanes; the model stays as trained."""
        self.trainer.close()
