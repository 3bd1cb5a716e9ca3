"""What runs inside of the contexts leaves a model, and random generators, as they were; twins share nothing."""

from __future__ import annotations

import random
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hybridpar.models.state import random_state, restore_random_state, same_attributes, same_random, twin_of, untouched
from hybridpar.partition.changes import python_random_state
from tests.partition.nets import ROWS


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1), np.random.randn()


def test_every_generator_goes_on_where_it_was(tmp_path):
    draw()
    random.gauss(0, 1)  # one of a pair; the other half is part of the state
    torch.save(random_state(), tmp_path / "state.pt")
    with same_random():
        expected = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] == expected
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected


class Restless(nn.Module):
    """Changes Python attributes of every kind in its forward pass."""

    class Meter:
        def __init__(self) -> None:
            self.count, self.seen = 0, [1.0]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.count, self.names, self.cache, self.queue = 0, ["a"], {"a": [1]}, deque([1, 2], maxlen=3)
        self.seen, self.table, self.plain = {1}, np.zeros(3), torch.zeros(3)
        self.meter, self.numbers, self.dice = self.Meter(), np.random.default_rng(0), random.Random(0)
        self.register_buffer("buffer", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.names.append("b")
        self.cache["a"].append(2)
        self.cache["b"] = []
        self.queue.append(3)
        self.seen.add(self.count)
        self.table += 1
        self.plain.add_(1)
        self.meter.count += 1
        self.meter.seen.append(2.0)
        self.meter.new = True
        self.numbers.random()
        self.dice.random()
        random.random()
        np.random.rand()
        self.added = x.detach()
        self.buffer = self.buffer + 1
        self.linear.weight.data = self.linear.weight.data * 2
        return self.linear(x) + torch.rand(6)


def snapshot(model: nn.Module) -> list[Any]:
    inner = model.get_submodule("1")
    plain = {
        name: repr(value)
        for name, value in vars(inner).items()
        if not name.startswith("_") and name not in ("meter", "numbers", "dice")
    }
    generators = repr(inner.numbers.bit_generator.state), inner.dice.getstate(), python_random_state()
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    memory = [one.data_ptr() for one in (*model.parameters(), *model.buffers())]
    return [plain, repr(vars(inner.meter)), generators, torch.get_rng_state().tolist(), state, memory]


def restless() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Restless(), nn.Linear(6, 2))


def test_what_runs_inside_leaves_no_attribute_changed() -> None:
    model = restless()
    inner, before = model[1], snapshot(model)
    held = inner.names, inner.cache, inner.meter, inner.buffer
    with untouched(model, training=True):
        model(torch.randn(*ROWS)).sum().backward()
        inner.linear.bias.data.add_(1)
        assert snapshot(model) != before
    assert snapshot(model) == before
    assert all(
        one is other for one, other in zip(held, (inner.names, inner.cache, inner.meter, inner.buffer), strict=True)
    )
    assert all(one.grad is None for one in model.parameters())


def test_copies_share_memory_as_the_model_does() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = nn.Parameter(model[0].weight.data)
    part = model[0].weight.detach()[:2]
    with untouched(model) as copied:
        model[0].weight.data.fill_(3)
        assert bool((model[1].weight == 3).all())
        assert not bool((part == 3).any())
        again = copied(part)
        model[0].weight.data.fill_(4)
        assert bool((again == 4).all())
    assert not bool((model[0].weight == 4).any())


class Rows:
    """Counts, and cannot be copied as it is."""

    def __init__(self) -> None:
        self.lock, self.rows = threading.Lock(), []

    def add(self, *_: object) -> None:
        self.rows.append(1)


@pytest.mark.parametrize("context", [untouched, same_attributes])
def test_what_is_beside_something_that_cannot_be_copied_is_copied(context: Any) -> None:
    model = nn.Linear(6, 6)
    rows, seen = Rows(), [(torch.ones(6, requires_grad=True) * 2).as_subclass(Labelled), Rows().lock]
    model.rows, model.seen, model.label, model.deep = rows, seen, seen[0], {"a": [rows, Unique()]}
    model.register_forward_hook(rows.add)
    with context(model):
        model(torch.randn(*ROWS))
        assert model.rows.rows == [1]
        assert model.deep["a"][0] is model.rows
        model.rows.add()
        model.seen.append(1)
        model.deep["a"].append(1)
    assert (rows.rows, len(seen), len(model.deep["a"])) == ([], 2, 2)


class Labelled(Tensor):
    pass


class Unique:
    def __reduce__(self) -> Any:
        raise TypeError("there is only this")


def test_a_twin_shares_what_cannot_be_copied() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    rows = model[0].rows = Rows()
    model[0].layers, model[0].weight.gain = [model[1], rows], 2.0
    model[1].register_forward_hook(rows.add)
    twin = twin_of(model)
    twin(torch.randn(*ROWS))
    assert (rows.rows, twin[0].rows.rows) == ([], [1])
    assert twin[0].rows.lock is rows.lock
    assert twin[0].layers == [twin[1], twin[0].rows]
    assert twin[0].weight.gain == 2.0
    assert twin[0].weight is not model[0].weight


def test_a_twin_of_a_traced_part_shares_nothing() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    model = nn.Sequential(nn.Linear(6, 6), traced)
    twin, x = twin_of(model), torch.randn(*ROWS)
    assert torch.equal(twin(x), model(x))
    addresses = [{one.data_ptr() for one in each.state_dict().values()} for each in (model, twin)]
    assert addresses[0].isdisjoint(addresses[1])
