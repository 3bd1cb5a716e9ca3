"""Writes and reads checkpoints; one that is half written is never read as a whole one.

A checkpoint is a directory `step-N`:

    model.pt       the unsplit model's plain state dict; any PyTorch program can load it
    model_ema.pt   the same of the moving average of its weights, where one is kept (`--model-ema`)
    training.pt    optimizer state by parameter name, position in the data, results of epochs
    rank-K.pt      what belongs to one worker: random number generators, state of its gradient sync
    manifest.json  step, model fingerprint, worker count, and each file's size and SHA-256

It is written under another name and renamed when every file is on disk, each worker writing its own. All files load
with `weights_only=True`, so reading a checkpoint runs no code. Any number of workers can resume it: generators of
a worker which no longer exists are dropped, a new worker's start from the seed, and on another number of workers
what codecs had not sent is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridpar.comm.world import World
from hybridpar.errors import CheckpointError, RunDirectoryError, shortened
from hybridpar.formats.file_reader import TensorPath, Unreadable, read_torch, tensor_paths, tensor_places
from hybridpar.formats.messages import bytes_of
from hybridpar.models.state_dicts import is_extra
from hybridpar.train.checkpoint_files import CHECKPOINT_VERSION, latest_checkpoint, read_manifest, resolve_checkpoint

#: Bytes of a tensor that are brought to worker 0 at once.
_PIECE = 4 << 20


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
        average: State dict of the moving average; None where none was kept.
    """

    step: int
    fingerprint: str
    model: dict[str, Tensor]
    training: dict[str, Any]
    local: dict[str, Any] | None
    workers: int = 1
    average: dict[str, Tensor] | None = None


def save_checkpoint(
    directory: Path, data: CheckpointData, world: World, shares: Mapping[str, Any] | None = None
) -> Path:
    """Write `directory/step-N`; a collective, called by every worker."""
    final = directory / f"step-{data.step}"
    aside = directory / f"step-{data.step}.partial"
    token = f".{secrets.token_hex(8)}"  # another host may have a directory of this name on a disk of its own
    made = _attempt(lambda: _fresh(aside, token)) if world.is_main else None
    answers = world.gather((made, token))
    problem = _first_problem([answer[0] for answer in answers])  # type: ignore[index]
    written: dict[str, dict[str, Any]] = {}
    if problem is None:
        far = world.gather(not (aside / answers[0][1]).exists())  # type: ignore[index]
        sent = [rank for rank, is_far in enumerate(far) if is_far]
        parts = world.gather_on_main(data.local or {}, sent) if sent else None
        files = {} if far[world.rank] else {f"rank-{world.rank}.pt": data.local or {}}
        files |= {f"rank-{rank}.pt": part for rank, part in zip(sent, parts or (), strict=world.is_main)}
        if world.is_main:
            files |= {"model.pt": data.model, "training.pt": data.training}
            if data.average is not None:
                files["model_ema.pt"] = data.average
        wrote = _attempt(lambda: written.update({name: _write(aside / name, item) for name, item in files.items()}))
        if shares is not None:
            wrote = _write_shares(aside, shares, world, wrote)
            if world.is_main and wrote is None:

                def finish(shares: Mapping[str, Any] = shares) -> None:
                    for name in shares:
                        _write_checksums(aside / name)
                        written[name] = _described(aside / name)

                wrote = _attempt(finish)
        answers = world.gather((wrote, written))
        problem = _first_problem([answer[0] for answer in answers])  # type: ignore[index]
        for answer in answers:
            written.update(answer[1])  # type: ignore[index]
    published: str | None = None
    if world.is_main and problem is None:
        manifest = {
            "version": CHECKPOINT_VERSION,
            "step": data.step,
            "model": data.fingerprint,
            "workers": world.size,
            "files": dict(sorted(written.items())),
        }
        published = _attempt(lambda: _publish(aside, final, manifest))
    problem = problem or _first_problem(world.gather(published))
    if problem is not None:
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        raise RunDirectoryError(
            f"cannot write the checkpoint {final}: {problem}",
            "A checkpoint needs about three times the model's size on a disk that all workers can write.",
            f"Free space or fix permissions, then {_way_on(directory)}.",
        )
    return final


def _way_on(directory: Path) -> str:
    newest = latest_checkpoint(directory)
    if newest is None:
        return "start again: there is no whole checkpoint from before"
    return f"go on with --resume: {newest.name}, the last whole checkpoint, is untouched"


