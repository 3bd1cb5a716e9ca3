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
from hybridpar.server.link import Servers
from hybridpar.server.stripes import (
    Piece,
    Stripe,
    flat_buffers,
    piece_views,
    put_buffers,
    trained_parameters,
)
from hybridpar.server.wire import Start

#: What a checkpoint has of a shard beside the parameters and the optimizer.
_PROGRESS = ("clock", "taken", "histogram")


def shard_starts(
    model: nn.Module,
    servers: Servers,
    *,
    limit: int,
    optimizer: Mapping[str, Any] | None = None,
    progress: Sequence[Mapping[str, Any]] = (),
    taken: int = 0,
    clock: int = 0,
) -> list[Start]:
    """What each shard is to begin with."""
    parameters = {name: held.detach() for name, held in trained_parameters(model).items()}
    saved = (optimizer or {}).get("state", {})
    counters = {name: counters_of(group) for group in (optimizer or {}).get("groups", ()) for name in group["names"]}
    starts = []
    for number, stripe in enumerate(servers.stripes):
        counts = {"clock": clock, "histogram": {}} if len(progress) != len(servers.stripes) else progress[number]
        state = {
            "values": torch.cat([view.to("cpu", copy=True) for view in piece_views(stripe, parameters)]),
            "statistics": torch.empty(0) if number else flat_buffers(model),
            "optimizer": [_cut(saved.get(piece.name, {}), parameters[piece.name], piece) for piece in stripe.pieces],
            "counters": [counters.get(piece.name, {}) for piece in stripe.pieces],
            **counts,
            "taken": taken,
        }
        rest = {} if number else copy_of({k: v for k, v in model.state_dict().items() if k not in parameters}, "cpu")
        pieces, clipping = list(stripe.pieces), servers.clipping
        starts.append(Start(pieces=pieces, state=state, clipping=clipping, limit=limit, rest=rest))
    return starts


def merged_states(
    model: nn.Module, stripes: Sequence[Stripe], states: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Put the shards' states together: weights and statistics into the model; the optimizer's, and progress."""
    if states[0]["statistics"].numel():
        put_buffers(model, states[0]["statistics"])
    parameters = {name: held.data for name, held in trained_parameters(model).items()}
    optimizer: dict[str, dict[str, Any]] = {}
    groups, progress = [], []
    for stripe, state in zip(stripes, states, strict=True):
        for view, (first, last) in zip(piece_views(stripe, parameters), stripe.ranges, strict=True):
            view.copy_(state["values"][first:last])
        for piece, part, counters in zip(stripe.pieces, state["optimizer"], state["counters"], strict=True):
            for key, value in part.items():
                merged = optimizer.setdefault(piece.name, {})
                if isinstance(value, Tensor) and value.shape == piece.shape:
                    like = torch.zeros_like(parameters[piece.name], device="cpu", dtype=value.dtype)
                    flat = flat_view(merged.setdefault(key, like))
                    flat[piece.start : piece.start + piece.count] = value.flatten()
                else:
                    merged[key] = value
            if counters:
                groups.append({"names": [piece.name], **counters})
        progress.append({key: state[key] for key in _PROGRESS})
    return {"groups": groups, "state": optimizer}, progress


def _cut(state: Mapping[str, Any], like: Tensor, piece: Piece) -> dict[str, Any]:
    """A parameter's optimizer state, cut to a piece; what has another shape than the parameter stays whole."""
    part = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == like.shape:
            flat = flat_view(torch.empty_like(like, device="cpu", dtype=value.dtype).copy_(value))
            part[key] = flat[piece.start : piece.start + piece.count].clone().view(piece.shape)
    return part
