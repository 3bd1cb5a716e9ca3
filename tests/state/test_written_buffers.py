"""Buffers that forward writes into without a mark, and reads where autograd saves them for the backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.errors import TraceError, UsageError
from tests.ranks import run_ranks
from tests.state.cases import draw
from tests.state.pieces import WIDTH
from tests.state.plain_loop import differences, plain_loop, with_trainer

PLAIN = replace(
    draw(0),
    joining="sequential",
    recompute=(),
    batch_norm="local",
    optimizer="sgd",
    clip_norm=None,
    sizes=(9,) * 4,
    frozen=0.0,
    in_evaluation=0.0,
    bad_step=None,
    tested=False,
)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "piece",
    [
        "norm_in_both_modes",
        "norm_by_function",
        "statistics_by_function",
        "statistics_shared",
        "scale_written_by_data",
        "buffer_shared_by_data",
        "buffer_expanded",
        "view_of_a_buffer",
    ],
)
def test_each_micro_batch_sees_what_it_would_in_a_plain_loop(piece: str, schedule: str) -> None:
    layout = {"stages": 2, "micro_batches": 3, "placement": "linear", "schedule": schedule}
    case = replace(PLAIN, pieces=(piece, "linear", "tanh"), **layout)  # type: ignore[arg-type]
    found = with_trainer(case)
    assert found.refused is None
    assert differences(case, plain_loop(case), found) == []


def train(net: nn.Module, *, poisoned: bool = False, **options: object) -> None:
    x = torch.randn(6, WIDTH).masked_fill_(torch.tensor(poisoned), torch.nan)
    config = TrainConfig(plan="none", micro_batches=2, **options)  # type: ignore[arg-type]
    with Trainer(net, config=config, example=x[:3].nan_to_num()) as trainer:
        trainer.step((x, torch.arange(6) % 5))


@pytest.mark.parametrize("stages", [1, 2])
def test_norms_that_share_statistics_are_not_pooled(stages: int) -> None:
    net = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5))
    net[2].running_var = net[0].running_var
    with pytest.raises(UsageError, match="the BatchNorm layers '0' and '2' share running statistics"):
        train(net, stages=stages)
    train(net, stages=stages, batch_norm="local")


class AssignsExpanded(nn.Module):
    """Its forward assigns a buffer whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones(1).expand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = (x.detach().abs().mean() + 1).expand(WIDTH)
        return x / self.scale


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_an_expanded_buffer_goes_through_a_step(stages: int, poisoned: bool) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), AssignsExpanded(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5))
    train(net, stages=stages, poisoned=poisoned)


def on_two_workers(world: World) -> str:
    net = nn.Linear(WIDTH, 5)
    net.register_buffer("scale", torch.ones(1).expand(WIDTH))
    try:
        Trainer(net, config=TrainConfig(plan="none"), world=world)
    except UsageError as error:
        return error.what
    return ""


def test_workers_refuse_an_expanded_buffer() -> None:
    message = "the elements of the buffer 'scale' share memory: it is an expanded tensor"
    assert run_ranks(on_two_workers, 2) == [message] * 2


class Aside(nn.Module):
    """An attribute is a view of a buffer, which each pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones(WIDTH))
        self.parts = [self.scale[:1]]

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(1.1)
        return x * self.parts[0].clone()


def test_an_attribute_that_shares_memory_with_a_written_buffer_is_refused() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Aside(), nn.Linear(WIDTH, 5))
    with pytest.raises(TraceError, match=r"because of '1\.scale': forward writes into it, and an attribute"):
        train(net, stages=2)
    train(net)
