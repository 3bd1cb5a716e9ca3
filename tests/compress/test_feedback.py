"""Tests error feedback: residuals, decay, warm-up, learning rate, and state.

Biased codecs need it to converge, and a residual that is slightly wrong is not noticed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridpar.compress import parse_codec
from hybridpar.compress.feedback import FeedbackCoder, KeptResidual, lay_together, stacked
from hybridpar.errors import CheckpointError, UsageError
from tests.compress.team import Team, equal, same_bits

SHAPES = {"w": (8, 40)}


def coder_of(team: Team, rank: int = 0) -> FeedbackCoder:
    coder = team.coders("w")[rank]
    assert isinstance(coder, FeedbackCoder)
    return coder


def residual(team: Team) -> Tensor:
    return coder_of(team).residual("worker").clone()


def test_what_is_left_out_is_left_out_of_the_sum_of_gradient_and_residual() -> None:
    team = Team("onebit", SHAPES, 1)
    (gradient,) = team.gradients(0)[0]
    team.step([[gradient]])
    first = residual(team)
    team.step([[gradient]])
    alone = Team("onebit", SHAPES, 1)
    alone.step([[gradient + first]])
    assert same_bits(residual(team), residual(alone))


def test_decay_damps_what_was_kept() -> None:
    team = Team("onebit:decay=0.5", SHAPES, 1)
    (gradient,) = team.gradients(0)[0]
    team.step([[gradient]])
    kept = residual(team)
    team.step([[gradient]])
    alone = Team("onebit", SHAPES, 1)
    alone.step([[gradient + 0.5 * kept]])
    torch.testing.assert_close(residual(team), residual(alone))


def test_warm_up_is_full_precision_and_then_it_ends() -> None:
    team, plain = Team("onebit:warmup=2", SHAPES, 3), Team("none", SHAPES, 3)
    full = plain.exchanges[0].traffic
    for seed in range(2):
        assert team.exchanges[0].traffic == full
        gradients = team.gradients(seed)
        assert same_bits(team.step(gradients)[0], plain.step(gradients)[0])
        assert not residual(team).any()
    assert team.exchanges[0].traffic.payload < full.payload / 2
    gradients = team.gradients(2)
    assert same_bits(team.step(gradients)[0], Team("onebit", SHAPES, 3).step(gradients)[0])


def test_a_step_that_does_not_count_is_no_step_of_the_warm_up() -> None:
    team = Team("onebit:warmup=1", SHAPES, 2)
    full = team.exchanges[0].traffic
    team.meet(team.gradients(0))
    team.rollback()
    assert team.exchanges[0].traffic == full


def test_residuals_follow_the_learning_rate() -> None:
    team = Team("onebit:rescale=on", SHAPES, 1)
    (gradient,) = team.gradients(0)[0]
    coder_of(team).rescale(0.4)
    team.step([[gradient]])
    kept = residual(team)
    coder_of(team).rescale(0.1)
    team.meet([[gradient]])
    team.rollback()  # the rate of a step that did not count is forgotten, too
    team.step([[gradient]])
    alone = Team("onebit", SHAPES, 1)
    alone.step([[gradient + 4 * kept]])
    torch.testing.assert_close(residual(team), residual(alone))
    assert coder_of(team).state_dict()["learning_rate"] == 0.1


def test_a_learning_rate_of_zero_moves_nothing() -> None:
    team, other = Team("onebit:rescale=on", SHAPES, 1), Team("onebit", SHAPES, 1)
    for rate, seed in ((0.1, 0), (0.0, 1), (0.1, 2)):
        coder_of(team).rescale(rate)
        team.step(team.gradients(seed))
        other.step(other.gradients(seed))
    assert same_bits(residual(team), residual(other))


def test_without_the_option_the_learning_rate_changes_nothing() -> None:
    team, other = Team("onebit", SHAPES, 1), Team("onebit", SHAPES, 1)
    for seed in range(3):
        coder_of(team).rescale(10.0**-seed)
        team.step(team.gradients(seed))
        other.step(other.gradients(seed))
    assert same_bits(residual(team), residual(other))


def test_a_parameter_that_nobody_used_keeps_its_residual() -> None:
    team = Team("onebit", {"w": (8, 40), "v": (4, 50)}, 2)
    team.step(team.gradients(0))
    before = team.snapshot()
    gradients = team.gradients(1)
    for own in gradients:
        own[0].zero_()
    team.meet(gradients)
    for exchange in team.exchanges:
        exchange.commit(unused={"w"})
    after = team.snapshot()
    for left, right in zip(before, after, strict=True):
        assert equal(left["w"], right["w"])
        assert not equal(left["v"], right["v"])


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("workers", [1, 3])
def test_residuals_in_bfloat16_are_those_in_float32_rounded(
    kernels: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "off":
        monkeypatch.setattr("hybridpar.compress.kernels.table", lambda _device=None: None)
    short, full = (Team(f"onebit:meet=shard{more}", {"w": (37, 83)}, workers) for more in (",residual=bf16", ""))
    keys = ["worker", "owner"]
    for seed in range(3):
        gradients = short.gradients(seed)
        out = short.step(gradients)[0][0]
        assert equal_up_to(out, full.step(gradients)[0][0])
        pairs = [(coder_of(short, rank), coder_of(full, rank)) for rank in range(workers)]
        for one, other in pairs:
            for key in keys:
                assert one.residual(key).dtype == torch.bfloat16
                torch.testing.assert_close(one.residual(key).float(), other.residual(key), rtol=2**-8, atol=1e-6)
                other.residual(key).copy_(one.residual(key))  # so that the next step begins alike
        before = [one.residual("worker").clone() for one, _ in pairs]
        short.meet(short.gradients(seed + 100))
        short.rollback()
        assert all(torch.equal(kept, one.residual("worker")) for kept, (one, _) in zip(before, pairs, strict=True))


def equal_up_to(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_residuals_in_an_unknown_type_are_refused() -> None:
    with pytest.raises(UsageError, match="residual=bf17"):
        parse_codec("onebit:residual=bf17")


def test_residuals_are_moved_together_and_keep_what_they_keep() -> None:
    residuals = [KeptResidual.zeros(6, torch.device("cpu")) for _ in range(3)]
    for number, one in enumerate(residuals):
        one.kept.fill_(number)
    lay_together(residuals)
    for half in ("kept", "pending"):
        together = stacked([getattr(one, half) for one in residuals])
        assert together is not None
        together[1, 2] = 9
        assert getattr(residuals[1], half)[2] == 9
    assert [float(one.kept[0]) for one in residuals] == [0, 1, 2]
    before = [one.kept for one in residuals]
    for one in residuals:
        one.commit()
    lay_together(residuals)
    assert all(one.pending is kept for one, kept in zip(residuals, before, strict=True)), "moved once more"
    residuals[1].commit()
    lay_together(residuals)
    assert stacked([one.kept for one in residuals]) is not None
    assert residuals[1].kept.tolist() == [1, 1, 9, 1, 1, 1]


def test_what_lies_at_equal_distances_is_stacked() -> None:
    memory = torch.arange(30.0)
    pieces = [memory[start : start + 6].view(2, 3) for start in (1, 9, 17)]
    together = stacked(pieces)
    assert together is not None
    assert together.data_ptr() == pieces[0].data_ptr()
    assert torch.equal(together, torch.stack(pieces))
    assert stacked([pieces[0], pieces[2], pieces[1]]) is None
    assert stacked([pieces[0], pieces[1].clone()]) is None
    assert stacked([pieces[0], pieces[1].t().contiguous().t()]) is None
    alone = stacked(pieces[:1])
    assert alone is not None
    assert alone.shape == (1, 2, 3)


def test_state_of_another_size_is_refused_and_nothing_is_taken_over() -> None:
    team, other = Team("onebit", SHAPES, 2), Team("onebit", SHAPES, 3)
    team.step(team.gradients(0))
    other.step(other.gradients(1))
    before = other.snapshot()
    with pytest.raises(CheckpointError, match="the number of workers"):
        other.coders("w")[0].load_state_dict(team.coders("w")[0].state_dict())
    assert equal(other.snapshot(), before)


def test_error_feedback_pays() -> None:
    """Workers that always say the same are heard right on average with feedback, and wrong for ever without."""

    def error(text: str, steps: int) -> float:
        team = Team(text, SHAPES, 3)
        gradients = team.gradients(0)
        mean = (gradients[0][0] + gradients[1][0] + gradients[2][0]) / 3
        came = torch.zeros(320)
        for _ in range(steps):
            came += team.step(gradients)[0]
        return float((came / steps - mean).norm() / mean.norm())

    assert error("onebit:feedback=off", 12) == pytest.approx(error("onebit:feedback=off", 6))
    short, long = error("onebit", 10), error("onebit", 100)
    assert long < short / 5
    assert long < error("onebit:feedback=off", 6) / 5


def test_every_text_says_whether_it_feeds_back() -> None:
    assert parse_codec("onebit").stateful
    assert not parse_codec("onebit:feedback=off").stateful
