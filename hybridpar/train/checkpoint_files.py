"""Finds and checks the checkpoints of a directory without importing torch."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hybridpar.errors import CheckpointError
from hybridpar.formats.file_reader import read_json

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
        f"{path} is not a checkpoint",
        "A checkpoint is a directory step-N with a manifest.json, written by hybridpar.",
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
