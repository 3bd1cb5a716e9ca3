"""The codecs of examples/codecs: each is one file, which is imported and then used by its name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hybridpar
from hybridpar.comm.world import World
from hybridpar.compress import CODECS, parse_codec
from hybridpar.planner.rates import lasting_rounds
from tests.compress import test_every_codec
from tests.compress.test_ddp import batch, net, weights
from tests.ranks import run_ranks

FOLDER = Path(__file__).parents[2] / "examples" / "codecs"
TEXTS = ("dgc:rate=0.05,ramp=5,momentum=0.5", "demo:rate=0.05,momentum=0.5,chunk=16")


@contextmanager
def registered(text: str) -> Iterator[None]:
    """Import the file, and forget its codec afterwards: other tests use the same processes."""
    name = text.partition(":")[0]
    specification = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(specification)  # dataclasses look their module up
    specification.loader.exec_module(module)
    try:
        yield
    finally:
        del CODECS._entries[name], sys.modules[name]


def trained(world: World, text: str) -> tuple[list[float], float, Tensor]:
    """Losses of 40 steps on the same samples, the share of the bytes that was sent in the last one, and weights."""
    images, labels = batch(world.rank, 0)
    with registered(text):
        model = hybridpar.DataParallel(net(), compress=text, seed=3)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), list[float]()
        for _ in range(40):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert model.compression is not None
        sent = model.compression.traffic.payload / (4 * sum(one.numel() for one in model.parameters()))
        model.close()
        return losses, sent, weights(model.module)


@pytest.mark.parametrize("text", TEXTS)
def test_two_workers_train_by_its_name(text: str) -> None:
    one, other = run_ranks(trained, 2, text)
    assert one[1] < 0.25
    for losses, _, _ in (one, other):
        assert losses[-1] < 0.7 * losses[0]
    assert torch.equal(one[2], other[2])


def kept(_world: World, text: str) -> None:
    with registered(text):
        assert sum(entry.bytes for entry in lasting_rounds(parse_codec(text), (64, 64), 2)) > 0, "known before a step"
        test_every_codec.test_a_bad_number_is_seen_by_all_and_can_be_taken_back(text)
        test_every_codec.test_state_is_saved_and_restored(text)


@pytest.mark.parametrize("text", TEXTS)
def test_it_keeps_to_the_contract(text: str) -> None:
    run_ranks(kept, 1, text)
