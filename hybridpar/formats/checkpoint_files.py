"""Finds and checks the checkpoints of a directory, without importing torch, and reads and writes weights, with it.

Weights are tensors in `.safetensors` files: in one, or in several that other tools read together by an index. The names
are those of transformers and accelerate: `model.safetensors`, or `model-00001-of-00002.safetensors` and so on, with
`model.safetensors.index.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import CheckpointError, first_line, shortened
from hybridpar.formats.file_reader import Unreadable, read_json, read_torch

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINT_VERSION = 4
_WHOLE = re.compile(r"^step-(\d+)(\.replaced)?$")

#: Keys of a manifest and their types.
_MANIFEST = {"step": int, "model": str, "workers": int, "files": dict}


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest whole one below a run directory."""
    if (path / "manifest.json").is_file():
        return path
    for directory in (path / "checkpoints", path):
        if (newest := latest_checkpoint(directory)) is not None:
            return newest
    raise CheckpointError(
        f"{path} is not a checkpoint, and holds no whole one",
        "It is a directory step-N with a manifest.json; a run saves it after an epoch, or as --checkpoints says.",
        "Name such a directory, or a run directory that holds one under checkpoints/.",
    )


def list_checkpoints(directory: Path) -> list[Path]:
    """All whole checkpoints of a directory, oldest first."""
    checkpoints: dict[int, Path] = {}
    # A replaced one counts only where a crash left no successor, which takes its place here.
    for entry in sorted(directory.glob("step-*"), reverse=True):
        if (match := _WHOLE.match(entry.name)) and (entry / "manifest.json").is_file():
            checkpoints[int(match[1])] = entry
    return [checkpoints[step] for step in sorted(checkpoints)]


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    return next(reversed(list_checkpoints(directory)), None)


def prune_checkpoints(directory: Path, stays: Collection[Path]) -> None:
    """Delete all checkpoints but some, and what crashes left behind.

    Nobody may be writing a checkpoint there meanwhile.
    """
    for path in directory.glob("step-*"):
        if path not in stays and path.is_dir():
            delete_checkpoint(path)


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint."""
    # The manifest goes first: without it the rest is no checkpoint.
    (path / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was made after, by its name; 0 where that does not say."""
    match = _WHOLE.match(checkpoint.name)
    return int(match[1]) if match is not None else 0


def read_manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    why, fix = "A whole checkpoint has one.", "Use another checkpoint of the run."
    manifest = read_json(path / "manifest.json", "the manifest", CheckpointError, fix, why=why)
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version != CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{path} is of checkpoint version {version}",
            f"This hybridpar reads version {CHECKPOINT_VERSION}.",
            "Load its weights in a script, or use the hybridpar that wrote it.",
        )
    if version != CHECKPOINT_VERSION or not all(isinstance(manifest.get(key), kind) for key, kind in _MANIFEST.items()):
        raise CheckpointError(f"{path} has no readable manifest.json", why, fix)
    assert isinstance(manifest, dict)
    return manifest


def digest_of(checkpoint: Path | None) -> str:
    """Equal for equal checkpoints, as a manifest has the hashes of all files; empty where there is none."""
    try:
        return "" if checkpoint is None else hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()
    except OSError:
        return ""


def load_model_state(path: Path, *, average: bool = False, held: Collection[str] | None = None) -> dict[str, Any]:
    """Read the weights of a checkpoint, or those that are `held`, and nothing else of it."""
    digests, stem = read_manifest(path)["files"], "model_ema" if average else "model"
    state: dict[str, Any] = {}
    for name in shards_of(stem, digests):
        with _checked(path, digests, name) as file:
            state |= read_tensors(file, held)
    for name in sorted(digests, reverse=True):  # worker 0, the last one here, has all extra states
        if name.startswith("extra-"):
            state |= read_part(path, digests, name).get(stem, {})
    return state


def read_part(path: Path, digests: Mapping[str, str], name: str) -> dict[str, Any]:
    """A file of a checkpoint that torch.save wrote."""
    with _checked(path, digests, name) as file:
        return read_torch(file)


@contextlib.contextmanager
def _checked(path: Path, digests: Mapping[str, str], name: str) -> Iterator[Path]:
    """A file of a checkpoint whose content is what the manifest says; inside, what is wrong with it is one error."""
    with usable(path / name):
        if sha256_of(path / name) != digests[name]:
            raise Unreadable("its content is not what the manifest says")
        yield path / name


@contextlib.contextmanager
def usable(path: Path) -> Iterator[None]:
    """Inside, what is wrong with a checkpoint, or a file of one, or is not what was expected in it, is one error."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        kind = "" if isinstance(error, (OSError, Unreadable)) else f"{type(error).__name__} "
        raise CheckpointError(
            f"{shortened(path)} is damaged, or does not hold what is needed here: {kind}{shortened(reason_of(error))}",
            "Every file of a checkpoint must have the SHA-256 that manifest.json records, and be of this version.",
            "Resume from another checkpoint with --resume-from, or load its weights in a script.",
        ) from error


def sha256_of(file: Path) -> str:
    """The hash that a manifest records of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def reason_of(error: BaseException) -> str:
    """What the system says, which torch has in the context of its own error."""
    causes = (error, error.__cause__, error.__context__)
    system = next((cause for cause in causes if isinstance(cause, OSError) and cause.strerror), None)
    return str(error).partition("\n")[0] if system is None else str(system.strerror)


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


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
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
    save_file(state, file, metadata={"format": "pt"})
    file.chmod(mode)  # safetensors keeps a file from all other users


def read_tensors(file: Path, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors in a file, or those of them that are wanted."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.offset_keys() if wanted is None or name in wanted]
            return {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise Unreadable(first_line(error)) from error


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__", None)
    return header
