"""Finds and checks the checkpoints of a directory, without importing torch, and reads weights from one, with it."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridpar.errors import CheckpointError, shortened
from hybridpar.formats.file_reader import Unreadable, read_json, read_torch
from hybridpar.formats.tensor_files import read_tensors, shards_of

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
    if not directory.is_dir():
        return []
    checkpoints: dict[int, Path] = {}
    for entry in directory.iterdir():
        match = _WHOLE.match(entry.name)
        if match is None or not (entry / "manifest.json").is_file():
            continue
        step, replaced = int(match[1]), match[2] is not None
        # A replaced one counts only where a crash left no successor.
        if not replaced or step not in checkpoints:
            checkpoints[step] = entry
    return [checkpoints[step] for step in sorted(checkpoints)]


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    checkpoints = list_checkpoints(directory)
    return checkpoints[-1] if checkpoints else None


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
