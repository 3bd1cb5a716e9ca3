"""Converts between the state of shards and checkpoints, which hold a model and its optimizer by parameter name.

Therefore a run on servers can be resumed on other servers, on more or fewer of them, or on none, and the other way
round. What belongs to shards alone (clocks, counts) lies beside it and is used where the shards are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.comm.transport import flat_view
from hybridpar.models.state_dicts import copy_of
from hybridpar.optim.build import counters_of
from hybridpar.server.clipping import Clipping
from hybridpar.server.running import flat_buffers, running_buffers
from hybridpar.server.stripes import Piece, Stripe, piece_views, trained_parameters
from hybridpar.server.wire import Start

#: What is kept of a shard beside the parameters and the optimizer.
_PROGRESS = ("clock", "taken", "histogram")


def shard_starts(
    model: nn.Module,
    stripes: Sequence[Stripe],
    *,
    limit: int,
    optimizer: Mapping[str, Any] | None = None,
    progress: Sequence[Mapping[str, Any]] = (),
    taken: int = 0,
    clock: int = 0,
    clipping: Clipping | None = None,
    facts: Mapping[str, Any] | None = None,
) -> list[Start]:
    """What each shard is to begin with."""
    parameters = {name: own.detach() for name, own in trained_parameters(model).items()}
    saved = (optimizer or {}).get("state", {})
    counters = {name: counters_of(group) for group in (optimizer or {}).get("groups", ()) for name in group["names"]}
    starts = []
    for number, stripe in enumerate(stripes):
        counts = dict(progress[number]) if len(progress) == len(stripes) else {"clock": clock, "histogram": {}}
        starts.append(
            Start(
                pieces=list(stripe.pieces),
                state={
                    "values": torch.cat([view.to("cpu", copy=True) for view in piece_views(stripe, parameters)]),
                    "optimizer": [
                        _cut(saved.get(piece.name, {}), parameters[piece.name], piece) for piece in stripe.pieces
                    ],
                    "counters": [counters.get(piece.name, {}) for piece in stripe.pieces],
                    **counts,
                    "taken": taken,
                },
                clipping=clipping or Clipping(),
                limit=limit,
                statistics=flat_buffers(model) if number == 0 else torch.empty(0),
                rest={"tensors": untrained(model), "facts": dict(facts or {})} if number == 0 else {},
            )
        )
    return starts


def untrained(model: nn.Module) -> dict[str, Tensor]:
    """What shards do not hold, by name: frozen parameters, and buffers that are no running statistics."""
    held = set(trained_parameters(model)) | {
        name for name, buffer in model.named_buffers() if any(buffer is own for own in running_buffers(model))
    }
    return copy_of({name: value for name, value in model.state_dict().items() if name not in held}, "cpu")


def merged_states(
    model: nn.Module, stripes: Sequence[Stripe], states: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Put the shards' states together."""
    parameters = {name: own.data for name, own in trained_parameters(model).items()}
    optimizer: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    groups, progress = [], []
    for stripe, state in zip(stripes, states, strict=True):
        values, ranges = state["values"], stripe.ranges
        views = piece_views(stripe, parameters)
        for piece, view, own, (first, last) in zip(stripe.pieces, views, state["optimizer"], ranges, strict=True):
            view.copy_(values[first:last])
            for key, value in own.items():
                if isinstance(value, Tensor) and value.shape == piece.shape:
                    like = torch.zeros_like(parameters[piece.name], device="cpu", dtype=value.dtype)
                    whole = optimizer[piece.name].setdefault(key, like)
                    flat_view(whole)[piece.start : piece.start + piece.count] = value.flatten()
                else:
                    optimizer[piece.name][key] = value
        named = zip(stripe.pieces, state["counters"], strict=True)
        groups += [{"names": [piece.name], **counters} for piece, counters in named if counters]
        progress.append({key: state[key] for key in _PROGRESS})
    return {"groups": groups, "state": {name: own for name, own in optimizer.items() if own}}, progress


def _cut(state: Mapping[str, Any], like: Tensor, piece: Piece) -> dict[str, Any]:
    """A parameter's optimizer state, cut to a piece; what has another shape than the parameter stays whole."""
    own = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == like.shape:
            flat = flat_view(torch.empty_like(like, device="cpu", dtype=value.dtype).copy_(value))
            own[key] = flat[piece.start : piece.start + piece.count].clone().view(piece.shape)
    return own
