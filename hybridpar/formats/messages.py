"""Encodes messages between processes, plain values as JSON and tensors as bytes, without running code on reading.

`pickle`, and with it `torch.distributed.all_gather_object`, runs whatever the bytes that it reads name. Here a message
can name a class only where that is a dataclass, a named tuple, a pydantic model, an enumeration or an error of this
package, and is then called with what it was made of.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from hybridpar.errors import HybridparError

_PACKAGE = __name__.partition(".")[0]
_LENGTH = struct.Struct("!Q")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

#: What JSON has not: the type, what is written of it, and what makes it again. In JSON it is an object with one key.
_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "bytes": (bytes, list, bytes),
    "map": (Mapping, lambda item: [list(pair) for pair in item.items()], dict),
    "path": (Path, str, Path),
    "dtype": (torch.dtype, lambda item: str(item).removeprefix("torch."), DTYPES.__getitem__),
}


def pack(item: Any) -> bytes:
    """Plain values and tensors as bytes."""
    text, tensors = take_apart(item)
    head = json.dumps([text, tensor_facts(tensors)]).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *(bytes_of(tensor.cpu()).numpy().tobytes() for tensor in tensors)])


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """What `pack` was given."""
    memory = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(memory)
        begin = _LENGTH.size + length
        text, facts = json.loads(bytes(memory[_LENGTH.size : begin]))
        sizes = [math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in facts]
        parts = torch.split_with_sizes(torch.from_numpy(np.array(memory[begin:], np.uint8)), sizes)
        # Copies, because a tensor lies where its dtype may lie. What is empty may have a stride that no dtype takes.
        tensors = [
            part.clone().view(DTYPES[of]).view(shape) if len(part) else torch.empty(shape, dtype=DTYPES[of])
            for part, (shape, of) in zip(parts, facts, strict=True)
        ]
        return put_together(text, tensors)
    except (struct.error, ValueError, TypeError, KeyError, RecursionError, RuntimeError, OverflowError) as error:
        raise ValueError(f"no message ({type(error).__name__}: {str(error)[:100]})") from error


def take_apart(item: Any) -> tuple[str, list[Tensor]]:
    """Plain values as text, and the tensors among them."""
    tensors: list[Tensor] = []
    return json.dumps(_plain(item, tensors)), tensors


def put_together(text: str, tensors: Sequence[Tensor]) -> Any:
    """What `take_apart` was given."""
    try:
        return json.loads(text, object_hook=lambda written: _item(written, tensors))
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"no message ({type(error).__name__}: {str(error)[:100]})") from error


def tensor_facts(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor."""
    return [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]


def bytes_of(tensor: Tensor) -> Tensor:
    """What a tensor holds, in row-major order, 1-D uint8; a view where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _plain(item: Any, tensors: list[Tensor]) -> Any:
    """An item as what JSON has."""
    if item is None or type(item) in (bool, int, float, str):
        return item
    if isinstance(item, list):
        return [_plain(part, tensors) for part in item]
    if isinstance(item, Tensor):
        tensors.append(item)
        return {"tensor": len(tensors) - 1}
    if (names := _arguments(type(item))) is not None:
        return {"object": [_name_of(type(item)), [[name, _plain(getattr(item, name), tensors)] for name in names]]}
    for name, (kind, parts_of, _) in _KINDS.items():
        if isinstance(item, kind):
            return {name: _plain(parts_of(item), tensors)}
    for plain in (str, float, int):  # of a derived class, such as numpy's or torch's
        if isinstance(item, plain):
            return plain(item)
    raise TypeError(f"a message cannot hold {type(item).__name__}")


def _item(written: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """What is written as an object with one key, whose value has been read."""
    ((kind, value),) = written.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "object":
        return _class_of(value[0])(**dict(value[1]))
    return _KINDS[kind][2](value)


def _arguments(kind: type) -> Iterable[str] | None:
    """What an object of a class is made of, by names of arguments and attributes; None of a class that is not sent."""
    if issubclass(kind, HybridparError):
        return "what", "why", "fix"
    if issubclass(kind, enum.Enum):
        return ("value",)
    if issubclass(kind, BaseModel):
        return kind.model_fields
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.init]
    return getattr(kind, "_fields", None) if issubclass(kind, tuple) else None


def _name_of(kind: type) -> str:
    if kind.__module__.partition(".")[0] != _PACKAGE:
        raise TypeError(f"a message cannot hold {kind.__module__}.{kind.__qualname__}")
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_of(name: str) -> Any:
    """A class of this package, by the name that `_name_of` gave it; nothing is imported."""
    module, _, qualified = name.partition(":")
    if module.partition(".")[0] != _PACKAGE or module not in sys.modules:
        raise ValueError(f"no class {name[:100]!r}")
    kind: Any = sys.modules[module]
    for part in qualified.split("."):
        kind = getattr(kind, part)
    if not isinstance(kind, type) or kind.__module__ != module or _arguments(kind) is None:
        raise ValueError(f"no class {name[:100]!r}")
    return kind
