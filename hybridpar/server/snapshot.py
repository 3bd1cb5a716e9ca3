"""A copy of a stripe's values and optimizer state, to undo an update bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.optim.build import counters_of, put_counters


class Snapshot:
    """Values and an optimizer's state of a stripe as they were; the memory is used again by the next one.

    Args:
        values: All values of the stripe, 1-D.
        pieces: The optimizer's parameters, views of them.
        optimizer: The optimizer.
    """

    def __init__(self, values: Tensor, pieces: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._live, self._pieces, self._optimizer = values, pieces, optimizer
        self._values = torch.empty_like(values)
        self._states: list[dict[str, Any]] = [{} for _ in pieces]
        self._counters: list[dict[str, Any]] = []

    @torch.no_grad()
    def take(self) -> None:
        """Keep what is there now."""
        self._values.copy_(self._live)
        self._counters = [counters_of(group) for group in self._optimizer.param_groups]
        state = self._optimizer.state
        self._states = [
            copied_state(state.get(piece, {}), before) for piece, before in zip(self._pieces, self._states, strict=True)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Bring back what was kept."""
        self._live.copy_(self._values)
        for group, counters in zip(self._optimizer.param_groups, self._counters, strict=True):
            put_counters(group, counters)
        for piece, kept in zip(self._pieces, self._states, strict=True):
            if kept:
                self._optimizer.state[piece] = copied_state(kept, self._optimizer.state.get(piece, {}))
            else:
                self._optimizer.state.pop(piece, None)


def copied_state(state: Mapping[str, Any], room: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A copy of the state that an optimizer has of a parameter.

    Args:
        state: What is copied.
        room: An earlier copy, whose memory is used again where it fits.
    """
    room = room or {}
    return {key: _copied(value, room.get(key)) for key, value in state.items()}


def _copied(value: Any, room: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(room, Tensor) and room.shape == value.shape and room.dtype == value.dtype:
        return room.copy_(value)
    return value.clone()
