"""Tensors in `.safetensors` files: in one, or in several that other tools read together by an index.

The names are those of transformers and accelerate: `model.safetensors`, or `model-00001-of-00002.safetensors` and so
on, with `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.formats.file_reader import Unreadable

if TYPE_CHECKING:
    from torch import Tensor


def shard_name(stem: str, number: int, count: int) -> str:
    """The name of a file, of which there are so many; `number` is counted from 0."""
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number + 1:05}-of-{count:05}.safetensors"


def shards_of(stem: str, names: Iterable[str]) -> list[str]:
    """Those of some files that hold the tensors of a stem."""
    return sorted(name for name in names if re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.safetensors", name))


def index_of(files: Sequence[Path]) -> dict[str, Any]:
    """What the index of several files says: which of them holds each tensor."""
    headers = {file.name: _header(file) for file in files}
    sizes = [facts["data_offsets"] for header in headers.values() for facts in header.values()]
    return {
        "metadata": {"total_size": sum(end - begin for begin, end in sizes)},
        "weight_map": {name: file for file, header in headers.items() for name in header},
    }


def can_hold(value: object) -> bool:
    """Whether the format has a form for a value: dense tensors, but for some dtypes such as complex128."""
    import torch
    from safetensors.torch import _TYPES as DTYPES

    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype in DTYPES.values()


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file; tied tensors are in it under each of their names, as the format has no views."""
    import torch
    from safetensors.torch import save_file

    state: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        values = tensor.detach().clone(memory_format=torch.contiguous_format) if storage in storages else tensor
        state[name] = values.detach().resolve_conj().resolve_neg().cpu().contiguous()
        storages.add(storage)
    file.touch()
    mode = file.stat().st_mode
    save_file(state, file, metadata={"format": "pt", **(metadata or {})})
    file.chmod(mode)  # safetensors keeps a file from all other users


def read_tensors(file: Path, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors in a file, or those of them that are wanted."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.offset_keys() if wanted is None or name in wanted]
            return {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise Unreadable(str(error).partition("\n")[0] or type(error).__name__) from error


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__", None)
    return header
