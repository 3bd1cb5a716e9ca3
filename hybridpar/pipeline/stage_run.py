"""The passes of one stage for one micro-batch, whatever the schedule.

A `StageRun` cuts the autograd graph at the borders of its stage: what enters becomes a leaf, what leaves is handed on
detached, and the backward pass starts from the gradients that came back. Tensors change hands through a `Mailbox`, in
which every user of a tensor has an entry of its own, so that the last user frees it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridpar.pipeline.random_keys import RandomKeys
from hybridpar.pipeline.stage_module import StageModule, module_of

Keep = Callable[..., None]


#: (name of the value, micro-batch, stage that takes it)
_Address = tuple[str, int, int]


class Mailbox:
    """Tensors on their way between the stages of one worker, or between a stage and a transfer.

    Attributes:
        values: Activations, addressed to the stage that uses them.
        gradients: Gradients of activations, named after the activation, addressed by the stage that *used* it.
    """

    def __init__(self) -> None:
        self.values: dict[_Address, Tensor] = {}
        self.gradients: dict[_Address, Tensor] = {}

    def clear(self) -> None:
        """Forget everything: a step was given up."""
        self.values.clear()
        self.gradients.clear()


@dataclass
class _Flight:
    """What one micro-batch leaves in a stage between its forward and its backward pass."""

    leaves: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    share: Callable[[], float] = lambda: 1.0
    target: Any = None
    pending: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # what a split backward has left to do


class StageRun:
    """Runs one stage on its lane.

    Args:
        stage: The stage, a module.
        consumers: For every stage that uses something of this one, the names of what it uses.
        mailbox: Where tensors are taken from and left.
        forward: What to call instead of the stage, for instance its compiled form.
        loss: Mean loss of outputs and targets; for the last stage.
        recompute: Keep only what enters the stage, and run its forward pass again in the backward pass.
        keys: Makes random operations depend on the micro-batch and not on the order of execution.
        context: Context in which model and loss run, such as autocast.
    """

    def __init__(
        self,
        stage: StageModule,
        consumers: dict[int, list[str]],
        mailbox: Mailbox,
        *,
        forward: Callable[..., Any] | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        recompute: bool = False,
        keys: RandomKeys | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.stage = stage
        self.module = module_of(stage)
        self.index = stage.index
        self._consumers = consumers
        self._mailbox = mailbox
        self._call: Callable[..., Any] = self.module if forward is None else forward
        self._loss = loss
        self._recompute = recompute
        self._keys = keys
        self._context = context
        self._after_forward: Callable[[], None] = lambda: None
        self._quiet: Callable[[], Any] = nullcontext
        self._flights: dict[int, _Flight] = {}
        self._device: torch.device | None = None
        self._step = 0
        #: Sum of the scaled losses of the step so far, float64; None before the first.
        self.loss_sum: Tensor | None = None
        #: What the loss is multiplied with for the backward pass alone, 0-d float32; None does not scale it.
        self.loss_scale: Tensor | None = None
        #: Micro-batches whose activations are kept now, and the most there ever were.
        self.in_flight = 0
        self.peak_in_flight = 0

    def move_to(self, device: torch.device) -> None:
        """Bring what comes from other devices to that of the stage's lane.

        Args:
            device: Of the lane.
        """
        self._device = device

    def attach(self, after_forward: Callable[[], None], quiet: Callable[[], Any]) -> None:
        """Say what belongs to every forward pass.

        Args:
            after_forward: Called on the lane after the forward pass of every micro-batch.
            quiet: Context in which a forward pass leaves no trace, for the second one of `recompute`.
        """
        self._after_forward = after_forward
        self._quiet = quiet

    def start_step(self, step: int) -> None:
        """Forget the losses of the step before, and whatever a step that was given up has left.

        Args:
            step: Its number.
        """
        self._step = step
        self.loss_sum = None
        self._flights.clear()
        self.in_flight = 0

    # ---------------------------------------------------------------- forward

    def forward(
        self, index: int, inputs: dict[str, Tensor], target: Any, share: Callable[[], float], keep: Keep
    ) -> None:
        """Run the forward pass of a micro-batch.

        Args:
            index: The micro-batch.
            inputs: The model's inputs that this stage uses, by name.
            target: What the loss compares the output with; used by the last stage.
            share: Samples of the micro-batch over those of the global batch; called when the output is there.
            keep: `Lane.keep` of the lane this runs on.
        """
        leaves: dict[str, Tensor] = {}
        for border in self.stage.inputs:
            given = inputs.get(border.name)
            value = self._mailbox.values.pop((border.name, index, self.index)) if given is None else given
            keep(value)
            leaf = self._here(value.detach())
            leaves[border.name] = leaf.requires_grad_() if border.requires_grad else leaf
        keep(*leaves.values())
        flight = self._flights[index] = _Flight(leaves, share=share, target=self._here(target))
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        with torch.set_grad_enabled(not self._recompute):
            self._run(flight, index)
        self._after_forward()
        if flight.loss is not None:
            scaled = flight.loss.detach().double()
            self.loss_sum = scaled if self.loss_sum is None else self.loss_sum + scaled
        for consumer, names in self._consumers.items():
            for name in names:
                self._mailbox.values[name, index, consumer] = flight.outputs[name].detach()
        if self._recompute:
            flight.outputs, flight.loss = {}, None

    def _run(self, flight: _Flight, index: int) -> None:
        with self._context():
            with self._keys.of(self._step, index) if self._keys is not None else nullcontext():
                result = self._call(*flight.leaves.values())
            loss = self._loss(result, flight.target) if self._loss is not None else None
        if loss is not None:
            flight.loss = (loss if self.loss_scale is None else loss.float()) * flight.share()
        else:
            flight.outputs = dict(zip((border.name for border in self.stage.outputs), result, strict=True))

    # --------------------------------------------------------------- backward

    def backward(self, index: int, keep: Keep) -> None:
        """Run the backward pass of a micro-batch: gradients of parameters are accumulated, those of inputs handed on.

        Args:
            index: The micro-batch.
            keep: `Lane.keep` of the lane this runs on.
        """
        flight = self._flights.pop(index)
        roots = self._roots(flight, index, keep)
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        self._hand_back(flight, index)
        self.in_flight -= 1

    def backward_input(self, index: int, keep: Keep) -> None:
        """The first half of a split backward pass: gradients of what entered the stage.

        Args:
            index: The micro-batch.
            keep: `Lane.keep` of the lane this runs on.
        """
        flight = self._flights[index]
        roots = self._roots(flight, index, keep)
        wanted = [leaf for leaf in flight.leaves.values() if leaf.requires_grad]
        if roots and wanted:
            gradients = torch.autograd.grad(
                [root for root, _ in roots],
                wanted,
                [gradient for _, gradient in roots],
                retain_graph=True,
                allow_unused=True,
            )
            for leaf, gradient in zip(wanted, gradients, strict=True):
                leaf.grad = gradient
        flight.pending = roots
        self._hand_back(flight, index)

    def backward_weight(self, index: int, keep: Keep) -> None:
        """The second half: gradients of the stage's parameters.

        Args:
            index: The micro-batch.
            keep: `Lane.keep` of the lane this runs on.
        """
        flight = self._flights.pop(index)
        keep(*flight.leaves.values(), *(gradient for _, gradient in flight.pending if gradient is not None))
        wanted = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if flight.pending and wanted:
            torch.autograd.backward(
                [root for root, _ in flight.pending], [gradient for _, gradient in flight.pending], inputs=wanted
            )
        self.in_flight -= 1

    def _roots(self, flight: _Flight, index: int, keep: Keep) -> list[tuple[Tensor, Tensor | None]]:
        """Where the backward pass starts, with the gradients it starts from."""
        # The graph saved tensors that other lanes made; it needs them until this lane has passed the backward pass.
        keep(*flight.leaves.values())
        if self._recompute:
            with torch.enable_grad(), self._quiet():
                self._run(flight, index)
        if flight.loss is not None:
            return [(flight.loss, self.loss_scale)] if flight.loss.requires_grad else []
        gradients: dict[str, Tensor] = {}
        # The latest user first, as autograd would come to them in a model that is in one piece.
        for consumer in sorted(self._consumers, reverse=True):
            for name in self._consumers[consumer]:
                gradient = self._mailbox.gradients.pop((name, index, consumer), None)
                if gradient is not None:
                    keep(gradient)
                    gradient = self._here(gradient)
                    known = gradients.get(name)
                    gradients[name] = gradient if known is None else known + gradient
        return [
            (output, gradients[name])
            for name, output in flight.outputs.items()
            if output.requires_grad and name in gradients
        ]

    def _here(self, value: Any) -> Any:
        """A tensor on the device of the stage's lane."""
        if self._device is None or not isinstance(value, Tensor) or value.device == self._device:
            return value
        return value.to(self._device, non_blocking=True)

    def _hand_back(self, flight: _Flight, index: int) -> None:
        for name, leaf in flight.leaves.items():
            if leaf.grad is not None:
                self._mailbox.gradients[name, index, self.index] = leaf.grad
                leaf.grad = None
