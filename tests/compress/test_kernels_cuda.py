"""Tests the codecs' CUDA kernels without a GPU: compiled for two architectures, and executed on a CPU.

What kernels of all devices must do is in `test_kernels.py`, which runs these as well. Here is what only they can get
wrong: the way work is divided among blocks, places in memory, and bits where torch and CUDA agree to the last.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.codegen import nvrtc as kernel_cuda
from hybridpar.compress import kernels
from hybridpar.compress.codec import CHUNK, TensorSpec
from hybridpar.compress.codecs.onebit import RowSigns
from hybridpar.compress.codecs.qsgd import LevelQuantiser
from hybridpar.compress.codecs.twobit import TernaryQuantiser
from hybridpar.compress.kernels import cuda
from hybridpar.compress.kernels.cuda import PARAMETERS, SOURCE, THREADS, CudaKernels
from hybridpar.compress.memory import Memory, Residual, Scratch
from hybridpar.compress.packing import Fields, Noise
from hybridpar.compress.quantised import Quantiser
from tests.compress.team import same_bits

CPU = torch.device("cpu")
SCRATCH = Scratch(CPU)


@pytest.fixture
def found(emulated_kernels: CudaKernels, monkeypatch: pytest.MonkeyPatch) -> CudaKernels:
    """The kernels, which tensors of the CPU now go to."""
    monkeypatch.setattr(kernels, "table", lambda device=CPU: emulated_kernels if device == CPU else None)
    return emulated_kernels


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it takes kernels away."""
    return lambda: monkeypatch.setattr(kernels, "table", lambda device=CPU: None)


# ------------------------------------------------------------------------------------------------------------ compiling


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_it_compiles(architecture: str, cuda_compiler: kernel_cuda.Compile) -> None:
    code, _ = cuda_compiler(SOURCE.read_bytes(), architecture)
    assert code[:4] == b"\x7fELF"
    assert all(name.encode() in code for name in PARAMETERS)


def test_numbers_are_those_of_the_source() -> None:
    text = SOURCE.read_text()
    for name, value in (("THREADS", THREADS), ("MOST_PARTS", cuda.MOST_PARTS), ("MOST_PLACES", cuda.MOST_PLACES)):
        assert f"constexpr u32 {name} = {value};" in text


# ------------------------------------------------------------------------------------------------------ bits and places


def message_of(quantiser: Quantiser, values: Tensor, residual: Residual) -> Tensor:
    shaped = quantiser.view(values)
    out = torch.full((quantiser.size(shaped.shape),), 0xA5, dtype=torch.uint8)
    quantiser.encode(shaped, residual, out, SCRATCH)
    return out


def levels_of(bits: int, count: int) -> LevelQuantiser:
    noise = Noise(TensorSpec("w", (count,)))
    noise.begin(0)
    return LevelQuantiser(2**bits - 1, noise)


