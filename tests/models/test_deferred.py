"""Models without memory: their initial values, where they are filled, are those of the whole model, bit for bit."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hybridpar import TrainConfig, Trainer
from hybridpar.comm.world import World
from hybridpar.errors import UsageError
from hybridpar.models import build_model, model_names
from hybridpar.models.deferred import DeferredModel, imagined, is_deferred, named_tensors
from tests.ranks import run_ranks

#: One of each way of initialising: kaiming, torch's `trunc_normal_` with its loop and tables of indices, timm's own.
FEW = ("mobilenet_v3_small", "swin_t", "googlenet", "timm/deit_tiny_patch16_224")

TIMM = (
    *("beit_base_patch16_224", "convnext_tiny", "deit_tiny_patch16_224", "efficientnet_b0", "levit_128s"),
    *("maxvit_tiny_rw_224", "mixer_s32_224", "mobilevit_s", "pvt_v2_b0", "regnety_002", "resnest14d"),
)


def check(factory: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    real = {name: held[key] for name, held, key in named_tensors(factory())}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    deferred = DeferredModel(factory)
    assert all(held[key].is_meta for name, held, key in named_tensors(deferred.module))
    assert [name for name, _, _ in named_tensors(deferred.module)] == list(real)
    own = list(real)[len(real) // 3 : 2 * len(real) // 3]
    deferred.fill(own)
    assert torch.equal(torch.get_rng_state(), before)
    filled = {name: held[key] for name, held, key in named_tensors(deferred.module) if not held[key].is_meta}
    tied = {id(filled[name]) for name in own}
    assert {name for name, tensor in filled.items() if id(tensor) in tied} == filled.keys()
    for name in own:
        assert torch.equal(filled[name], real[name]), name


@pytest.mark.parametrize("name", FEW)
def test_a_part_of_a_model_begins_as_in_the_whole_one(name: str) -> None:
    check(lambda: build_model(name, 10))


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*model_names(), *(f"timm/{name}" for name in TIMM)])
def test_a_part_of_every_model_begins_as_in_the_whole_one(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(lambda: build_model(name, 10))


def test_options_that_need_the_whole_model_are_refused() -> None:
    deferred = DeferredModel(lambda: nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10)))
    with pytest.raises(UsageError, match="a DeferredModel with --compress auto"):
        Trainer(deferred, config=TrainConfig(stages=2, compress="auto"), example=torch.randn(2, 100))


class Copies(nn.Module):
    """Large tensors made of others, tied ones, and one that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        side = 80
        drawn = torch.randn(side, side)
        self.first = nn.Parameter(torch.cat([drawn * 2, torch.rand(side, side)]))
        self.second = nn.Linear(side, side)
        with torch.no_grad():
            self.second.weight.copy_(self.first[:side])
        self.third = nn.Linear(side, side)
        nn.init.orthogonal_(self.third.weight)
        self.third.weight.data[:, 3].normal_()
        self.fourth = nn.Linear(side, side)
        self.fourth.weight = self.third.weight
        self.plain = torch.empty(side, side).bernoulli_(0.3)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 5)]
        nn.init.sparse_(self.second.weight, 0.1)


def test_tensors_made_of_others() -> None:
    check(Copies)
    torch.manual_seed(3)
    real = Copies()
    torch.manual_seed(3)
    deferred = DeferredModel(Copies)
    deferred.fill(["second.weight", "plain", "fourth.weight"])
    module = deferred.module
    assert isinstance(module, Copies)
    assert module.fourth.weight is module.third.weight
    assert torch.equal(module.second.weight, real.second.weight)
    assert torch.equal(module.plain, real.plain)
    assert torch.equal(module.third.weight, real.third.weight)
    assert module.first.is_meta
    assert is_deferred(module)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, 100))
        self.scale = float(self.weight.norm())


def test_a_constructor_may_read_its_tensors() -> None:
    check(lambda: nn.Sequential(nn.Linear(3, 3), Reads()))


class Hides(nn.Linear):
    def __init__(self) -> None:
        super().__init__(100, 100)
        self.all = [self.weight]


class Shares(nn.Linear):
    def __init__(self) -> None:
        super().__init__(100, 100)
        self.row = self.weight.detach()[0]


@pytest.mark.parametrize(("kind", "said"), [(Hides, "in a list or dictionary, too, 0.all"), (Shares, "shares memory")])
def test_tensors_that_would_be_lost_are_named(kind: type[nn.Module], said: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(UsageError, match=said):
        DeferredModel(lambda: nn.Sequential(kind()))
    assert torch.equal(torch.get_rng_state(), before)


def build_in_turn(world: World) -> list[float]:
    """Build and fill a model, and note when that was."""
    times: list[float] = []

    def build() -> nn.Module:
        times.append(time.monotonic())
        time.sleep(0.2)
        times.append(time.monotonic())
        return nn.Linear(3, 3)

    world.barrier()
    DeferredModel(build).fill(["weight"])
    return times


def test_the_workers_of_a_host_build_one_after_the_other() -> None:
    times = list(itertools.chain(*run_ranks(build_in_turn, 3)))
    spans = sorted(zip(times[::2], times[1::2], strict=True))
    assert all(ended <= begun for (_, ended), (begun, _) in itertools.pairwise(spans))
    assert len(spans) == 6


def test_it_runs_without_memory() -> None:
    deferred = DeferredModel(lambda: build_model("resnet18", 10))
    with imagined(deferred.module, torch.device("cpu")) as mode, torch.autocast("cpu", torch.bfloat16):
        output = deferred.module(mode.from_tensor(torch.zeros(2, 3, 64, 64)))
    assert output.shape == (2, 10)
    assert output.dtype == torch.bfloat16
    assert output.device.type == "cpu"
    assert is_deferred(deferred.module)
