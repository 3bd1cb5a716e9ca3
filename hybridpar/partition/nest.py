"""Flattens and rebuilds nested outputs of modules.

A value with facts in the place of tensors says how these were nested, so that a stage can send them each by itself and
the next can put them together again. Only plain containers count (tuple, named tuple, list, dict, OrderedDict, None);
anything else stays inside a stage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import is_namedtuple_instance

from hybridpar.errors import UsageError

Path = tuple[Any, ...]


@dataclass(frozen=True)
class TensorFacts:
    """A tensor that a node of a graph returns, and that may enter or leave a stage.

    Attributes:
        name: Name of the node; parts of a container append their key.
        path: Keys that lead to it in the node's value; empty where it is the value.
        shape: Shape in the example run, with its batch size.
        dtype: Element type.
        bytes: Size in the example run.
        requires_grad: Whether a gradient flows back through it.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    requires_grad: bool


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
    if type(value) in (tuple, list) or is_namedtuple_instance(value):
        return all(can_cross(item) for item in value)
    return False


def rebuild(shape: Any, leaf: Callable[[TensorFacts], fx.Node], graph: fx.Graph) -> Any:
    """A value of nodes, nested as tensors were."""
    if isinstance(shape, TensorFacts):
        return leaf(shape)
    if isinstance(shape, dict):
        items = {key: rebuild(item, leaf, graph) for key, item in shape.items()}
        return items if type(shape) is dict else graph.call_function(OrderedDict, (list(items.items()),))
    if isinstance(shape, (tuple, list)):
        parts = [rebuild(item, leaf, graph) for item in shape]
        named = is_namedtuple_instance(shape)
        return graph.call_function(type(shape), tuple(parts)) if named else type(shape)(parts)
    return None
