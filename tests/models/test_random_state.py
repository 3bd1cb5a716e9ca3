"""Tests that random generators go on where they were."""

import random

import numpy
import torch

from hybridpar.models.random_state import random_state, restore_random_state, same_random


def draw():
    return random.random(), float(numpy.random.rand()), float(torch.rand(())), random.gauss(0, 1), numpy.random.randn()


def test_every_generator_goes_on_where_it_was(tmp_path):
    draw()
    random.gauss(0, 1)  # one of a pair; the other half is part of the state
    torch.save(random_state(), tmp_path / "state.pt")
    with same_random():
        expected = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] == expected
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected
