"""A copy in memory of all that a training depends on, for trials that leave no trace."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.models.random_state import random_state, restore_random_state
from hybridpar.sync.statistics import copy_of
from hybridpar.train.engine import Engine


@dataclass(frozen=True)
class Snapshot:
    """A copy in memory of all that a training depends on, on one worker, between two steps; restored after a trial.

    Attributes:
        step: Steps done.
        model: Weights and buffers.
        optimizer: State of the optimizer by parameter name.
        sync: What codecs did not send, and what is on its way.
        random: Every random number generator.
        average: The moving average of the weights; None without one.
        loss_scale: State of the loss scale; None without one.
        common: What an outer loop has on all workers alike, on rank 0 of all of them; None without one.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    sync: dict[str, Any]
    random: dict[str, Any]
    average: dict[str, Tensor] | None
    loss_scale: dict[str, float] | None
    common: dict[str, Any] | None

    @classmethod
    def take(cls, model: nn.Module, engine: Engine, step: int, device: torch.device) -> Snapshot:
        """Copy everything; a collective.

        Args:
            model: The model.
            engine: What trains it.
            step: Steps done.
            device: Where random numbers are drawn.

        Returns:
            The copy.
        """
        engine.wait()
        engine.wire_format()
        return cls(
            step,
            copy_of(model.state_dict()),
            copy.deepcopy(engine.optimizer_state()),
            copy.deepcopy(engine.state_dict()),
            random_state(device),
            engine.average_state(),
            engine.loss_scale_state(),
            engine.common_state(),
        )

    def restore(self, model: nn.Module, engine: Engine, device: torch.device) -> None:
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
        engine.load_common_state(self.common or {})
        engine.load_state_dict(copy.deepcopy(self.sync))
        if self.average is not None:
            engine.load_average_state(self.average)
        if self.loss_scale is not None:
            engine.load_loss_scale_state(self.loss_scale)
        restore_random_state(self.random, device)
