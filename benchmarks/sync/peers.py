"""Adapters for the codecs of other projects, used from their own checkouts as their documentation says.

None of them is on PyPI. `--peers DIR` names a folder with unchanged clones:

    DIR/grace                   https://github.com/sands-lab/grace
    DIR/powersgd                https://github.com/epfml/powersgd
    DIR/gradient-compression    https://github.com/vineeths96/Gradient-Compression

What is done to them here, each without touching a file: GRACE's onebit decodes by inverting a mask of bytes bit by bit
(254 where 0 is meant), so its mask is handed over as booleans; the timer of Gradient-Compression, which synchronises
with CUDA, is replaced by one that does nothing.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Replaces the gradients of parameters, by name, by what the peer makes of all workers'.
Reduce = Callable[[Mapping[str, nn.Parameter]], None]
#: PowerSGD of both peers and of torch sends so many first steps in full. Their defaults are 100 and 1000.
FULL_STEPS = 2
_FOLDERS = {"grace": "grace", "epfml": "powersgd", "seed": "gradient-compression"}


@dataclass(frozen=True)
class Peer:
    """A method of another project.

    Attributes:
        project: `grace`, `epfml` or `seed`, the first part of its name.
        options: What is handed to the project's own constructor.
        most_ranks: With more workers its sums wrap around.
        note: What its row says.
    """

    project: str
    options: Mapping[str, Any]
    most_ranks: int = 64
    note: str = ""


def _grace(compressor: str, memory: str = "none", note: str = "", **more: Any) -> Peer:
    return Peer("grace", {"compressor": compressor, "memory": memory, "communicator": "allgather", **more}, note=note)


PEERS: Mapping[str, Peer] = {
    "epfml-psgd1": Peer("epfml", {"rank": 1}),
    "epfml-psgd4": Peer("epfml", {"rank": 4}),
    "grace-qsgd": _grace("qsgd", quantum_num=127, bucket_size=128),
    "grace-onebit": _grace("onebit", "residual", "mask taken as booleans; unchanged, it decodes wrong values"),
    "grace-topk": _grace("topk", "residual", compress_ratio=0.01),
    "grace-terngrad": _grace("terngrad"),
    "seed-qsgdmax6": Peer("seed", {"reducer": "QSGDMaxNormReducer", "quantization_level": 6}, most_ranks=2),
    "seed-twoscale": Peer(
        "seed",
        {
            "reducer": "QSGDMaxNormTwoScaleReducer",
            "lower_quantization_level": 6,
            "higher_quantization_level": 10,
        },
        most_ranks=2,
    ),
    "seed-randk": Peer(
        "seed",
        {"reducer": "GlobalRandKMaxNormReducer", "seed": 42, "quantization_level": 6, "share": 0.01},
        most_ranks=2,
        note="its replicas drift apart: what is not drawn stays each worker's own",
    ),
}


def checkouts(folder: Path | None) -> dict[str, str]:
    """The projects that are there, with the commit of each.

    Args:
        folder: What `--peers` says.
    """
    if folder is None:
        return {}
    return {project: _commit(folder / name) for project, name in _FOLDERS.items() if any((folder / name).glob("[!.]*"))}


def missing_peers(names: Sequence[str], commits: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Which of these methods cannot be measured, and why."""
    why = {}
    for name in names:
        peer = PEERS.get(name)
        if peer is not None and peer.project not in commits:
            why[name] = f"no checkout of {_FOLDERS[peer.project]} under --peers"
        elif peer is not None and ranks > peer.most_ranks:
            why[name] = f"its sums wrap around with more than {peer.most_ranks} ranks"
    return why


def make_reduce(name: str, model: nn.Module, ranks: int, folder: Path) -> Reduce:
    """What a peer of GRACE or Gradient-Compression does between backward and the optimizer."""
    peer = PEERS[name]
    with _importing(folder / _FOLDERS[peer.project]):
        return _with_grace(peer, ranks) if peer.project == "grace" else _with_seed(peer, model)


def make_powersgd(name: str, parameters: Sequence[nn.Parameter], folder: Path) -> Callable[[Any], None]:
    """epfml/powersgd in place of `optimizer.step()`, given the optimizer. Gradients are not set to zero with it."""
    with _importing(folder / _FOLDERS["epfml"]):
        library: Any = importlib.import_module("powersgd")
    config = library.Config(start_compressing_after_num_steps=FULL_STEPS, **PEERS[name].options)
    aggregator = library.PowerSGD(list(parameters), config=config)
    return lambda optimizer: library.optimizer_step(optimizer, aggregator)


def _with_grace(peer: Peer, ranks: int) -> Reduce:
    helper: Any = importlib.import_module("grace_dl.dist.helper")
    communicator = helper.grace_from_params({**peer.options, "world_size": ranks})
    if peer.options["compressor"] == "onebit":
        decode = communicator.compressor.decompress

        def decode_booleans(message: Any, shape: Any) -> Any:
            mask, *means = message
            return decode((mask.bool(), *means), shape)

        communicator.compressor.decompress = decode_booleans

    def reduce(parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            parameter.grad = communicator.step(parameter.grad, name)

    return reduce


def _with_seed(peer: Peer, model: nn.Module) -> Reduce:
    library: Any = importlib.import_module("reducer")
    options = dict(peer.options)
    kind = getattr(library, options.pop("reducer"))
    if "share" in options:
        options["K"] = int(sum(parameter.numel() for parameter in model.parameters()) * options.pop("share"))

    def timer(*arguments: Any, **more: Any) -> Any:
        return nullcontext()

    reducer = kind(torch.device("cpu"), timer, **options)
    sent: list[Tensor] = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def reduce(parameters: Mapping[str, nn.Parameter]) -> None:
        gradients = [parameter.grad for parameter in parameters.values()]
        for buffer, gradient in zip(sent, gradients, strict=True):
            buffer.copy_(gradient)  # type: ignore[arg-type]
        reducer.reduce(sent, gradients)

    return reduce


@contextmanager
def _importing(folder: Path) -> Any:
    """Import from a folder; what it holds must not hide anybody else's modules later."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _commit(folder: Path) -> str:
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
