"""Tests the codecs' kernels against the torch code, for all shapes, and the fallback where kernels are missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hybridpar.compress import kernels, parse_codec
from hybridpar.compress.codec import CHUNK, TensorSpec
from hybridpar.compress.codecs.onebit import RowSigns
from hybridpar.compress.codecs.qsgd import LevelQuantiser, scale_of
from hybridpar.compress.codecs.twobit import TernaryQuantiser
from hybridpar.compress.memory import Memory, Residual, Scratch
from hybridpar.compress.packing import Fields, Noise
from hybridpar.compress.quantised import Quantiser
from tests.compress.team import same_bits

CPU = torch.device("cpu")
SCRATCH = Scratch(CPU)


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels for a CPU, and those for a GPU, run on a CPU in its place."""
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
    kernels.table.cache_clear()
    if request.param == "cuda":
        found = request.getfixturevalue("emulated_kernels")
        monkeypatch.setattr(kernels, "table", lambda device=CPU: found if device == CPU else None)
    assert kernels.table(CPU), "TVM is a dependency, so kernels can be built"
    yield
    monkeypatch.undo()
    kernels.table.cache_clear()


class Ways:
    """Iterating goes with kernels, then without."""

    def __iter__(self) -> Iterator[bool]:
        found = kernels.table(CPU)
        with pytest.MonkeyPatch.context() as patch:
            for use in (True, False):
                patch.setattr(kernels, "table", lambda device=CPU, use=use: found if use else None)
                yield use


BOTH = Ways()


def placed(values: Tensor, offset: int) -> Tensor:
    """A copy that begins at an address which is a multiple of 64, and so many elements behind it."""
    room = torch.empty(values.numel() + offset + 16)
    start = (-room.data_ptr() // 4) % 16 + offset
    return room[start : start + values.numel()].copy_(values.reshape(-1))


class Done:
    """What a quantiser made of a tensor."""

    def __init__(self, quantiser: Quantiser, values: Tensor, kept: Tensor | None, offset: int, factor: float) -> None:
        self.pending = placed(torch.full((values.numel(),), torch.nan), offset)
        residual = Memory() if kept is None else Residual(placed(kept, offset), self.pending, factor)
        shaped = quantiser.view(placed(values, offset))
        size = quantiser.size(shaped.shape)
        room = torch.full((size + 8,), 0xA5, dtype=torch.uint8)
        self.message = room[:size]
        quantiser.encode(shaped, residual, self.message, SCRATCH)
        assert room[size:].tolist() == [0xA5] * 8, "it wrote behind the message"
        self.shape = shaped.shape

    def read(self, quantiser: Quantiser, count: int, offset: int) -> tuple[Tensor, Tensor]:
        """Decoded with a divisor, and added to ones."""
        out, total = placed(torch.full((count,), torch.nan), offset), placed(torch.ones(count), offset)
        quantiser.read(self.message, quantiser.view(out), SCRATCH, 3, add=False)
        quantiser.read(self.message, quantiser.view(total), SCRATCH, 1, add=True)
        return out, total


def compare(quantiser: Quantiser, values: Tensor, kept: Tensor | None, offset: int = 0) -> list[Done]:
    """Go both ways, and see that what one wrote both read alike, bit by bit."""
    made = [Done(quantiser, values, kept, offset, 1.0) for _ in BOTH]
    for done in made:
        (fast, fast_sum), (slow, slow_sum) = [done.read(quantiser, values.numel(), offset) for _ in BOTH]
        assert same_bits(fast, slow)
        torch.testing.assert_close(fast_sum, slow_sum, rtol=1e-6, atol=0, equal_nan=True)
    return made


#: Among them where rows begin within bytes, and where blocks of the CUDA kernels end.
SIZES = [
    *((1, 1), (3, 5), (2, 16), (64, 147), (9, 31), (130, 64), (1, 70_001), (17, 4608)),
    *((1, 6144), (3, 6145), (2, 767), (9, 769), (40, 1), (300, 3)),
]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("groups", "length"), SIZES)
def test_onebit(groups: int, length: int, offset: int) -> None:
    quantiser = RowSigns((groups, length))
    values, kept = torch.randn(groups * length), torch.randn(groups * length)
    for own in (None, kept):
        fast, slow = compare(quantiser, values, own, offset)
        assert torch.equal(fast.message[8 * groups :], slow.message[8 * groups :])
        levels = [one.message[: 8 * groups].view(torch.float32) for one in (fast, slow)]
        torch.testing.assert_close(*levels, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fast.pending, slow.pending, rtol=1e-5, atol=1e-5, equal_nan=True)
        if own is not None:
            decoded = torch.empty(values.numel())
            quantiser.read(fast.message, quantiser.view(decoded), SCRATCH, 1, add=False)
            assert same_bits(fast.pending, values + kept - decoded)


