"""Writes and reads checkpoints; one that is half written is never read as a whole one.

A checkpoint is a directory `step-N`:

    model.safetensors      parameters and buffers of the whole model; any tool that knows the format can load them
    model_ema.safetensors  the same of the moving average of its weights, where one is kept (`--model-ema`)
    extra-K.pt             what safetensors cannot hold of both, where there is any: extra states of modules, complex128
    training-K.pt          optimizer state by parameter name, of what worker K steps; that of worker 0 also has the
                           position in the data and the results of epochs
    rank-K.pt              what belongs to worker K alone: random number generators, state of its gradient sync
    manifest.json          step, model fingerprint, number of workers, and the SHA-256 of each file

Where workers hold their own stages only, each of them writes its weights, and an index says which file has which
(`hybridpar.formats.checkpoint_files`).

The directory is written under another name and renamed when every file is on disk. All files are read without running
code (`weights_only=True`). Any number of workers can resume it: generators of a worker which no longer exists are
dropped, a new worker's start from the seed, and on another number of workers what codecs had not sent is dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor

from hybridpar.comm.world import World
from hybridpar.errors import CheckpointError, RunDirectoryError
from hybridpar.formats.checkpoint_files import (
    CHECKPOINT_VERSION,
    can_hold,
    index_of,
    latest_checkpoint,
    load_model_state,
    read_manifest,
    read_part,
    reason_of,
    resolve_checkpoint,
    sha256_of,
    shard_name,
    shards_of,
    usable,
    write_tensors,
)

#: Some names, or all.
_Names: TypeAlias = Collection[str] | None


@dataclass(frozen=True)
class CheckpointData:
    """What a worker writes into a checkpoint, or what it reads of one.

    Attributes:
        step: Steps taken.
        fingerprint: The model's fingerprint (`hybridpar.models.model_fingerprint`).
        model: State dict. Of several workers each writes a part, which may be empty.
        training: State of the optimizer, under `optimizer`, of which each worker may write a part; and of worker 0 what
            else is common to all.
        local: This worker's own part; None where the checkpoint has none for this rank.
        workers: How many workers wrote it.
        average: State dict of the moving average, or this worker's part; None where none is kept.
    """

    step: int
    fingerprint: str
    model: dict[str, Any]
    training: dict[str, Any]
    local: dict[str, Any] | None
    workers: int = 1
    average: dict[str, Any] | None = None


# ---------------------------------------------------------------------------------------------------------------- save


def save_checkpoint(directory: Path, data: CheckpointData, world: World) -> Path:
    """Write `directory/step-N`; a collective, called by every worker with what it is to write."""
    final = directory / f"step-{data.step}"
    aside = final.with_name(f"{final.name}.partial")
    written: dict[str, str] = {}

    def write(files: Mapping[str, Any]) -> None:
        with _explained(final, world.rank):
            written.update({name: _write(aside / name, content) for name, content in files.items()})

    try:
        token = world.from_main(partial(_begin, aside, final))
        far, files = _files_of(data, world, aside / token)
        world.on_all(lambda: write({} if world.rank in far else files))
        for rank in far:
            sent = world.gather_on_main(files, [rank])
            world.on_all(partial(write, sent[0] if sent and world.is_main else {}))
        parts: list[Any] = world.gather(written)
        facts = {"version": CHECKPOINT_VERSION, "step": data.step, "model": data.fingerprint, "workers": world.size}
        digests = {name: digest for part in parts for name, digest in part.items()}
        world.from_main(partial(_publish, aside, final, facts, digests))
    except RunDirectoryError:
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def _begin(aside: Path, final: Path) -> str:
    """Make the directory with a file of a random name: another host may have such a directory on a disk of its own."""
    token = f".{secrets.token_hex(8)}"
    with _explained(final, 0):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        (aside / token).touch()
    return token


def _files_of(data: CheckpointData, world: World, token: Path) -> tuple[list[int], dict[str, Any]]:
    """The workers that do not see worker 0's disk, and this worker's files by name; a collective."""
    files: dict[str, Any] = {f"rank-{world.rank}.pt": data.local or {}}
    if world.is_main or data.training:
        files[f"training-{world.rank}.pt"] = data.training
    states = {"model": data.model, "model_ema": data.average or {}}
    tensors = {stem: {name: item for name, item in state.items() if can_hold(item)} for stem, state in states.items()}
    extra = {stem: {name: item for name, item in state.items() if not can_hold(item)} for stem, state in states.items()}
    if any(extra.values()):
        files[f"extra-{world.rank}.pt"] = extra
    answers: list[Any] = world.gather((token.exists(), [stem for stem in tensors if tensors[stem]]))
    for stem, part in tensors.items():
        writers = [rank for rank, (_, stems) in enumerate(answers) if stem in stems]
        if part:
            files[shard_name(stem, writers.index(world.rank), len(writers))] = part
    return [rank for rank, (sees, _) in enumerate(answers) if not sees], files


def _write(file: Path, content: Any) -> str:
    """Write a file of the kind that its name says; its SHA-256."""
    if file.suffix == ".safetensors":
        write_tensors(file, content)
    elif file.suffix == ".json":
        file.write_text(json.dumps(content, indent=2), encoding="utf-8")
    else:
        with file.open("wb") as stream:  # of a file torch would not say why it cannot be written
            torch.save(content, stream)
    _sync(file)
    return sha256_of(file)


def _publish(aside: Path, final: Path, facts: Mapping[str, Any], digests: dict[str, str]) -> None:
    """Write what tells of all files, and give the directory its name."""
    with _explained(final, 0):
        for stem in ("model", "model_ema"):
            shards = shards_of(stem, digests)
            if len(shards) > 1:
                name = f"{stem}.safetensors.index.json"
                digests[name] = _write(aside / name, index_of([aside / shard for shard in shards]))
        _write(aside / "manifest.json", {**facts, "files": dict(sorted(digests.items()))})
        for token in aside.glob(".*"):
            token.unlink()
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        aside.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(final: Path, rank: int) -> Iterator[None]:
    """Inside, what goes wrong with files is one error, so that all workers can fail together and none waits."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        newest = latest_checkpoint(final.parent)
        way_on = "start again: there is no whole checkpoint from before"
        if newest is not None:
            way_on = f"go on with --resume: {newest.name}, the last whole checkpoint, is untouched"
        raise RunDirectoryError(
            f"cannot write the checkpoint {final}: worker {rank}: {reason_of(error)}",
            "A checkpoint needs about three times the model's size on a disk that all workers can write.",
            f"Free space or fix permissions, then {way_on}.",
        ) from error


