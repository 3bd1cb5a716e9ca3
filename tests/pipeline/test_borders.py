"""What crosses the borders of stages: shapes, gradients, and the bytes that stages keep."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpar.errors import ScheduleError, UsageError
from hybridpar.partition.stage import Stage
from hybridpar.pipeline.borders import BorderTable
from tests.pipeline.oracle import (
    Dense,
    Detached,
    Frozen,
    Ignored,
    Residuals,
    cut,
    first_output,
    images,
    options_of,
    places,
    seeded,
)


def table_of(model: nn.Module, stages: int = 3, loss: Any = F.cross_entropy, **options: Any) -> BorderTable:
    parts: list[Stage] = cut(model, images(2)[0], stages)
    return BorderTable(parts, parts, options_of(places(stages), 2, **options), loss, nullcontext)


def facts_of(table: BorderTable, samples: int = 2) -> Any:
    x, y = images(samples)
    return table.at({"x": x}, y)


def test_every_size_is_run_once() -> None:
    model = seeded(Residuals)
    calls: list[int] = []
    model.stem.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    table = table_of(model)
    calls.clear()
    for samples in (2, 3, 2, 3):
        for part in facts_of(table, samples).parts.values():
            assert part.shape[0] == samples
    assert calls == [2, 3]
    assert table.first is facts_of(table, 2)


def test_the_run_leaves_no_trace() -> None:
    model = seeded(lambda: Residuals(dropout=0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = table_of(model)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    facts_of(table)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("make", [Residuals, Dense])
def test_edges_carry_what_later_stages_use(make: Any) -> None:
    table = table_of(seeded(make), 4)
    facts = facts_of(table)
    edges = {(edge.source, edge.target): edge for edge in table.edges(facts)}
    assert {(0, 1), (1, 2), (2, 3)} <= edges.keys()
    assert any(target > source + 1 for source, target in edges)  # an identity or a dense tensor skips stages
    for (source, target), edge in edges.items():
        names = table.names(source, target)
        assert edge.bytes == sum(facts.bytes_of(name) for name in names)
        assert edge.gradient_bytes == sum(facts.bytes_of(name) for name in names if name in facts.gradients)


def test_gradients_come_back_only_where_something_is_trained_and_used() -> None:
    everything = facts_of(table_of(seeded(Residuals)))
    assert everything.gradients == everything.parts.keys()
    frozen = facts_of(table_of(seeded(Frozen), 4))
    assert frozen.gradients < frozen.parts.keys()
    assert "stem" not in frozen.gradients
    for make, loss in ((Detached, F.cross_entropy), (Ignored, first_output)):
        model = seeded(make)
        table = table_of(model, 3, loss)
        facts = facts_of(table)
        x, y = images(2)
        loss(model(x), y).backward()
        missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert missing
        assert facts.gradients < facts.parts.keys()


def test_what_is_thawed_after_the_cut_is_refused() -> None:
    model = seeded(Frozen)
    table = table_of(model, 4)
    facts_of(table)
    model.requires_grad_(True)
    table.follow_trainable()
    with pytest.raises(ScheduleError, match=r"needs a gradient now, and did not when the model was cut") as info:
        facts_of(table)
    assert "Thaw all parameters" in str(info.value)


def test_saved_bytes_grow_with_the_samples_and_recomputing_keeps_inputs_only() -> None:
    small, large = (facts_of(table_of(seeded(Residuals)), samples).saved_bytes for samples in (2, 4))
    assert all(0 < one < two < 2.5 * one for one, two in zip(small, large, strict=True))
    table = table_of(seeded(Residuals), recompute=(1,))
    again = facts_of(table).saved_bytes
    assert again[0] == small[0]
    facts = facts_of(table)
    assert again[1] == sum(facts.bytes_of(name) for name in table.names(0, 1)) < small[1]


def test_inputs_that_do_not_fit_are_refused() -> None:
    table = table_of(seeded(Residuals))
    with pytest.raises(UsageError, match=r"stage 0 cannot run on inputs of shape \(2, 5, 8, 8\)"):
        table.at({"x": torch.zeros(2, 5, 8, 8)}, images(2)[1])


def test_the_memory_format_travels_along() -> None:
    model = seeded(lambda: Residuals(norm=False)).to(memory_format=torch.channels_last)
    parts = cut(model, images(2)[0].to(memory_format=torch.channels_last), 2)
    table = BorderTable(parts, parts, options_of(places(2), 2), F.cross_entropy, nullcontext)
    x, y = images(2)
    last: Tensor = x.to(memory_format=torch.channels_last)
    assert all(part.channels_last for part in table.at({"x": last}, y).parts.values() if len(part.shape) == 4)
    waited: list[bool] = []
    for again in (last, x):
        table.at({"x": again}, y, wait=partial(waited.append, again is x))
    assert waited == [True], "the stages are run again for another format, once nobody uses them"
