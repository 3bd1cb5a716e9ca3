"""Tests how norms and activations of a model are replaced by fused ones: names, state and results stay the same."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from hybridpar.errors import UsageError
from hybridpar.sync.batchnorm import BatchNormPool
from hybridpar.tvm_kernels import norm_swap
from hybridpar.tvm_kernels.norm_swap import NormPair, find_norms, fuse_norms, unfuse_norms
from tests.tvm_kernels.norms import error, images, step


class Pairs(nn.Module):
    """A convolution, a norm, an activation: twice."""

    def __init__(self, act: Callable[[], nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Conv2d(3, 3, 3, bias=False), nn.BatchNorm2d(3), act()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x))
        return result


def same(model: nn.Module, x: Tensor, change: Callable[[nn.Module], object], tolerance: float = 1e-5) -> nn.Module:
    """A changed copy of a model, which does what the model does."""
    other = copy.deepcopy(model)
    change(other)
    for training in (True, False):
        for one, two in zip(step(model.train(training), x), step(other.train(training), x), strict=True):
            torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)
    return other


@pytest.fixture(autouse=True)
def _every_norm_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_swap, "LEAST_VALUES", 0)


# ------------------------------------------------------------------------------------------------------------ finding


@pytest.mark.parametrize("name", ["mobilenet_v2", "efficientnet_b0", "resnet18", "densenet121"])
def test_what_is_found(name: str) -> None:
    model = getattr(models, name)(weights=None)
    found = find_norms(model)
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert sorted(pair.norm for pair in found) == sorted(norms)
    kinds = {kind: sum(pair.act == kind for pair in found) for kind in ("none", "relu", "relu6", "silu")}
    assert (
        kinds
        == {
            "mobilenet_v2": {"none": 17, "relu": 0, "relu6": 35, "silu": 0},
            "efficientnet_b0": {"none": 16, "relu": 0, "relu6": 0, "silu": 33},
            "resnet18": {"none": 19, "relu": 1, "relu6": 0, "silu": 0},
            "densenet121": {"none": 1, "relu": 120, "relu6": 0, "silu": 0},
        }[name]
    )


def with_silu(name: str) -> NormPair:
    """A norm and SiLU in a sequence."""
    return NormPair(f"{name}.1", f"{name}.2", "silu")


def test_only_what_nobody_else_sees() -> None:
    class Seen(Pairs):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a[1](self.a[0](x))
            return self.b(self.a[2](y) + y)  # the norm's own output is used twice

    assert find_norms(Seen()) == [NormPair("a.1"), with_silu("b")]
    hooked = Pairs()
    hooked.b[1].register_forward_hook(lambda *_: None)
    assert find_norms(hooked) == [with_silu("a"), NormPair("b.1")]
    hooked.a[2].register_full_backward_hook(lambda *_: None)
    assert find_norms(hooked) == [NormPair("a.1"), NormPair("b.1")]


def test_a_shared_activation_stays_as_it_is() -> None:
    model = Pairs(nn.ReLU)
    model.b[2] = model.a[2]
    assert find_norms(model) == [NormPair("a.1"), NormPair("b.1")]


def test_norms_of_a_model_that_cannot_be_traced_are_alone() -> None:
    class Branches(Pairs):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    assert find_norms(Branches()) == [NormPair("a.1"), NormPair("b.1")]


def test_finding_leaves_no_trace() -> None:
    model = models.mobilenet_v2(weights=None)
    model.features[3].eval()
    before = {name: (type(module), module.training, set(vars(module))) for name, module in model.named_modules()}
    find_norms(model)
    assert before == {
        name: (type(module), module.training, set(vars(module))) for name, module in model.named_modules()
    }


# ----------------------------------------------------------------------------------------------------------- swapping


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.SiLU, nn.Identity])
def test_swapped_and_back(act: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    inner = norm_swap.fused_batch_norm_act
    monkeypatch.setattr(norm_swap, "fused_batch_norm_act", lambda *given: ran.append(given[-1]) or inner(*given))
    model, x = Pairs(act).to(memory_format=torch.channels_last), images(2, 3, 9, 9)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = same(model, x, fuse_norms)
    assert len(ran) == 4
    assert repr(other) == repr(model)
    assert list(other.state_dict()) == list(state)
    assert fuse_norms(other) == []
    unfuse_norms(other)
    unfuse_norms(other)
    assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
    assert [set(vars(module)) for module in other.modules()] == [set(vars(module)) for module in model.modules()]
    same(model, x, lambda copied: copied.load_state_dict(other.state_dict()))


def test_momentum_none_and_no_statistics_of_its_own() -> None:
    for options in ({"momentum": None}, {"affine": False}, {"track_running_stats": False}):
        model = nn.Sequential(nn.BatchNorm2d(3, **options), nn.ReLU())
        same(model, torch.randn(4, 3, 5, 5, requires_grad=True), fuse_norms)


def test_an_activation_whose_norm_was_taken_out_works_again() -> None:
    model = Pairs(nn.ReLU)
    fuse_norms(model)
    model.b[1] = nn.BatchNorm2d(3)
    gc.collect()
    assert float(model(torch.randn(2, 3, 9, 9)).min()) == 0
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    gc.collect()
    assert float(converted.a[2](-torch.ones(1))) == 0


def test_copies_and_pickles_are_plain() -> None:
    model = Pairs()
    fuse_norms(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied.a[1]) is nn.BatchNorm2d
        assert type(copied.a[2]) is nn.SiLU
        assert "_fused" not in vars(copied.a[1])
        same(copied, torch.randn(2, 3, 9, 9), fuse_norms)


# ------------------------------------------------------------------------------------------------- pooled statistics


def test_pooled_over_micro_batches() -> None:
    model = Pairs(nn.SiLU)
    batches = [torch.randn(4, 3, 9, 9) for _ in range(3)]
    plain, fused = copy.deepcopy(model), copy.deepcopy(model)
    fuse_norms(fused)
    results = []
    for one in (plain, fused):
        pool = BatchNormPool(one)
        assert len(pool.layers) == sum(isinstance(module, nn.BatchNorm2d) for module in one.modules())
        outputs = []
        for batch in batches:
            outputs.append(one(batch).detach())
            pool.fold()
        with pool.paused():
            one(batches[0])
        pool.commit(pool.sums)
        assert [type(module) for module in copy.deepcopy(one).modules()] == [type(module) for module in model.modules()]
        if one is fused:
            with pytest.raises(UsageError, match="given another class since"):
                unfuse_norms(one)
        pool.release()
        results.append([*outputs, *one.buffers()])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    unfuse_norms(fused)
    assert [type(module) for module in fused.modules()] == [type(module) for module in model.modules()]


# ------------------------------------------------------------------------------------------------------ a whole network


@pytest.mark.usefixtures("kernels")
def test_a_training_step_of_mobilenet() -> None:
    model = models.mobilenet_v2(weights=None, width_mult=0.5, num_classes=10).to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x, target = images(4, 3, 64, 64), torch.tensor([0, 3, 6, 9])

    def run(one: nn.Module, given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = nn.functional.cross_entropy(one(given), target)
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in one.named_parameters() if p.grad is not None}

    exact, stock, fused = copy.deepcopy(model).double(), copy.deepcopy(model), model
    fuse_norms(fused)
    true_loss, true = run(exact, x.double())
    stock_loss, by_stock = run(stock, x)
    loss, by_kernels = run(fused, x)
    assert abs(loss - true_loss) <= 2 * abs(stock_loss - true_loss) + 1e-5
    # An untrained network amplifies rounding, torch's as well as ours: float64 is what both are measured by. The offset
    # of a norm before another norm has no gradient at all.
    names = [name for name, gradient in true.items() if float(gradient.abs().max()) > 1e-6]
    ours = sum(error(by_kernels[name], true[name]) for name in names)
    theirs = sum(error(by_stock[name], true[name]) for name in names)
    assert ours < 2 * theirs + 1e-3 * len(names)
    for name, buffer in fused.named_buffers():
        torch.testing.assert_close(buffer, stock.get_buffer(name), rtol=1e-3, atol=1e-4)
