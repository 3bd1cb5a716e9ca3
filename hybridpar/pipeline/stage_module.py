"""What the pipeline needs to know of a stage and its borders, and a whole model as its only stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from hybridpar.errors import ScheduleError

if TYPE_CHECKING:
    from hybridpar.comm.transport import MessagePart


class StageModule(Protocol):
    """What the pipeline needs to know of a stage: a module whose tensors are listed by name.

    All stages but the last return a tuple of the tensors that `outputs` names; the last returns what the model does.
    """

    index: int
    model_inputs: tuple[str, ...]
    written: frozenset[str]

    @property
    def inputs(self) -> Sequence[Any]:
        """What it takes: the name in the model's graph, and `requires_grad` where a gradient flows back."""

    @property
    def outputs(self) -> Sequence[Any]:
        """What it returns, likewise; empty for the last stage."""

    def use_graph(self, training: bool) -> None:
        """Compute what the model computes in training or in evaluation; modules keep their modes."""


@dataclass(frozen=True)
class _Input:
    name: str = "inputs"
    requires_grad: bool = False


@dataclass
class WholeModel:
    """A model that is not cut, as the only stage of its pipeline. It is called as it is, with one input.

    Attributes:
        module: The model.
        index: 0, as it is the only stage.
        model_inputs: Name of its input.
        inputs: What enters it.
        outputs: Nothing, as no stage follows.
        written: Nothing that counts, as one micro-batch is under way at a time.
    """

    module: nn.Module
    index: int = 0
    model_inputs: tuple[str, ...] = ("inputs",)
    inputs: tuple[_Input, ...] = (_Input(),)
    outputs: tuple[_Input, ...] = ()
    written: frozenset[str] = frozenset()

    def use_graph(self, training: bool) -> None:
        """Nothing: the model's own forward asks its modules."""


@dataclass
class BorderFacts:
    """What is known about micro-batches of one size.

    Attributes:
        parts: Every tensor that crosses a border, by name.
        gradients: Names of those that a gradient comes back for. One that later stages use only without a gradient, or
            for an output that the loss ignores, is not among them.
        saved_bytes: For every stage the bytes that its forward pass keeps for its backward pass; distinct storages,
            without parameters, buffers.
    """

    parts: dict[str, MessagePart] = field(default_factory=dict)
    gradients: set[str] = field(default_factory=set)
    saved_bytes: list[int] = field(default_factory=list)

    def bytes_of(self, name: str) -> int:
        """Size of a tensor that crosses a border."""
        part = self.parts[name]
        return math.prod(part.shape) * part.dtype.itemsize


def module_of(stage: StageModule) -> nn.Module:
    """The module of a stage: that of a whole model, or the stage itself, which a protocol cannot say."""
    module: nn.Module = stage.module if isinstance(stage, WholeModel) else stage  # type: ignore[assignment]
    return module


def consumers_of(stages: Sequence[StageModule], index: int) -> dict[int, list[str]]:
    """Who uses what a stage makes: for each later stage the names of what it uses, in the order of its inputs."""
    made = {border.name for border in stages[index].outputs}
    uses = {
        other.index: [border.name for border in other.inputs if border.name in made] for other in stages[index + 1 :]
    }
    return {stage: names for stage, names in uses.items() if names}


def check_stages(stages: Sequence[StageModule]) -> None:
    """Refuse a list of stages that is not all stages of one model, in order."""
    if not stages or [stage.index for stage in stages] != list(range(len(stages))):
        raise ScheduleError(
            f"stages {[stage.index for stage in stages]} are not all stages of a model in order",
            "A pipeline is made of what `partition_model` or `split_model` returns, as it is.",
        )
