"""A copy in memory of everything that a training depends on, to be restored after a trial.

As a checkpoint, but in memory and of this worker alone: weights, buffers, optimizer, what codecs did not send, what is
on its way, and every random number generator.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybridpar.train.checkpoint import random_state, restore_random_state
from hybridpar.train.periodic import copy_of


class Trained(Protocol):
    """What trains a model; see `hybridpar.train.engine`."""

    def wait(self) -> None:
        """Wait for the steps that were issued."""

    def optimizer_state(self) -> dict[str, Any]:
        """State of the optimizer by parameter name."""

    def load_optimizer_state(self, saved: Any) -> None:
        """Put it back.

        Args:
            saved: What `optimizer_state` returned.
        """

    def wire_format(self) -> Any:
        """Codecs of the gradients; once they are known, they have their state."""

    def state_dict(self) -> dict[str, Any]:
        """What else there is."""

    def load_state_dict(self, state: Any) -> None:
        """Put it back.

        Args:
            state: What `state_dict` returned.
        """

    def go_on_from(self, step: int) -> None:
        """Say how many steps were done.

        Args:
            step: Number of steps done.
        """


@dataclass(frozen=True)
class Snapshot:
    """All that a training depends on, on one worker, between two steps."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    sync: dict[str, Any]
    random: dict[str, Any]

    @classmethod
    def take(cls, model: nn.Module, engine: Trained, step: int, device: torch.device) -> Snapshot:
        """Copy everything; a collective.

        Args:
            model: The model.
            engine: What trains it.
            step: Steps done.
            device: Where random numbers are drawn.
        """
        engine.wait()
        engine.wire_format()
        return cls(
            step,
            copy_of(model.state_dict()),
            copy.deepcopy(engine.optimizer_state()),
            copy.deepcopy(engine.state_dict()),
            random_state(device),
        )

    def restore(self, model: nn.Module, engine: Trained, device: torch.device) -> None:
        """Put everything back, any number of times; a collective.

        Args:
            model: The model to restore.
            engine: What trains it.
            device: The device.
        """
        engine.wait()
        model.load_state_dict(self.model)
        engine.load_optimizer_state(copy.deepcopy(self.optimizer))
        engine.go_on_from(self.step)
        engine.load_state_dict(copy.deepcopy(self.sync))
        restore_random_state(self.random, device)
