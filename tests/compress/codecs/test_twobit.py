"""Tests 2-bit compression against MXNet's test vector, and its adaptive threshold.

With a fixed threshold, training stalls on small gradients.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridpar.compress import parse_codec
from hybridpar.compress.codec import CHUNK
from hybridpar.compress.codecs.twobit import TernaryQuantiser
from hybridpar.compress.memory import Residual, Scratch
from tests.compress.team import Team

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "twobit:threshold=0.5",
    "twobit:feedback=off",
    "twobit:least=1,meet=gather",
    "twobit:factor=1,cap=0.8,least=1,meet=shard",
)

CPU = torch.device("cpu")
SCRATCH = Scratch(CPU)

# apache/mxnet, PR 7512
GRADIENT = [-6.0, -2, 3, 1, 10, 5, -3, 2, -8, 0]
RESIDUAL = [-3.0, 1, -1, 5, -2, 2, 3, -7, -2, -100]
DECODED = [-4.0, 0, 0, 4, 4, 4, 0, -4, -4, -4]
LEFT = [-5.0, -1, 2, 2, 4, 3, 0, -1, -6, -96]


def coded(quantiser: TernaryQuantiser, values: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Message, decoded values and what is left."""
    residual = Residual(torch.zeros_like(values) if kept is None else kept, torch.zeros_like(values))
    message = torch.full((quantiser.size(values.shape),), 255, dtype=torch.uint8)
    quantiser.encode(values, residual, message, SCRATCH)
    out = torch.full_like(values, torch.nan)
    quantiser.read(message, out, SCRATCH, 1, add=False)
    return message, out, residual.pending


def test_vector_of_mxnet_through_the_exchange() -> None:
    team = Team("twobit:threshold=4,least=1", {"w": (2, 5)}, 1)
    coder = team.coders("w")[0]
    coder.unsent["worker"].left.copy_(torch.tensor(RESIDUAL))
    assert team.step([[torch.tensor(GRADIENT)]])[0].tolist() == DECODED
    assert coder.unsent["worker"].left.tolist() == LEFT


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**30), st.sampled_from([0.3, 1.0, 1.5, 4.0]))
def test_the_residual_contracts(count: int, seed: int, factor: float) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    message, out, left = coded(TernaryQuantiser(factor=factor), values)
    level = message[:4].view(torch.float32).item()
    torch.testing.assert_close(out + left, values)
    sent = int((out != 0).sum())
    assert sent >= 1
    bound = float(values.double().square().sum()) - sent * level**2
    assert float(left.double().square().sum()) <= bound * (1 + 1e-5) + 1e-6


def test_a_fixed_threshold_stalls_on_small_gradients_and_an_adapted_one_does_not() -> None:
    gradient = torch.full((1000,), 1e-3)
    for text, stalls in (("twobit:threshold=0.5", True), ("twobit", False)):
        team = Team(text, {"w": (10, 100)}, 1)
        moved = [bool(team.step([[gradient]])[0].any()) for _ in range(499)]
        assert moved[0] != stalls
        assert any(moved) != stalls


def test_squared_error_of_one_shot() -> None:
    values = torch.randn(4 * CHUNK + 3)
    _, out, left = coded(TernaryQuantiser(factor=1.1), values)
    torch.testing.assert_close(out + left, values)
    assert float(left.square().sum() / values.square().sum()) == pytest.approx(0.34, abs=0.01)


@pytest.mark.parametrize(("factor", "cap", "bounded"), [(0.5, 0.5, True), (4.0, 0.5, True), (3.0, 1.0, False)])
def test_the_residual_does_not_run_away_but_without_the_cap(factor: float, cap: float, bounded: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    kept = torch.zeros(400)
    for _ in range(400):
        kept = coded(TernaryQuantiser(factor=factor, cap=cap), torch.randn(400, generator=generator), kept)[2]
    assert (float(kept.square().mean().sqrt()) < 6) == bounded


def test_what_is_compressed() -> None:
    codec = parse_codec("twobit")
    assert codec.fits((100, 10))
    assert not codec.fits((999, 1))
    assert not codec.fits((5000,))