# ---------------------------------------------------------------------------------------------------------------- load


def load_checkpoint(
    path: Path, rank: int = 0, *, fingerprint: str = "", held: _Names = None, stepped: _Names = None
) -> CheckpointData:
    """Read a checkpoint, verifying every file that is read against the manifest; that of another model is refused.

    Where a worker does not hold everything, only the tensors are read that are `held`, and the optimizer's state of the
    parameters that are `stepped` here.
    """
    path = resolve_checkpoint(path)
    manifest = read_manifest(path)
    if fingerprint not in ("", manifest["model"]):
        raise CheckpointError(
            f"the checkpoint {path} is of another model",
            "Names, shapes and dtypes of all parameters and buffers must be equal.",
            "Name the model and the number of classes that the checkpoint was made with.",
        )
    digests = manifest["files"]
    model = load_model_state(path, held=held)
    average = load_model_state(path, average=True, held=held) if shards_of("model_ema", digests) else None
    training: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for name in sorted(name for name in digests if name.startswith("training-")):
        part = read_part(path, digests, name)
        with usable(path):
            _add_optimizer(optimizer, part.pop("optimizer", {}), stepped)
        training = part | training
    if optimizer:
        training["optimizer"] = optimizer
    name = f"rank-{rank}.pt"
    local = read_part(path, digests, name) if name in digests else None
    return CheckpointData(manifest["step"], manifest["model"], model, training, local, manifest["workers"], average)


def _add_optimizer(optimizer: dict[str, Any], part: Mapping[str, Any], stepped: _Names) -> None:
    """Add the state that a worker has written; tensors are copied, so that nothing is left of its file."""
    if not part:
        return
    optimizer.setdefault("kind", part["kind"])
    optimizer.setdefault("groups", []).extend(part["groups"])
    state = optimizer.setdefault("state", {})
    for name, values in part["state"].items():
        if stepped is None or name in stepped:
            state[name] = {key: item.clone() if isinstance(item, Tensor) else item for key, item in values.items()}
