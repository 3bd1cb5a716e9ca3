"""Checks and times the codecs' kernels: the pack `codecs` of `scripts/gpu_check.py`.

Messages are compared with those that torch makes, and what kernels decode with what torch decodes from the same bytes
on a CPU, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from benchmarks.rig.paired import paired
from benchmarks.rig.rows import Row, row, write_rows
from hybridpar.compress import kernels
from hybridpar.compress.codec import TensorSpec
from hybridpar.compress.codecs.onebit import RowSigns
from hybridpar.compress.codecs.qsgd import LevelQuantiser
from hybridpar.compress.codecs.twobit import TernaryQuantiser
from hybridpar.compress.memory import Memory, Residual, Scratch
from hybridpar.compress.packing import Noise
from hybridpar.compress.quantised import Quantiser
from hybridpar.run.worker import device_name
from scripts import gpu_workers
from scripts.gpu_common import Outcome, Pack, Result, SkippedCheck, run_each, versions

CPU = torch.device("cpu")

#: Groups and their length: one value; rows that begin in the middle of bytes; ResNet's; a row of many blocks' work.
SHAPES = ((1, 1), (3, 5), (64, 147), (130, 64), (512, 4608), (10, 25_088), (1, 70_001))

#: What is timed: a layer of ResNet-18 and one of VGG-16.
TIMED = ((512, 4608), (4096, 4096))

#: Share of a message's bytes that may differ, where sums have another order and a value is at a threshold; and by how
#: much levels may.
BYTES_LIMIT, LEVEL_LIMIT = 1e-3, 1e-5

Make = Callable[[tuple[int, int], torch.device], Quantiser]


def _levels(bits: int) -> Make:
    def make(shape: tuple[int, int], device: torch.device) -> Quantiser:
        noise = Noise(TensorSpec("w", shape, device=device))
        noise.begin(0)
        return LevelQuantiser(2**bits - 1, noise)

    return make


#: Codecs by name, and how many float32 their messages begin with for so many groups.
CODECS: dict[str, tuple[Make, Callable[[int], int]]] = {
    "onebit": (lambda shape, device: RowSigns(shape), lambda groups: 2 * groups),
    "twobit": (lambda shape, device: TernaryQuantiser(), lambda groups: 1),
    "twobit, threshold=0.5": (lambda shape, device: TernaryQuantiser(fixed=0.5), lambda groups: 1),
    **{f"qsgd_mn, bits={bits}": (_levels(bits), lambda groups: 2) for bits in (1, 3, 4, 8)},
}


@contextmanager
def by_torch() -> Iterator[None]:
    """Inside, no kernels are used."""
    with mock.patch.object(kernels, "table", return_value=None):
        yield


@dataclasses.dataclass
class Made:
    """What was made of a tensor, on the CPU."""

    message: Tensor
    left: Tensor
    decoded: Tensor
    added: Tensor


def make(quantiser: Quantiser, shape: tuple[int, int], device: torch.device) -> Made:
    """Encode, with a residual where the codec has a kernel for that, decode, and add to ones."""
    generator = torch.Generator().manual_seed(0)
    values, unsent = torch.randn(2, math.prod(shape), generator=generator).to(device)
    left, decoded, added = torch.empty_like(values), torch.empty_like(values), torch.ones_like(values)
    scratch = Scratch(device)
    message = torch.zeros(quantiser.size(quantiser.view(values).shape), dtype=torch.uint8, device=device)
    residual = Memory() if isinstance(quantiser, LevelQuantiser) else Residual(unsent, left)
    quantiser.encode(quantiser.view(values), residual, message, scratch)
    quantiser.read(message, quantiser.view(decoded), scratch, 3, add=False)
    quantiser.read(message, quantiser.view(added), scratch, 1, add=True)
    return Made(message.cpu(), left.cpu(), decoded.cpu(), added.cpu())


def compare(codec: str, shape: tuple[int, int], device: torch.device) -> Outcome:
    """One codec and shape: share of bytes that torch would have sent otherwise; the rest must be exact."""
    of, heads = CODECS[codec]
    noisy = codec.startswith("qsgd")
    made = make(of(shape, device), shape, device)
    with by_torch():
        # Torch draws other noise on a CPU, so it rounds where the noise is; it decodes on a CPU in any case.
        expected = make(of(shape, device if noisy else CPU), shape, device if noisy else CPU)
        quantiser, scratch = of(shape, CPU), Scratch(CPU)
        decoded, added, sent = (torch.empty(math.prod(shape)) for _ in range(3))
        quantiser.read(made.message, quantiser.view(decoded), scratch, 3, add=False)
        quantiser.read(made.message, quantiser.view(added.fill_(1)), scratch, 1, add=True)
        quantiser.read(made.message, quantiser.view(sent), scratch, 1, add=False)
    head = 4 * heads(shape[0])
    levels, wanted = (each.message[:head].view(torch.float32) for each in (made, expected))
    if not torch.allclose(levels, wanted, rtol=LEVEL_LIMIT, atol=1e-7):
        raise ValueError(f"levels differ by {float((levels - wanted).abs().max()):.3g}")
    if not (_same(made.decoded, decoded) and torch.allclose(made.added, added, rtol=1e-6, atol=1e-6)):
        raise ValueError("what is decoded from the same bytes differs")
    if not noisy:
        values, residual = torch.randn(2, math.prod(shape), generator=torch.Generator().manual_seed(0))
        if not _same(made.left, values + residual - sent):
            raise ValueError("what is kept is not what was not sent")
    share = float((made.message[head:] != expected.message[head:]).float().mean())
    return share, BYTES_LIMIT, share <= BYTES_LIMIT or shape == (1, 1)


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def special_values(device: torch.device) -> Outcome:
    """What is not finite is noticed by whoever decodes, and zeros arrive as zeros."""
    wrong = 0
    for value in (math.nan, math.inf, -math.inf, 0.0):
        for of, _ in CODECS.values():
            quantiser = of((4, 25), device)
            values, scratch = torch.full((100,), value, device=device), Scratch(device)
            message = torch.zeros(quantiser.size(quantiser.view(values).shape), dtype=torch.uint8, device=device)
            quantiser.encode(quantiser.view(values), Memory(), message, scratch)
            quantiser.read(message, quantiser.view(values), scratch, 1, add=False)
            wrong += int((values != 0).sum() if value == 0 else values.isfinite().sum())
    return wrong, 0, wrong == 0


def _need_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise SkippedCheck("needs a GPU")


def on_another_stream(device: torch.device) -> Outcome:
    """Kernels run behind what torch has put on its current stream."""
    _need_gpu(device)
    values, out = torch.zeros(1 << 24, device=device), torch.empty(1, device=device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        for _ in range(50):
            values.add_(1)
        assert kernels.largest(values, out)
        value = out.item()
    return value, 50.0, value == 50


def on_another_gpu(device: torch.device) -> Outcome:
    """A tensor's GPU need not be the current one."""
    _need_gpu(device)
    if torch.cuda.device_count() < 2:
        raise SkippedCheck("needs two GPUs")
    other = torch.device("cuda", 1 - (device.index or 0))
    with torch.cuda.device(device):
        return compare("onebit", (64, 147), other)


