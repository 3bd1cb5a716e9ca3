"""Why: a run that dies must lose seconds, and a file that is half written must never pass for a whole one.

A checkpoint is a directory `step-N`:

    model.pt       the unsplit model's plain state dict; any PyTorch program can load it
    training.pt    optimizer state by parameter name, position in the data, best accuracy
    rank-K.pt      what belongs to one worker: random number generators, state of its gradient sync
    manifest.json  step, model fingerprint, worker count, and each file's size and SHA-256

It is written under another name and renamed when every file is on disk, each worker writing its own. All files load
with `weights_only=True`, so reading a checkpoint runs no code. Any number of workers can resume it: generators of
a worker which no longer exists are dropped, a new worker's start from the seed, and what codecs had not sent is divided
anew (`hybridpar.compress.redivide`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from hybridpar.errors import CheckpointError, RunDirectoryError
from hybridpar.pipeline.world import World

CHECKPOINT_VERSION = 1
_WHOLE = re.compile(r"^step-(\d+)(\.replaced)?$")

#: Keys of a manifest and their types.
_MANIFEST = {"step": int, "model": str, "workers": int, "files": dict}


@dataclass(frozen=True)
class CheckpointData:
    """What a checkpoint holds.

    Attributes:
        step: Steps taken.
        fingerprint: The model's fingerprint (`hybridpar.models.model_fingerprint`).
        model: State dict.
        training: Tensors and plain values common to all workers.
        local: This worker's own part; None where the checkpoint has none for this rank.
        workers: How many workers wrote it.
    """

    step: int
    fingerprint: str
    model: dict[str, torch.Tensor]
    training: dict[str, Any]
    local: dict[str, Any] | None
    workers: int = 1


def save_checkpoint(directory: Path, data: CheckpointData, world: World) -> Path:
    """Write `directory/step-N`; a collective, called by every worker.

    Args:
        directory: The run's checkpoint directory, on a file system that all workers share.
        data: What to save; `model` and `training` are taken from rank 0, `local` from every rank.
        world: The workers.

    Returns:
        The path of the checkpoint.

    Raises:
        RunDirectoryError: The disk is full or not writable, on any worker. Older checkpoints stay as they were.
    """
    final = directory / f"step-{data.step}"
    aside = directory / f"step-{data.step}.partial"
    problem: str | None = None
    if world.is_main:
        problem = _attempt(lambda: _fresh(aside))
    problem = _first_problem(world.gather(problem))
    written: dict[str, dict[str, Any]] = {}
    if problem is None:
        files = {f"rank-{world.rank}.pt": data.local or {}}
        if world.is_main:
            files |= {"model.pt": data.model, "training.pt": data.training}
        problem = _attempt(lambda: written.update({name: _write(aside / name, item) for name, item in files.items()}))
        answers = world.gather((problem, written))
        problem = _first_problem([answer[0] for answer in answers])  # type: ignore[index]
        for answer in answers:
            written.update(answer[1])  # type: ignore[index]
    if world.is_main and problem is None:
        manifest = {
            "version": CHECKPOINT_VERSION,
            "step": data.step,
            "model": data.fingerprint,
            "workers": world.size,
            "files": dict(sorted(written.items())),
        }
        problem = _attempt(lambda: _publish(aside, final, manifest))
    problem = _first_problem(world.gather(problem))
    if problem is not None:
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        raise RunDirectoryError(
            f"cannot write the checkpoint {final}: {problem}",
            "A checkpoint needs about three times the model's size on a disk that all workers can write.",
            "Free space or fix permissions, then resume; the last whole checkpoint is untouched.",
        )
    return final


def load_checkpoint(path: Path, rank: int = 0) -> CheckpointData:
    """Read a checkpoint, verifying every file that is read against the manifest.

    Args:
        path: A `step-N` directory, or a run directory, of which the newest whole checkpoint is taken.
        rank: Whose own part to read.

    Raises:
        CheckpointError: There is none, it is not whole, a file is damaged, or it is of another version.
    """
    path = resolve_checkpoint(path)
    manifest = _manifest(path)
    own = f"rank-{rank}.pt"
    model = _read(path, "model.pt", manifest)
    training = _read(path, "training.pt", manifest)
    local = _read(path, own, manifest) if own in manifest["files"] else None
    return CheckpointData(manifest["step"], manifest["model"], model, training, local, manifest["workers"])


def load_rank_parts(path: Path) -> list[dict[str, Any]]:
    """The own parts of all workers that wrote a checkpoint, by rank.

    Args:
        path: See `load_checkpoint`.

    Raises:
        CheckpointError: See `load_checkpoint`.
    """
    path = resolve_checkpoint(path)
    manifest = _manifest(path)
    return [_read(path, f"rank-{rank}.pt", manifest) for rank in range(manifest["workers"])]


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest whole one below a run directory.

    Raises:
        CheckpointError: Nothing there is a checkpoint.
    """
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
    whole: dict[int, Path] = {}
    for entry in directory.iterdir():
        match = _WHOLE.match(entry.name)
        if match is None or not (entry / "manifest.json").is_file():
            continue
        step, replaced = int(match[1]), match[2] is not None
        # A replaced one counts only where a crash left no successor.
        if not replaced or step not in whole:
            whole[step] = entry
    return [whole[step] for step in sorted(whole)]


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = list_checkpoints(directory)
    return found[-1] if found else None


