"""Tests the codec DGC (deep gradient compression): momentum correction, warm-up of the rate, clipping, options.

DGC replaces the optimizer's momentum; a wrong factor there makes training slow without an error.
"""

from __future__ import annotations

import pytest
import torch

from hybridpar.compress import TensorSpec, check_optimizer, parse_codec
from hybridpar.compress.codecs.dgc import DeepGradient, MomentumCoder
from hybridpar.errors import CheckpointError, UsageError
from hybridpar.sync.policy import check_compression
from tests.compress.team import Team, same_bits

#: For tests/compress/test_every_codec.py: each option of the codec with another value than its own.
VARIANTS = (
    "dgc:ramp=1,rate=0.05,least=1,momentum=0.5",
    "dgc:ramp=0,clip=1,cast=bf16",
)

SHAPES = {"w": (40, 50)}


def test_it_is_the_paper() -> None:
    """Algorithm 4: momentum correction, accumulation, and both cleared where something was sent."""
    team = Team("dgc:rate=0.05,ramp=0", SHAPES, 2)
    momentum, unsent = torch.zeros(2, 2000), torch.zeros(2, 2000)
    for seed in range(5):
        gradients = team.gradients(seed)
        total = torch.zeros(2000)
        for rank, (gradient,) in enumerate(gradients):
            momentum[rank] = 0.9 * momentum[rank] + gradient
            unsent[rank] += momentum[rank]
            places = unsent[rank].abs().argsort(descending=True)[:100]
            total[places] += unsent[rank, places] / 2
            unsent[rank, places] = momentum[rank, places] = 0
        torch.testing.assert_close(team.step(gradients)[0], total, rtol=0, atol=1e-5)
    for rank, coder in enumerate(team.coders("w")):
        torch.testing.assert_close(coder.state_dict()["unsent"], unsent[rank], rtol=0, atol=1e-5)
        torch.testing.assert_close(coder.state_dict()["momentum"], momentum[rank], rtol=0, atol=1e-5)


def test_all_sent_is_momentum_sgd() -> None:
    """Small parameters go in full, with the momentum that the optimizer does not have."""
    team = Team("dgc", {"bias": (30,)}, 2)
    weight = torch.nn.Parameter(torch.zeros(30))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    other = torch.zeros(30)
    for seed in range(5):
        gradients = team.gradients(seed)
        weight.grad = (gradients[0][0] + gradients[1][0]) / 2
        optimizer.step()
        other -= 0.1 * team.step(gradients)[0]
    torch.testing.assert_close(other, weight.detach())


def test_without_momentum_nothing_is_lost() -> None:
    team = Team("dgc:momentum=0,rate=0.02,ramp=2", SHAPES, 2)
    gone, came = torch.zeros(2000, dtype=torch.float64), torch.zeros(2000, dtype=torch.float64)
    for seed in range(6):
        gradients = team.gradients(seed)
        gone += gradients[0][0].double() + gradients[1][0].double()
        came += 2 * team.step(gradients)[0].double()
    kept = sum(coder.state_dict()["unsent"].double() for coder in team.coders("w"))
    torch.testing.assert_close(came + kept, gone, rtol=0, atol=1e-4)


def test_the_share_falls_as_in_the_paper_and_goes_on_where_it_was() -> None:
    team = Team("dgc:ramp=2", SHAPES, 1)
    (coder,) = team.coders("w")
    assert isinstance(coder, MomentumCoder)
    shares = []
    for seed in range(11):
        shares.append(coder.rate)
        team.step(team.gradients(seed))
        if seed == 4:  # a step that does not count is no step of the warm-up
            team.meet(team.gradients(99))
            team.rollback()
            again = Team("dgc:ramp=2", SHAPES, 1)
            again.restore(team.state())
            (coder,) = again.coders("w")
            assert isinstance(coder, MomentumCoder)
            team = again
    assert [1 - share for share in shares[::2]] == pytest.approx(
        [0.75, 0.9375, 0.984375, 0.996, 0.999, 0.999], abs=1e-4
    )
    assert shares[0] == shares[1]


@pytest.mark.parametrize("workers", [1, 4])
def test_long_gradients_are_shortened_by_the_root_of_the_workers(workers: int) -> None:
    team, plain = Team("dgc:clip=2,ramp=0", SHAPES, workers), Team("dgc:ramp=0", SHAPES, workers)
    gradients = team.gradients(0)
    limit = 2 / workers**0.5
    expected = [[gradient * (limit / gradient.norm())] for (gradient,) in gradients]
    torch.testing.assert_close(team.step(gradients)[0], plain.step(expected)[0])
    short = [[gradient * 1e-3] for (gradient,) in gradients]
    team, plain = Team("dgc:clip=2,ramp=0", SHAPES, workers), Team("dgc:ramp=0", SHAPES, workers)
    assert same_bits(team.step(short)[0], plain.step(short)[0])


def test_an_optimizer_with_momentum_is_refused_and_told_which() -> None:
    weight = [torch.nn.Parameter(torch.zeros(3))]
    sgd = torch.optim.SGD(weight, lr=0.1, momentum=0.9)
    for text in ("dgc", "dgc:cast=bf16"):
        assert parse_codec(text).refuses_momentum
        with pytest.raises(UsageError, match=r"momentum=0\.9 in SGD") as caught:
            check_optimizer(parse_codec(text), sgd)
        assert "Set momentum=0 in SGD (--momentum 0)" in caught.value.fix
    with pytest.raises(UsageError, match=r"AdamW, whose betas"):
        check_compression("dgc", [], 2, [torch.optim.AdamW(weight)])
    check_compression("dgc", [], 2, [torch.optim.SGD(weight, lr=0.1)])
    for text in ("onebit", "none", "topk:cast=bf16"):
        check_compression(text, [], 2, [sgd])


def test_error_feedback_around_it_is_refused() -> None:
    for text in ("dgc:feedback=on", "signsgd:feedback=on", "terngrad:feedback=on"):
        with pytest.raises(UsageError, match="with error feedback"):
            parse_codec(text)


def test_state_of_other_options_is_refused() -> None:
    spec = TensorSpec("w", (40, 50))
    state = DeepGradient(least=10_000).bind(spec).state_dict()
    with pytest.raises(CheckpointError, match="has 0 elements, and 2000 are needed"):
        DeepGradient().bind(spec).load_state_dict(state)