def in_a_graph(device: torch.device) -> Outcome:
    """Launches can be captured and replayed on other values."""
    _need_gpu(device)
    values, out = torch.ones(1 << 20, device=device), torch.empty(1, device=device)
    assert kernels.largest(values, out)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert kernels.largest(values, out)
    values.fill_(7)
    graph.replay()
    value = out.item()
    return value, 7.0, value == 7


def run_checks(device: torch.device) -> Iterator[Result]:
    """Run all checks, printing each."""
    if kernels.table(device) is None:
        yield Result("kernels", f"there are none for {device}", "", "FAILED")
        return
    checks: dict[str, Callable[[], Outcome]] = {
        f"{codec}, {shape[0]} x {shape[1]}": lambda codec=codec, shape=shape: compare(codec, shape, device)  # type: ignore[misc]
        for codec in CODECS
        for shape in SHAPES
    }
    for name, check in {
        "special values": special_values,
        "another stream": on_another_stream,
        "another GPU": on_another_gpu,
        "CUDA graph": in_a_graph,
    }.items():
        checks[name] = lambda check=check: check(device)  # type: ignore[misc]
    yield from run_each(checks)


def run(pack: Pack) -> bool:
    """Check all codecs, alone and between two workers, then time them; whether no check failed."""
    passed = pack.write_checks(list(run_checks(pack.device)))
    passed = gpu_workers.run(pack) and passed
    for shape in SHAPES[:2] if pack.dry else TIMED:
        for codec in CODECS:
            if pack.has_time_for(f"{codec}, {shape[0]} x {shape[1]}"):
                for rows in time_codec(codec, shape, pack.device):
                    write_rows(rows, pack.out / "kernels.csv")
    return passed


def time_codec(codec: str, shape: tuple[int, int], device: torch.device) -> Iterator[Sequence[Row]]:
    """Time a codec's kernels against torch and against a copy of the gradient on the device; rows of each way."""
    values, unsent, left, out = torch.randn(4, math.prod(shape), device=device)
    of, _ = CODECS[codec]
    quantiser, scratch = of(shape, device), Scratch(device)
    residual = Memory() if isinstance(quantiser, LevelQuantiser) else Residual(unsent, left)
    message = torch.zeros(quantiser.size(quantiser.view(values).shape), dtype=torch.uint8, device=device)
    ways: dict[str, Callable[[], object]] = {
        "encode": lambda: quantiser.encode(quantiser.view(values), residual, message, scratch),
        "decode": lambda: quantiser.read(message, quantiser.view(out), scratch, 1, add=False),
        "add": lambda: quantiser.read(message, quantiser.view(out), scratch, 1, add=True),
    }
    for way, step in ways.items():
        yield _rows(f"{codec}, {way}, {shape[0]} x {shape[1]}", step, values, out)


def _rows(setting: str, step: Callable[[], object], values: Tensor, out: Tensor) -> list[Row]:
    def slow() -> None:
        with by_torch():
            step()

    methods = {"torch": slow, "kernels": step, "copy": lambda: out.copy_(values)}
    repeats = {"torch": 1, "kernels": 20, "copy": 20}  # torch's takes up to a thousand times as long
    result = paired({method: _finished(call, values.device) for method, call in methods.items()}, repeats=repeats)
    return [
        row(
            result,
            method,
            "torch",
            claim="gpu",
            setting=setting,
            device=device_name(values.device),
            extra={"gradient_gb_per_second": round(4e-6 * values.numel() / result.median_ms(method), 2), **versions()},
        )
        for method in methods
    ]


def _finished(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    def timed() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return timed