def prune_checkpoints(directory: Path, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the one of step `best`, and what crashes left behind.

    Nobody may be writing a checkpoint there meanwhile.
    """
    found = list_checkpoints(directory)
    kept = {*found[-keep:], directory / f"step-{best}"}
    for path in directory.glob("step-*"):
        if path not in kept and path.is_dir():
            # The manifest goes first: from then on nobody takes the rest for a checkpoint.
            (path / "manifest.json").unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def random_state(device: torch.device) -> dict[str, Any]:
    """State of every random number generator of this process: torch (CPU and GPU), numpy, Python."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        version = manifest["version"]
        whole = version != CHECKPOINT_VERSION or all(isinstance(manifest[key], kind) for key, kind in _MANIFEST.items())
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"{path} has no readable manifest.json", "A whole checkpoint has one.", "Use another checkpoint of the run."
        )
    if version != CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{path} is of checkpoint version {version}",
            f"This hybridpar reads version {CHECKPOINT_VERSION}.",
            "Load its model.pt with torch.load, or use the hybridpar that wrote it.",
        )
    assert isinstance(manifest, dict)
    return manifest


def _read(path: Path, name: str, manifest: dict[str, Any]) -> dict[str, Any]:
    file, expected = path / name, manifest["files"].get(name, {})
    problem = None
    try:
        size = file.stat().st_size
        if size != expected.get("bytes"):
            problem = f"{size} bytes where the manifest says {expected.get('bytes')}"
        elif _sha256(file) != expected.get("sha256"):
            problem = "its content is not what the manifest says"
        else:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
            assert isinstance(loaded, dict)
            return loaded
    except (OSError, RuntimeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise CheckpointError(
        f"the checkpoint file {file} is damaged: {problem}",
        "Every file must have the size and the SHA-256 that manifest.json records.",
        "Resume from another checkpoint with --resume-from, or delete this one.",
    )


def _write(file: Path, item: dict[str, Any]) -> dict[str, Any]:
    with file.open("wb") as stream:
        torch.save(item, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fresh(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _publish(aside: Path, final: Path, manifest: dict[str, Any]) -> None:
    with (aside / "manifest.json").open("w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    replaced = final.with_name(final.name + ".replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    aside.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _attempt(work: Any) -> str | None:
    """Run file work; a problem comes back as text, so that all workers can fail together and none waits."""
    try:
        work()
    except (OSError, RuntimeError) as error:
        # torch's writer reports a full disk as a RuntimeError with the cause in its context.
        causes = [error, error.__cause__, error.__context__]
        for cause in causes:
            if isinstance(cause, OSError) and cause.errno:
                return "the disk is full" if cause.errno == errno.ENOSPC else str(cause.strerror)
        return str(error).splitlines()[0]
    return None


def _first_problem(problems: list[Any]) -> str | None:
    return next((f"worker {rank}: {problem}" for rank, problem in enumerate(problems) if problem), None)
