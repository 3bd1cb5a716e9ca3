"""Reads weights from `.pt` and `.safetensors` files, and from checkpoints of hybridpar; no code in them runs."""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import UsageError, nearest, shortened
from hybridpar.formats.file_reader import Unreadable
from hybridpar.formats.tensor_files import read_tensors, shards_of

if TYPE_CHECKING:
    from torch import Tensor

#: What the weights are called in a checkpoint with other things beside them, averaged ones first, as in timm.
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")

#: What names of files of weights end in, whether or not there is such a file.
_SUFFIXES = (".pt", ".pth", ".safetensors", ".bin", ".ckpt", ".tar")

#: The weights that a library takes for the best of a model.
DEFAULT = "default"

#: What names of repositories of the Hugging Face hub begin with, as in timm.
HUB = "hf-hub:"

#: What wrappers (DDP, torch.compile) put in front of names.
_WRAPPERS = ("module.", "_orig_mod.")

_STEP = re.compile(r"^step-(\d+)$")

#: DenseNet files of torchvision have names such as norm.1, which its modules no longer have.
_DENSE = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")


def is_file(source: str) -> bool:
    """Whether what a user names as weights is a file or directory, and not a name of published weights."""
    if source == DEFAULT or source.startswith(HUB):
        return False
    return Path(source).suffix in _SUFFIXES or os.sep in source or Path(source).exists()


def is_published(source: str) -> bool:
    """Whether what a user names as weights is a name of published weights of torchvision or timm."""
    return not is_file(source) and not source.startswith(HUB)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of weights, or of a checkpoint."""
    check_file(path)
    if not path.is_dir():
        return clean(_read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path), path)
    checkpoint = _checkpoint_of(path)
    files = [checkpoint / name for name in shards_of("model", os.listdir(checkpoint))]
    return clean({name: tensor for file in files for name, tensor in _read_safetensors(file).items()}, path)


def check_file(path: Path) -> None:
    """Refuse a file or directory that is not there; nothing is imported."""
    file = path
    if not file.exists():
        there = list(file.parent.iterdir()) if file.parent.is_dir() else []
        near = [other.name for other in there if other.suffix in _SUFFIXES]
        raise UsageError(
            f"--weights {shortened(path)}: there is no such file",
            nearest(file.name, near) if near else f"No file of weights is in {shortened(file.parent.resolve())}.",
            "Name a .pt, .pth or .safetensors file, a checkpoint, a run directory, `default`, or weights by name.",
        )


def _checkpoint_of(directory: Path) -> Path:
    """A `step-N` directory, or the newest one of a run directory."""
    steps = [
        (int(match[1]), step)
        for step in directory.glob("checkpoints/step-*")
        if (match := _STEP.match(step.name)) is not None
    ]
    for folder in (directory, *(step for _, step in sorted(steps, reverse=True))):
        if (folder / "manifest.json").is_file():  # else it is not whole
            return folder
    raise UsageError(
        f"--weights {shortened(directory)}: the directory is no checkpoint and no run",
        "A checkpoint is a directory step-N with a manifest.json, and a run has these under checkpoints/.",
        "Name one of these, or a file.",
    )


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(file)
    except (Unreadable, OSError) as error:
        raise _unreadable(file, error) from error


def _read_torch(file: Path) -> Any:
    import pickle

    import torch

    try:
        # Checkpoints of timm and of torchvision's references hold their options in a Namespace.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        kinds = _classes_in(file)
        if not kinds:
            raise _unreadable(file, error) from error
        raise UsageError(
            f"--weights {shortened(file)} holds more than tensors: {shortened(', '.join(kinds[:3]))}",
            "Reading such objects would run code, so only tensors and plain values are read.",
            "Save the weights alone where the file comes from: torch.save(model.state_dict(), file).",
        ) from error
    except Exception as error:  # torch raises what its readers of zip files and of pickles do
        raise _unreadable(file, error) from error


def _classes_in(file: Path) -> list[str]:
    """Classes and functions that a file of torch.save would call; none where it is no such file."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        return list(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # it cannot be read at all
        return []


def _unreadable(file: Path, error: Exception) -> UsageError:
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return UsageError(
        f"--weights {shortened(file)} cannot be read: {shortened(reason)}",
        "It must be a file of torch.save or of safetensors.",
        "Copy or download it again, and see that its name ends in what it is (.pt, .pth, .safetensors).",
    )


def clean(loaded: Any, source: object) -> dict[str, Tensor]:
    """Tensors by name from what a file held."""
    import torch

    held = loaded
    if isinstance(held, Mapping):
        held = next((held[key] for key in _NESTED if isinstance(held.get(key), Mapping)), held)
    state = _State()
    for name, value in held.items() if isinstance(held, Mapping) else ():
        if isinstance(name, str) and isinstance(value, torch.Tensor):
            while name.startswith(_WRAPPERS):
                name = name.partition(".")[2]
            state[_DENSE.sub(r"\1\2", name)] = value
    if not state:
        keys = ", ".join(map(repr, list(held)[:5])) if isinstance(held, Mapping) else type(held).__name__
        raise UsageError(
            f"--weights {shortened(source)} holds no weights",
            f"Tensors by name, or under {', '.join(_NESTED)}, are wanted; it has {shortened(keys) or 'nothing'}.",
            "Save them: torch.save(model.state_dict(), file).",
        )
    state._metadata = getattr(held, "_metadata", None)
    return state


class _State(dict[str, "Tensor"]):
    """Tensors by name, with the versions of the modules that they are of, where these are known."""

    _metadata: Any = None