@dataclass(frozen=True)
class Held:
    """What a worker that does not hold everything takes of a checkpoint; other tensors come on the meta device.

    Attributes:
        fingerprint: Of its model. Of a checkpoint of another model nothing is taken.
        stepped: Names of the parameters whose optimizer state it wants.
        model: Parameters and buffers that are read into; None where it wants all, in memory of their own.
        average: The same of the moving average.
    """

    fingerprint: str
    stepped: Collection[str]
    model: Mapping[str, Tensor] | None = None
    average: Mapping[str, Tensor] | None = None


def load_checkpoint(path: Path, rank: int = 0, held: Held | None = None) -> CheckpointData:
    """Read a checkpoint, verifying every file that is read against the manifest."""
    path = resolve_checkpoint(path)
    manifest = read_manifest(path)
    own = f"rank-{rank}.pt"
    names = ["model.pt", "training.pt", *(name for name in ("model_ema.pt", own) if name in manifest["files"])]
    _check(path, manifest, *names)
    if held is not None and held.fingerprint != manifest["model"]:
        held = Held(held.fingerprint, (), {}, {})
    stepped = None if held is None else held.stepped

    def into(tensors: Mapping[str, Tensor] | None) -> Callable[[TensorPath], bool | Tensor] | None:
        return None if tensors is None else lambda keys: is_extra(keys[0]) or tensors.get(keys[0], False)

    def in_training(keys: TensorPath) -> bool:
        return stepped is None or keys[:2] != ("optimizer", "state") or keys[2] in stepped

    model = _read_tensors(path, "model.pt", into(held.model) if held else None)
    average = None
    if "model_ema.pt" in names:
        average = _read_tensors(path, "model_ema.pt", into(held.average) if held else None)
    training = _read(path, "training.pt", in_training if held is not None else None)
    local = _read(path, own) if own in names else None
    return CheckpointData(manifest["step"], manifest["model"], model, training, local, manifest["workers"], average)


def load_model_state(path: Path, *, average: bool = False) -> dict[str, Tensor]:
    """Read the weights of a checkpoint, and nothing else of it."""
    name = "model_ema.pt" if average else "model.pt"
    _check(path, read_manifest(path), name)
    return _read_tensors(path, name, mapped=True)


@contextlib.contextmanager
def usable(path: Path) -> Iterator[None]:
    """Inside, a part of a checkpoint that is missing, or of another kind than was expected, is one error."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        told = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"the checkpoint {shortened(path)} does not hold what is needed here: {type(error).__name__} "
            f"{shortened(told)}",
            "Its files are whole, but another program, or another version, may have written them.",
            "Use another checkpoint, or load its model.pt with torch.load.",
        ) from error


def _read_tensors(
    path: Path, name: str, keep: Callable[[TensorPath], bool | Tensor] | None = None, *, mapped: bool = False
) -> dict[str, Tensor]:
    state = _read(path, name, keep, mapped=mapped)
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor) and not is_extra(str(key)):
            raise CheckpointError(
                f"{shortened(path / name)} has a {type(tensor).__name__} under {shortened(key)}",
                "It is the state dict of a model, all tensors but for extra states.",
                "Use another checkpoint of the run.",
            )
    return state


def _check(path: Path, manifest: dict[str, Any], *names: str) -> None:
    for name in names:
        file, expected = path / name, manifest["files"].get(name)
        with _damage(file):
            if not isinstance(expected, dict):
                raise Unreadable("the manifest does not say what it should be")
            size = file.stat().st_size
            if size != expected.get("bytes"):
                raise Unreadable(f"{size} bytes where the manifest says {shortened(expected.get('bytes'))}")
            if _sha256(file) != expected.get("sha256"):
                raise Unreadable("its content is not what the manifest says")


def _read(
    path: Path, name: str, keep: Callable[[TensorPath], bool | Tensor] | None = None, *, mapped: bool = False
) -> dict[str, Any]:
    with _damage(path / name):
        return read_torch(path / name, keep, mapped=mapped)


@contextlib.contextmanager
def _damage(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, Unreadable) as error:
        raise CheckpointError(
            f"the checkpoint file {shortened(file)} is damaged: {getattr(error, 'strerror', None) or error}",
            "Every file must have the size and the SHA-256 that manifest.json records.",
            "Resume from another checkpoint with --resume-from, or delete this one.",
        ) from error


def _write(file: Path, item: dict[str, Any]) -> dict[str, Any]:
    if any(tensor.is_meta for _, tensor in tensor_paths(item)):
        _write_form(file, item)
        return {}
    with file.open("wb") as stream:
        torch.save(item, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return _described(file)


def _write_form(file: Path, item: dict[str, Any]) -> None:
    """Write a file with room for all tensors, and the values of those that are here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        form = tree_map_only(Tensor, lambda one: torch.empty(one.shape, dtype=one.dtype), item)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(form, file)
    offsets = tensor_places(file)[1]
    for keys, tensor in tensor_paths(item):
        if not tensor.is_meta:
            _put(file, offsets[keys], tensor)


