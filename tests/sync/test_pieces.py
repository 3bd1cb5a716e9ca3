"""A step on gradients that are added up piece by piece equals one on whole sums, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hybridpar.compress import received
from hybridpar.compress.received import Sum
from hybridpar.sync.pieces import PIECE, Gradients, can_step
from tests.pipeline.oracle import step_optimizer

SIZES = [(5,), (16,), (3, 17), (8, 4, 3, 3), (PIECE + 37,)]

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd momentum decay": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "maximize": True}),
    "sgd nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.01}),
}


def gradients_of(parameters: list[nn.Parameter], workers: int, seed: int, factor: float | None = None) -> Gradients:
    """Gradients of some workers, not added up."""
    generator = torch.Generator().manual_seed(seed)
    offsets, end = {}, 0
    for parameter in parameters:
        offsets[parameter] = end
        end += -(-parameter.numel() // 16) * 16
    rows = torch.randn(workers, end, generator=generator)
    sums = {one: Sum([row[start : start + one.numel()] for row in rows]) for one, start in offsets.items()}
    return Gradients(dict(sums), None if factor is None else torch.tensor(factor), unmeasured=True)


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(size, generator=generator) for size in SIZES]
    tensors[3] = tensors[3].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(tensor) for tensor in tensors]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_equal_whole_gradients(name: str, workers: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(received, "functions", dict)
    elif name.startswith("sgd") and not received.functions():
        pytest.skip("no kernels on this machine")
    kind, options = OPTIMIZERS[name]
    ours, theirs = make_parameters(), make_parameters()
    mine, torchs = (
        kind([{"params": one[:2]}, {"params": one[2:], "lr": 0.05}], **options, fused=True) for one in (ours, theirs)
    )
    assert can_step(mine)
    for step in range(3):
        # In the second step one parameter has no gradient.
        used = slice(1, None) if step == 1 else slice(None)
        for parameter in theirs:
            parameter.grad = None
        expected = gradients_of(theirs[used], workers, step, 0.5).materialise()
        # Torch's fused SGD refuses momentum for some parameters only.
        torchs.step()
        measured = step_optimizer(mine, gradients_of(ours[used], workers, step, 0.5))
        assert all(parameter.grad is None for parameter in ours)
        assert measured is not None
        assert expected is not None
        assert measured.item() == pytest.approx(expected.item(), rel=1e-5)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
    assert str(mine.state_dict()["state"].keys()) == str(torchs.state_dict()["state"].keys())
    for one, other in zip(ours, theirs, strict=True):
        for key, value in torchs.state[other].items():
            assert torch.equal(mine.state[one][key], value), key


@pytest.mark.parametrize("name", ["sgd momentum", "adamw"])
def test_state_that_was_loaded_in_another_memory_format_keeps_its_elements(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    ours, theirs = make_parameters(), make_parameters()
    for parameters, contiguous in ((ours, True), (theirs, False)):
        optimizer = kind(parameters, **options, fused=True)
        step_optimizer(optimizer, gradients_of(parameters, 2, 1))
        if contiguous:
            for state in optimizer.state.values():
                state.update({key: one.contiguous() for key, one in state.items()})
        step_optimizer(optimizer, gradients_of(parameters, 2, 2))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_hooks_on_the_step_run() -> None:
    parameters = make_parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1, fused=True)
    norms: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(sum(one.grad is not None for one in parameters)))
    step_optimizer(optimizer, gradients_of(parameters, 2, 3))
    assert norms == [len(SIZES)]
