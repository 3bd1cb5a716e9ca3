"""Tests the codec PowerSGD against identities of the power method.

A plausible bug breaks at least one of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hybridpar.compress import kernels, parse_codec
from hybridpar.compress.codecs import powersgd
from hybridpar.compress.codecs.powersgd import orthonormal
from tests.compress.team import Team, equal

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "powersgd:rank=3,gain=0",
    "powersgd:feedback=off",
    "powersgd:rank=1,cast=bf16",
)

SHAPES = {"w": (30, 40)}

#: Some of one shape, and some that are sent in full.
LAYERS = {"a": (24, 64), "b": (7,), "c": (24, 64), "d": (60, 5, 3, 3), "e": (24, 4, 16), "f": (33, 33), "g": (61, 48)}


@pytest.fixture(params=["kernels", "BLAS", "together"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All ways to do the work; together is that of a GPU."""
    if request.param == "kernels":
        monkeypatch.setenv("HYBRIDPAR_KERNELS", "on")
        kernels.table.cache_clear()
        assert kernels.table(torch.device("cpu")), "TVM is a dependency, so kernels can be built"
    else:
        monkeypatch.setattr(kernels, "table", lambda device=None: None)
        monkeypatch.setattr(powersgd, "_one_by_one", lambda device: request.param == "BLAS")
    yield
    monkeypatch.undo()
    kernels.table.cache_clear()


class Reference:
    """PowerSGD with error feedback as its paper has it, matrix by matrix in float64, all workers at once."""

    def __init__(self, factor: torch.Tensor, workers: int, decay: float = 1.0) -> None:
        self.q, self.decay = factor.double(), decay
        self.errors = [torch.zeros(1, dtype=torch.float64)] * workers
        self.size = 0.0

    def step(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        matrices = [g.double() + self.decay * e for g, e in zip(gradients, self.errors, strict=True)]
        q = torch.linalg.qr(self.q).Q
        p = torch.linalg.qr(sum(m @ q for m in matrices) / len(matrices)).Q
        self.q = sum(m.t() @ p for m in matrices) / len(matrices)
        result = p @ self.q.t()
        self.errors = [m - result for m in matrices]
        self.size = max(float(m.norm()) for m in matrices)
        return result


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("text", ["powersgd:rank=1", "powersgd:rank=2,decay=0.9", "powersgd:rank=4", "powersgd:rank=6"])
def test_it_is_powersgd_matrix_by_matrix(text: str) -> None:
    team = Team(f"{text},gain=1", LAYERS, 3)
    matrices = {name: (shape[0], -1) for name, shape in LAYERS.items() if len(shape) > 1}
    decay = 0.9 if "decay" in text else 1.0
    plain = {name: Reference(team.coders(name)[0].state_dict()["q"].t(), 3, decay) for name in matrices}
    for seed in range(6):
        gradients = team.gradients(seed, 1e-3)
        if seed == 3:  # of a step that does not count nothing is left
            team.meet(team.gradients(99))
        for index, (name, out) in enumerate(zip(LAYERS, team.step(gradients), strict=True)):
            if name in matrices:
                expected = plain[name].step([own[index].view(matrices[name]) for own in gradients])
                difference = float((out.view(matrices[name]) - expected).norm())
                assert difference < 1e-6 * plain[name].size, (seed, name)
    for name, reference in plain.items():
        for coder, error in zip(team.coders(name), reference.errors, strict=True):
            kept = coder.unsent["worker"].left.view(error.shape)
            assert float((kept - error).norm()) < 1e-6 * reference.size, name


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("_way", ["together"], indirect=True)
def test_working_together_keeps_what_every_codec_promises() -> None:
    from tests.compress import test_every_codec as every  # which imports this file

    for text in VARIANTS:
        every.test_workers_agree_and_nothing_is_lost(text, 3)
        every.test_a_bad_number_is_seen_by_all_and_can_be_taken_back(text)
        every.test_constant_gradients(text)
        every.test_state_is_saved_and_restored(text)
        every.test_gradients_of_any_stride_and_results_in_place(text, torch.float32)


@pytest.mark.usefixtures("_way")
def test_a_parameter_that_nobody_used_keeps_its_state_beside_others_of_its_shape() -> None:
    team, alone = Team("powersgd:rank=2", LAYERS, 2), Team("powersgd:rank=2", {"c": LAYERS["c"]}, 2)
    for seed in range(4):
        gradients = team.gradients(seed)
        unused = ["c"] if seed == 1 else []
        before = team.coders("c")[0].state_dict()
        team.meet(gradients)
        for exchange in team.exchanges:
            exchange.commit(unused)
        assert equal(team.coders("c")[0].state_dict(), before) == bool(unused)
        if not unused:
            alone.step([[own[2]] for own in gradients])
    torch.testing.assert_close(team.unsent("c"), alone.unsent("c"), rtol=1e-4, atol=1e-5)


def test_full_rank_is_exact() -> None:
    team = Team("powersgd:rank=99,gain=0", {"w": (8, 40), "v": (40, 8)}, 3)
    gradients = team.gradients(0)
    for index, out in enumerate(team.step(gradients)):
        mean = (gradients[0][index] + gradients[1][index] + gradients[2][index]) / 3
        torch.testing.assert_close(out, mean, rtol=0, atol=1e-5)
    for name in ("w", "v"):
        # What is kept is how the workers differ, and adds up to nothing.
        assert float(team.unsent(name).abs().max()) < 1e-5


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("_way", ["BLAS", "together"], indirect=True)
def test_rows_are_orthonormal_also_of_matrices_of_lower_rank() -> None:
    few = torch.randn(4, 50)
    few[2] = few[0] - 3 * few[1]
    huge, tiny, square, single = (
        1e30 * torch.randn(4, 7),
        1e-30 * torch.randn(4, 50),
        torch.ones(4, 4),
        torch.ones(1, 9),
    )
    factors = [torch.randn(4, 50), few, torch.zeros(4, 20), torch.ones(4, 50), huge, tiny, square, single]
    for factor, rows in zip(factors, orthonormal(factors), strict=True):
        torch.testing.assert_close(rows @ rows.t(), torch.eye(len(rows)), rtol=0, atol=1e-5)
        inside = factor / factor.abs().max().clamp(min=1e-38)
        torch.testing.assert_close(inside @ rows.t() @ rows, inside, rtol=0, atol=1e-5)


def test_what_is_compressed() -> None:
    codec = parse_codec("powersgd:rank=2")
    assert codec.fits((64, 64, 3, 3))
    assert not codec.fits((64,))
    assert not codec.fits((8, 8))
    assert not codec.fits((0, 64))
    assert codec.fits((8, 16))
    assert not codec.fits((6, 12))  # exactly twice as small is not enough


def test_factors_of_16_bits_neither_overflow_nor_vanish() -> None:
    for scale in (1e-4, 1.0, 1e3):
        team = Team("powersgd:rank=30,gain=0,cast=fp16", SHAPES, 4)
        (gradient,) = team.gradients(0, scale)[0]
        (out,) = team.step([[gradient]] * 4)
        assert float((out - gradient).norm() / gradient.norm()) < 5e-3
