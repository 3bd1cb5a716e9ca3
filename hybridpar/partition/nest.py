"""Flattens and rebuilds nested outputs of modules.

A structure says how tensors were nested, so that one stage can send them one by one and the next can put them
together again. Only plain containers count (tuple, named tuple, list, dict, OrderedDict, None); anything else stays
inside one stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hybridpar.errors import UsageError

Path = tuple[Any, ...]


def tensor_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """All tensors in a nested value, each with the keys that lead to it, in order."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensor_leaves(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensor_leaves(item, (*path, index))


def as_inputs(inputs: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """One micro-batch as the tuple of a model's inputs; a single tensor is a single input."""
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    wrong = next((item for item in given if not isinstance(item, torch.Tensor)), None)
    if wrong is not None or not given:
        raise UsageError(
            "no inputs were given" if not given else f"an input is a {type(wrong).__name__}",
            "Every input is a tensor; what else `forward` takes has a default.",
            "Give one example tensor for each input.",
        )
    if given[0].dim() == 0 or given[0].shape[0] == 0:
        raise UsageError(
            f"the first input has the shape {tuple(given[0].shape)}",
            "Its first dimension is the micro-batch, which has at least one sample.",
            "Give an example with samples, as torch.randn(4, 3, 224, 224).",
        )
    return given


def can_cross(value: Any) -> bool:
    """Whether a value is made of tensors and plain containers alone, so that it can be sent tensor by tensor."""
    if value is None or isinstance(value, torch.Tensor):
        return True
    if type(value) in (dict, OrderedDict):
        return all(isinstance(key, (str, int)) and can_cross(item) for key, item in value.items())
    if type(value) in (tuple, list) or _is_named_tuple(value):
        return all(can_cross(item) for item in value)
    return False


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def skeleton(value: Any) -> Any:
    """The same nesting with every tensor replaced by its path, so that no memory is held."""

    def strip(item: Any, path: Path) -> Any:
        if isinstance(item, torch.Tensor):
            return path
        if isinstance(item, dict):
            return Nested(type(item), tuple(item), tuple(strip(part, (*path, key)) for key, part in item.items()))
        if isinstance(item, (tuple, list)):
            return Nested(type(item), (), tuple(strip(part, (*path, index)) for index, part in enumerate(item)))
        return None

    return strip(value, ())


@dataclass(frozen=True)
class Nested:
    """One level of a skeleton.

    Attributes:
        kind: Type of the container.
        keys: Its keys, for a dict.
        parts: Skeletons of what it holds: a path for a tensor, `None` for None, or another level.
    """

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]


def rebuild(shape: Any, leaves: Mapping[Path, fx.Node], graph: fx.Graph) -> Any:
    """Put a skeleton together again, of nodes of a graph."""
    if shape is None:
        return None
    if not isinstance(shape, Nested):
        return leaves[shape]
    parts = [rebuild(part, leaves, graph) for part in shape.parts]
    if shape.kind is dict:
        return dict(zip(shape.keys, parts, strict=True))
    if shape.kind is OrderedDict:
        return graph.call_function(OrderedDict, (list(zip(shape.keys, parts, strict=True)),))
    if shape.kind in (tuple, list):
        return shape.kind(parts)
    return graph.call_function(shape.kind, tuple(parts))


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A nested value with every tensor replaced; what is not a plain container or a tensor stays as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)((key, map_tensors(item, change)) for key, item in value.items())
    if _is_named_tuple(value):
        return type(value)(*(map_tensors(item, change) for item in value))
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change) for item in value)
    return value