@pytest.mark.parametrize("rule", [{}, {"fixed": 0.5}, {"factor": 5.0, "cap": 1.0}], ids=str)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 70_001])
def test_twobit(rule: dict[str, float], count: int) -> None:
    quantiser = TernaryQuantiser(**rule)
    values, kept = torch.randn(count), torch.randn(count)
    for own, offset in ((None, 0), (kept, 0), (kept, 3)):
        fast, slow = compare(quantiser, values, own, offset)
        levels = [one.message[:4].view(torch.float32) for one in (fast, slow)]
        torch.testing.assert_close(*levels, rtol=1e-5, atol=0)
        if own is not None:
            decoded = torch.empty(count)
            quantiser.read(fast.message, decoded, SCRATCH, 1, add=False)
            assert same_bits(fast.pending, values + kept - decoded)
        if "fixed" in rule:
            assert torch.equal(fast.message, slow.message)
        else:  # a value at the threshold may fall to either side
            codes = [one.message[4:] for one in (fast, slow)]
            assert int((codes[0] != codes[1]).sum()) <= 1 + count // 10_000


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 31, 1000, 12_345, 5 * CHUNK + 77])
def test_qsgd(bits: int, count: int) -> None:
    def quantiser() -> LevelQuantiser:
        noise = Noise(TensorSpec("w", (count,)))
        noise.begin(0)
        return LevelQuantiser(2**bits - 1, noise)

    values = torch.randn(count)
    fast, slow = [Done(quantiser(), values, None, 0, 1.0) for _ in BOTH]
    assert torch.equal(fast.message[:8], slow.message[:8])
    fields = Fields.of(count, bits + 1)
    codes = []
    for one in (fast, slow):
        seen = torch.empty(count)
        fields.unpack(one.message[8:].view(fields.word), lambda a, b, v, into=seen: into[a:b].copy_(v), SCRATCH)
        codes.append(seen)
    # A product and a sum that are rounded once may fall to the other side of a whole number.
    assert float((codes[0] - codes[1]).abs().max()) <= 1
    assert int((codes[0] != codes[1]).sum()) <= 1 + count // 10_000
    for one in (fast, slow):
        (left, left_sum), (right, right_sum) = [one.read(quantiser(), count, 1) for _ in BOTH]
        assert same_bits(left, right)
        torch.testing.assert_close(left_sum, right_sum, rtol=1e-6, atol=1e-6)


SPECIAL = {
    "zeros": [0.0, -0.0],
    "huge": [3e38, -3e38, 1.0],
    "tiny": [1e-45, -1e-40],
    "nan": [1.0, torch.nan, -1.0],
    "inf": [1.0, torch.inf, -1.0],
    "both": [torch.inf, -torch.inf, 1.0],
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_values(kind: str) -> None:
    values = torch.tensor(SPECIAL[kind]).repeat(100)[:100]
    finite = bool(values.isfinite().all())
    noise = Noise(TensorSpec("w", (100,)))
    for quantiser in (
        RowSigns((4, 25)),
        TernaryQuantiser(),
        LevelQuantiser(15, noise),
    ):
        for _ in BOTH:
            noise.begin(0)
            out = torch.empty(100)
            quantiser.read(Done(quantiser, values, None, 0, 1.0).message, quantiser.view(out), SCRATCH, 1, add=False)
            if kind == "zeros":
                assert out.tolist() == [0.0] * 100
            elif kind == "inf" and isinstance(quantiser, RowSigns):
                assert out.isposinf().sum() == 67  # of one side only; the caller puts all of it back
            elif not finite:
                assert not out.isfinite().any()
    largest = torch.empty(1)
    assert kernels.largest(values, largest)
    assert largest.item() == scale_of(values).item()


def test_sizes_are_checked_before_addresses_are_used() -> None:
    levels = torch.empty(8)
    with pytest.raises(AssertionError):
        kernels.onebit_encode(torch.randn(8, 32), Memory(), levels, levels, torch.empty(31, dtype=torch.uint8))
    with pytest.raises(AssertionError):
        kernels.twobit_read(levels[:1], torch.empty(4, dtype=torch.uint8), torch.empty(17), add=False)


@pytest.mark.parametrize("_kernels", ["cpu"], indirect=True)
def test_the_gil_is_released() -> None:
    assert all(function.release_gil for function in kernels.table(CPU).functions.values())


@pytest.mark.parametrize("_kernels", ["cpu"], indirect=True)
def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "off")
    kernels.table.cache_clear()
    assert not parse_codec("onebit").prepare(CPU)
    assert not kernels.table(CPU)