@pytest.mark.parametrize("bits", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("count", [1, 2, 1001, 77_777])
def test_qsgd_rounds_and_adds_like_torch_to_the_last_bit(
    bits: int, count: int, found: CudaKernels, by_torch: Callable[[], None]
) -> None:
    values, ones = torch.randn(count), torch.rand(count)
    messages, totals = [], []
    for way in (lambda: None, by_torch):
        way()
        messages.append(message_of(levels_of(bits, count), values, Memory()))
        totals.append(ones.clone())
        levels_of(bits, count).read(messages[0], totals[-1], SCRATCH, 3, add=True)
    assert torch.equal(*messages)
    assert same_bits(*totals)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_qsgd_of_every_width_is_left_to_kernels(bits: int, found: CudaKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("pack", "unpack"):
        monkeypatch.setattr(Fields, way, lambda *_: pytest.fail("by torch"))
    quantiser, values, out = levels_of(bits, 1001), torch.randn(1001), torch.empty(1001)
    message = message_of(quantiser, values, Memory())
    quantiser.read(message, out, SCRATCH, 1, add=False)
    assert (out - values).abs().max() <= values.abs().max() / (2**bits - 1)


def test_noise_of_several_chunks_and_launches(
    found: CudaKernels, by_torch: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 8 * (2 * CHUNK + 1000)
    assert Fields.of(count, 2).words > 2 * CHUNK
    values = torch.randn(count)
    messages = [message_of(levels_of(1, count), values, Memory())]
    monkeypatch.setattr(cuda, "MOST_PLACES", 8)  # so that each chunk is a launch of its own
    messages.append(message_of(levels_of(1, count), values, Memory()))
    by_torch()
    messages.append(message_of(levels_of(1, count), values, Memory()))
    assert torch.equal(messages[0], messages[2])
    assert torch.equal(messages[1], messages[2])


def test_sums_of_codes_are_read(found: CudaKernels, by_torch: Callable[[], None]) -> None:
    for workers, steps in ((2, 7), (3, 15), (200, 255)):
        fields = Fields.summable(1000, 2 * steps, workers)
        codes = torch.randint(0, 2 * steps * workers + 1, (1000,))
        words = torch.empty(fields.words, dtype=fields.word)
        fields.pack(words, lambda start, stop, into, codes=codes: into.copy_(codes[start:stop]), SCRATCH)
        out, scale = torch.empty(1000), torch.tensor([0.3])
        assert kernels.qsgd_read(words, scale, fields, workers * steps, workers * steps, out, add=False)
        assert same_bits(out, (codes.float() - workers * steps) / (workers * steps) * scale)


@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_may_be_fewer_than_the_work(blocks: int, found: CudaKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 9001

    def all_of_it() -> list[Tensor]:
        made = []
        values, kept = torch.randn(2, count, generator=torch.Generator().manual_seed(0))
        for quantiser in (
            TernaryQuantiser(),
            TernaryQuantiser(fixed=0.5),
            RowSigns((9, 9001 // 9)),
            levels_of(3, count - count % 9),
        ):
            v = values if isinstance(quantiser, TernaryQuantiser) else values[: count - count % 9]
            message = message_of(quantiser, v, Residual(kept[: len(v)], torch.empty(len(v))))
            out, total = torch.empty(len(v)), torch.ones(len(v))
            quantiser.read(message, quantiser.view(out), SCRATCH, 2, add=False)
            quantiser.read(message, quantiser.view(total), SCRATCH, 1, add=True)
            made += [message, out, total]
        return made

    enough = all_of_it()
    monkeypatch.setattr(kernels, "blocks_of", lambda count, most=0: min(-(-count // (4 * THREADS)), blocks))
    monkeypatch.setattr(cuda, "MOST_BLOCKS", blocks)
    # Sums of fewer parts come out the same here, as they are made in float64.
    assert all(torch.equal(left, right) for left, right in zip(enough, all_of_it(), strict=True))


def test_a_message_may_begin_anywhere(found: CudaKernels) -> None:
    values = torch.randn(4, 100)
    lower, upper = torch.empty(2, 4)
    level, seen = torch.empty(1), set()
    for begin in range(8):
        room = torch.full((200,), 0xA5, dtype=torch.uint8)
        packed, codes = room[begin : begin + 50], room[begin + 60 : begin + 160]
        assert kernels.onebit_encode(values, Memory(), lower, upper, packed)
        assert kernels.twobit_encode(values.view(-1), Memory(), (0.5, 0.0, 0.0), level, codes, SCRATCH)
        seen.add((bytes(packed.tolist()), bytes(codes.tolist())))
        assert (room[:begin] == 0xA5).all()
        assert (room[begin + 160 :] == 0xA5).all()
        out = torch.empty(400)
        assert kernels.onebit_read(lower, upper, packed, out.view(4, 100), add=False)
        assert torch.equal(out.view(4, 100), torch.where(values >= 0, upper.unsqueeze(1), lower.unsqueeze(1)))
    assert len(seen) == 1


def test_nothing_behind_the_end_is_read(found: CudaKernels) -> None:
    """Tensors end where a page does behind which nothing may be read; a process that does is killed."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 64 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)

    def guarded(place: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The last elements of some pages."""
        end = (place + 1) * 8 * page - page
        return torch.frombuffer(memory, dtype=torch.uint8)[end - count * dtype.itemsize : end].view(dtype)

    for place in range(8):
        behind = base + (place + 1) * 8 * page - page
        assert libc.mprotect(ctypes.c_void_p(behind), ctypes.c_size_t(page), 0) == 0
    child = os.fork()
    if child == 0:
        try:
            for groups, length in ((1, 1), (3, 35), (2, 37), (7, 101), (1, 999), (3, 800)):
                count = groups * length
                values, kept, pending, out = (guarded(place, count) for place in range(4))
                values.normal_()
                kept.zero_()
                quantiser = RowSigns((groups, length))
                ternary, levels = TernaryQuantiser(), levels_of(3, count)
                for one in (quantiser, ternary, levels):
                    shape = one.view(values).shape
                    message = guarded(4, -(-one.size(shape) // 4) * 4, torch.uint8)[: one.size(shape)]
                    one.encode(one.view(values), Residual(kept, pending), message, SCRATCH)
                    one.read(message, one.view(out), SCRATCH, 1, add=False)
                    one.read(message, one.view(out), SCRATCH, 1, add=True)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, "a signal" if os.WIFSIGNALED(status) else "an exception"


# ------------------------------------------------------------------------------------------------------------- dispatch


def test_no_call_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without content go through, so nothing that is on the device is asked for."""
    launched: list[str] = []

    class Recorder(dict[str, Callable[..., None]]):
        def __missing__(self, name: str) -> Callable[..., None]:
            return lambda *_: launched.append(name)

    found, meta = CudaKernels(Recorder()), torch.device("meta")
    monkeypatch.setattr(kernels, "table", lambda device=CPU: found)
    scratch = Scratch(meta)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    for shape in ((5, 100), (5, 1000)):
        levels = (empty(5), empty(5), empty(-(-shape[0] * shape[1] // 8), dtype=torch.uint8))
        assert kernels.onebit_encode(empty(*shape), Residual(empty(*shape), empty(*shape), 0.9), *levels)
        assert kernels.onebit_read(*levels, empty(*shape), add=False)
        assert kernels.onebit_read(*levels, empty(*shape), add=True)
    codes = (empty(1), empty(252, dtype=torch.uint8))
    assert kernels.twobit_encode(empty(1000), Memory(), (0.0, 1.5, 0.5), *codes, scratch)
    assert kernels.twobit_read(*codes, empty(1000), add=False)
    assert kernels.twobit_read(*codes, empty(1000), add=True)
    assert kernels.largest(empty(1000), empty(1))
    noise: Any = SimpleNamespace(ring=empty(700), offset=lambda count: 0)
    for word in (torch.uint8, torch.int32, torch.int64):
        fields = Fields(1000, 4, word, 2)
        words = empty(fields.words, dtype=word)
        assert kernels.qsgd_encode(empty(1000), empty(1), noise, 7, fields, words)
        for add in (False, True):
            assert kernels.qsgd_read(words, empty(1), fields, 7, 7, empty(1000), add=add)
    assert set(launched) == set(PARAMETERS)


def test_empty_tensors_launch_nothing(found: CudaKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "functions", {})
    none, levels = torch.empty(0, 40), torch.empty(0)
    packed = torch.empty(0, dtype=torch.uint8)
    assert kernels.onebit_encode(none, Memory(), levels, levels, packed)
    assert kernels.onebit_read(levels, levels, packed, none, add=False)
    assert kernels.twobit_read(torch.ones(1), packed, levels, add=True)
    out = torch.ones(1)
    assert kernels.largest(levels, out)
    assert out.item() == 0
