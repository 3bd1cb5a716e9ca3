"""The passes of single stages, without lanes or schedules; whole pipelines are in tests/pipeline/test_executor.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpar.pipeline.stage_module import consumers_of
from hybridpar.pipeline.stage_run import Mailbox, StageRun
from tests.pipeline.oracle import Residuals, cut, images, seeded


def no_norm() -> nn.Module:
    return Residuals(norm=False)


def make_runs(model: nn.Module, stages: int, *, recompute: bool = False) -> tuple[list[StageRun], Mailbox]:
    parts, mailbox = cut(model, images(2)[0], stages), Mailbox()
    runs = [
        StageRun(
            part,
            consumers_of(parts, part.index),
            mailbox,
            loss=F.cross_entropy if part is parts[-1] else None,
            recompute=recompute,
        )
        for part in parts
    ]
    for run in runs:
        run.start_step(1)
    return runs, mailbox


def keep(*tensors: Tensor) -> None:
    assert all(isinstance(tensor, Tensor) for tensor in tensors)


def forward(runs: list[StageRun], index: int, x: Tensor, y: Tensor, share: float) -> None:
    for run in runs:
        run.forward(index, {"x": x}, y, lambda: share, keep)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_stage_by_stage_is_the_whole_model(recompute: bool) -> None:
    model, whole = seeded(no_norm), seeded(no_norm)
    runs, mailbox = make_runs(model, 3, recompute=recompute)
    x, y = images(4)
    for index in range(2):
        forward(runs, index, x[2 * index : 2 * index + 2], y[2 * index : 2 * index + 2], 0.5)
    assert [run.in_flight for run in runs] == [2, 2, 2]
    for index in range(2):
        for run in reversed(runs):
            run.backward(index, keep)
    loss = F.cross_entropy(whole(x), y)
    loss.backward()
    torch.testing.assert_close(runs[-1].loss_sum, loss.detach().double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(model), gradients(whole), rtol=1e-4, atol=1e-6)
    # Nothing is left behind.
    assert [run.in_flight for run in runs] == [0, 0, 0]
    assert not mailbox.values
    assert not mailbox.gradients


def test_a_step_that_was_given_up_leaves_nothing() -> None:
    runs, _ = make_runs(seeded(no_norm), 2)
    forward(runs, 0, *images(2), 1.0)
    assert runs[1].loss_sum is not None
    for run in runs:
        run.start_step(2)
        assert (run.in_flight, run.loss_sum) == (0, None)
        with pytest.raises(KeyError):
            run.backward(0, keep)