def _put(file: Path, offset: int, tensor: Tensor) -> None:
    with file.open("r+b", buffering=0) as stream:
        stream.seek(offset)
        for piece in torch.split(bytes_of(tensor), _PIECE):
            view = piece.cpu().numpy().data
            while view:
                view = view[stream.write(view) :]


def _write_shares(aside: Path, shares: Mapping[str, Any], world: World, problem: str | None) -> str | None:
    """Bring the tensors of all workers to their places in the files of rank 0; a collective."""
    here = () if world.is_main else shares.items()  # rank 0 has written its own already
    pairs = ((name, *pair) for name, share in here for pair in tensor_paths(share))
    mine = [(name, keys, tensor) for name, keys, tensor in pairs if not is_extra(keys[0])]  # rank 0 has those
    order: list[Any] = world.gather([(name, keys, tensor.nbytes) for name, keys, tensor in mine])
    offsets: dict[str, dict[TensorPath, int]] = {}

    def find() -> None:
        offsets.update({name: tensor_places(aside / name)[1] for name in shares})

    if world.is_main and problem is None:
        problem = _attempt(find)
    for rank, names in enumerate(order):
        for index, (name, keys, size) in enumerate(names):
            values = bytes_of(mine[index][2]) if rank == world.rank else None
            for start in range(0, size, _PIECE):
                got = world.gather_on_main(None if values is None else values[start : start + _PIECE], [rank])
                if got is not None and problem is None:
                    problem = _attempt(partial(_put, aside / name, offsets[name][keys] + start, got[0]))
    return problem


def _write_checksums(file: Path) -> None:
    """Set the checksums of the parts of a zip file that was written without their values."""
    with zipfile.ZipFile(file) as archive, file.open("r+b") as stream:
        place = archive.start_dir
        for part in archive.infolist():
            stream.seek(part.header_offset + 26)  # lengths of the name and of what is behind it, in front of the values
            left = part.file_size
            stream.seek(sum(struct.unpack("<HH", stream.read(4))), os.SEEK_CUR)
            checksum = 0
            while left:
                values = stream.read(min(left, 1 << 20))
                checksum, left = zlib.crc32(values, checksum), left - len(values)
            found = struct.pack("<I", checksum)
            if part.flag_bits & 8 and stream.read(4) == b"PK\x07\x08":
                stream.seek(0, os.SEEK_CUR)
                stream.write(found)
            stream.seek(place + 28)
            name, extra, comment = struct.unpack("<HHH", stream.read(6))
            stream.seek(place + 16)
            stream.write(found)
            place += 46 + name + extra + comment


def _described(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fresh(directory: Path, token: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / token).touch()


def _publish(aside: Path, final: Path, manifest: dict[str, Any]) -> None:
    with (aside / "manifest.json").open("w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    for token in aside.glob(".*"):
        token.unlink()
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


def require_model(path: Path, data: CheckpointData, fingerprint: str, model: nn.Module) -> None:
    """Refuse the checkpoint of another model."""
    if data.fingerprint != fingerprint:
        raise CheckpointError(
            f"the checkpoint {path} is of another model: {_difference(data.model, model)}",
            "Names, shapes and dtypes of all parameters and buffers must be equal.",
            "Name the model and the number of classes that the checkpoint was made with.",
        )


def _difference(saved: Mapping[str, Tensor], model: nn.Module) -> str:
    own = model.state_dict()
    for name, tensor in saved.items():
        if name not in own:
            return f"it has {name}, this model has not"
        if not is_extra(name) and own[name].shape != tensor.shape:
            return f"{name} is {tuple(tensor.shape)} there and {tuple(own[name].shape)} here"
    for name in own:
        if name not in saved:
            return f"this model has {name}, it has not"
    return "dtypes differ"
