"""Running statistics are those of the whole batch, however it was divided; and the layers stay what they are."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar import TrainConfig
from hybridpar.comm.world import World
from hybridpar.sync.batchnorm import BatchNormPool, BufferRollback, NormaliseOverReplicas
from hybridpar.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.small_nets import SmallNet

FEATURES = 4


def make_layer(kind: type = nn.BatchNorm2d, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    layer = kind(FEATURES, **options)
    with torch.no_grad():
        if layer.affine:
            layer.weight.uniform_(0.5, 1.5)
            layer.bias.uniform_(-1, 1)
        if layer.track_running_stats:
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    return layer


def make_input(samples: int = 12, side: int = 3, seed: int = 1, shape: tuple[int, ...] | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 + 2 * torch.randn(shape or (samples, FEATURES, side, side), generator=generator)


def pooled_step(model: nn.Module, *batches: Tensor) -> BatchNormPool:
    """One step over some micro-batches on one worker."""
    pool = BatchNormPool(model)
    for batch in batches:
        model(batch)
        pool.fold()
    pool.commit(pool.sums.clone())
    return pool


def assert_statistics(layer: Any, expected: Any, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(layer.running_mean, expected.running_mean, **tolerance)
    torch.testing.assert_close(layer.running_var, expected.running_var, **tolerance)
    assert layer.num_batches_tracked == expected.num_batches_tracked


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize(
    ("kind", "sides", "options"),
    [
        (nn.BatchNorm1d, (), {}),
        (nn.BatchNorm1d, (5,), {"momentum": 0.5}),
        (nn.BatchNorm2d, (3, 3), {"momentum": None}),
        (nn.BatchNorm3d, (2, 2, 2), {"affine": False}),
    ],
)
def test_micro_batches_leave_the_statistics_of_their_concatenation(parts, kind, sides, options):
    layer, expected = make_layer(kind, **options), make_layer(kind, **options)
    for step in range(3):
        batch = make_input(seed=step, shape=(12, FEATURES, *sides))
        pooled_step(layer, *batch.tensor_split(parts)).release()
        expected(batch)
    assert_statistics(layer, expected)


def test_a_step_rolled_back_leaves_no_trace():
    layer, expected = make_layer(), make_layer()
    pool = BatchNormPool(layer)
    layer(make_input() * math.inf)
    pool.fold()
    pool.commit(pool.sums.clone(), where=torch.tensor(False))
    assert_statistics(layer, expected)
    batch = make_input(seed=2)
    layer(batch)
    pool.fold()
    pool.commit(pool.sums.clone(), where=torch.tensor(True))
    expected(batch)
    assert_statistics(layer, expected)


def test_evaluation_uses_the_running_statistics_and_moves_nothing():
    layer, stock = make_layer().eval(), make_layer().eval()
    pool = BatchNormPool(layer)
    assert torch.equal(layer(make_input()), stock(make_input()))
    pool.fold()
    pool.commit(pool.sums.clone())
    assert_statistics(layer, stock)


def test_a_layer_that_did_not_run_keeps_its_statistics():
    used, idle = make_layer(seed=5), make_layer(seed=6)
    before = copy.deepcopy(idle)
    pool = BatchNormPool(nn.ModuleList([used, idle]))
    used(make_input())
    pool.fold()
    pool.commit(pool.sums.clone())
    assert_statistics(idle, before, rtol=0, atol=0)
    assert used.num_batches_tracked == 1


@pytest.mark.parametrize("mean", [1e3, 1e4, -1e4])
def test_a_mean_far_above_the_deviation_loses_no_precision(mean):
    # In float32 a sum of squares around 1e8 resolves no variance of 1.
    layer, batch = make_layer(momentum=1.0), mean + torch.randn(64, FEATURES, 8, 8)
    pooled_step(layer, *batch.tensor_split(4)).release()
    exact = batch.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(layer.running_mean.double(), exact.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_var.double(), exact.var(1), rtol=2e-3, atol=0)


def test_layers_that_keep_no_statistics_or_sync_themselves_are_left_alone():
    class Own(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    layers = [
        nn.SyncBatchNorm(FEATURES),
        nn.BatchNorm2d(FEATURES, track_running_stats=False),
        nn.GroupNorm(2, FEATURES),
        nn.InstanceNorm2d(FEATURES, track_running_stats=True),
        Own(FEATURES),
    ]
    kinds = [type(layer) for layer in layers]
    pool = BatchNormPool(nn.ModuleList(layers))
    assert pool.layers == []
    assert [type(layer) for layer in layers] == kinds
    pool.fold()
    pool.commit(pool.sums)
    pool.release()


def test_a_pooled_layer_is_still_a_batchnorm_with_the_same_state():
    model = nn.Sequential(nn.Conv2d(3, FEATURES, 1), make_layer())
    before = copy.deepcopy(model.state_dict())
    pool = BatchNormPool(model)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert type(model[1]).__name__ == "BatchNorm2d"
    assert repr(model[1]) == repr(nn.BatchNorm2d(FEATURES))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(before)
    assert pool.layers == [model[1]]


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, through_pickle, through_torch])
def test_copies_of_a_pooled_layer_are_plain(duplicate):
    layer = make_layer()
    pool = BatchNormPool(layer)
    plain = duplicate(layer)
    assert type(plain) is nn.BatchNorm2d
    assert not hasattr(plain, "_pool")
    assert all(torch.equal(value, layer.state_dict()[name]) for name, value in plain.state_dict().items())
    if duplicate is not copy.copy:  # whose buffers are the layer's own
        before = copy.deepcopy(layer.state_dict())
        plain(make_input())
        assert plain.num_batches_tracked == 1
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert not pool.sums.any()


def test_release_gives_the_stock_layer_back():
    layer, expected = make_layer(), make_layer()
    BatchNormPool(layer).release()
    assert type(layer) is nn.BatchNorm2d
    assert vars(layer).keys() == vars(expected).keys()
    layer(make_input())
    expected(make_input())
    assert_statistics(layer, expected, rtol=0, atol=0)


def test_mixed_momenta_are_each_layers_own():
    layers = [make_layer(momentum=momentum) for momentum in (0.1, None, 0.9)]
    expected = copy.deepcopy(layers)
    model = nn.Sequential(*layers)
    for step in range(3):
        pooled_step(model, make_input(seed=step)).release()
        nn.Sequential(*expected)(make_input(seed=step))
    for layer, wanted in zip(layers, expected, strict=True):
        assert_statistics(layer, wanted, rtol=1e-5, atol=1e-5)


class As(nn.Module):
    """A layer of another dtype than what comes in."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.weight.dtype))


def test_statistics_have_the_dtype_of_their_layer():
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16]
    model = nn.Sequential(*(As(make_layer(seed=seed), dtype) for seed, dtype in enumerate(dtypes)))
    expected = copy.deepcopy(model)
    batch = make_input()
    pooled_step(model, batch).release()
    expected(batch)
    for mine, wanted in zip(model, expected, strict=True):
        tolerance = max(1e-6, torch.finfo(wanted.layer.weight.dtype).eps)
        assert_statistics(mine.layer, wanted.layer, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_float64_model_trains_as_in_a_plain_loop(stages):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)).double()
    plain = copy.deepcopy(net)
    x, y = torch.randn(8, 12, dtype=torch.float64), torch.arange(8) % 5
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    config = TrainConfig(plan="none", stages=stages, micro_batches=2)
    with Trainer(net, lambda part: torch.optim.SGD(part.parameters(), lr=0.1), config=config, example=x[:4]) as trainer:
        for _ in range(3):
            trainer.step((x, y))
            optimizer.zero_grad()
            for images, labels in zip(x.chunk(2), y.chunk(2), strict=True):
                (nn.functional.cross_entropy(plain(images), labels) / 2).backward()
            optimizer.step()
        trainer.wait()
    for mine, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("unless", [None, False, True])
def test_buffers_of_every_dtype_go_back_or_stay(unless):
    model = nn.Sequential(make_layer(), nn.BatchNorm2d(5).double())
    model[1].register_buffer("table", torch.arange(6.0).view(2, 3).t())
    rollback = BufferRollback(model)
    for shift in (1, 2):  # what was kept in one step is not what is put back in the next
        for buffer in model.buffers():
            buffer.add_(shift)
        kept = copy.deepcopy(dict(model.named_buffers()))
        rollback.keep()
        for buffer in model.buffers():
            buffer.fill_(math.nan if buffer.is_floating_point() else 77)
        moved = copy.deepcopy(dict(model.named_buffers()))
        rollback.restore(None if unless is None else torch.tensor(unless))
        for name, buffer in model.named_buffers():
            wanted = moved if unless else kept
            assert torch.equal(buffer.nan_to_num(9.0), wanted[name].nan_to_num(9.0)), name


@pytest.mark.parametrize("unless", [None, torch.tensor(False), torch.tensor(True)], ids=str)
def test_a_rollback_leaves_alone_what_another_stage_has_saved_of_a_constant(unless):
    model, x = nn.Module(), torch.ones(2, requires_grad=True)
    model.scale = nn.Buffer(torch.full((2,), 3.0))
    rollback = BufferRollback(model)
    product = (x * model.scale).sum()
    rollback.restore(unless)
    product.backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_a_layer_that_runs_twice_in_a_pass_counts_both_runs():
    layer, expected = make_layer(), make_layer()
    first, second = make_input(seed=1), make_input(seed=2) * 5
    pool = BatchNormPool(layer)
    layer(first)
    layer(second)
    pool.fold()
    pool.commit(pool.sums.clone())
    expected(torch.cat((first, second)))
    assert_statistics(layer, expected)


SHAPES = {"images": (6, 3, 4, 5), "vectors": (6, 3), "volumes": (6, 3, 2, 2, 2)}
CUTS = {"even": [2, 2, 2], "uneven": [1, 2, 3]}


def data(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(shape) * 3 + 100, torch.randn(shape), torch.rand(shape[1]) + 0.5, torch.randn(shape[1])


def stock(shape: tuple[int, ...], affine: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    x, gradient, weight, bias = (tensor.to(dtype) for tensor in data(shape))
    x.requires_grad_()
    w, b = (weight.clone().requires_grad_(), bias.clone().requires_grad_()) if affine else (None, None)
    y = nn.functional.batch_norm(x, None, None, w, b, True, 0.0, 1e-5)
    y.backward(gradient)
    return [y.detach(), x.grad, *([w.grad, b.grad] if w is not None and b is not None else [])]  # type: ignore[list-item]


def one_rank(world: World, shape: tuple[int, ...], cut: list[int], affine: bool) -> list[Any]:
    x, gradient, weight, bias = (tensor.double() for tensor in data(shape))
    mine = x.split(cut)[world.rank].clone().requires_grad_()
    w, b = (weight.clone().requires_grad_(), bias.clone().requires_grad_()) if affine else (None, None)
    y, mean, variance = NormaliseOverReplicas.apply(mine, w, b, 1e-5, world.lane_groups[0])
    y.backward(gradient.split(cut)[world.rank])
    dims = [0, *range(2, mine.ndim)]
    torch.testing.assert_close(mean, mine.detach().mean(dims))
    if mine.numel() > mine.shape[1]:
        torch.testing.assert_close(variance, mine.detach().var(dims))
    return [y.detach(), mine.grad, *([w.grad, b.grad] if w is not None and b is not None else [])]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_replicas_normalise_as_one_batch(shape: str, cut: str, affine: bool) -> None:
    parts = run_ranks(
        one_rank, 3, SHAPES[shape], [1, 2, 3] if shape == "images" and cut == "uneven" else CUTS["even"], affine
    )
    expected = stock(SHAPES[shape], affine)
    for whole, pieces in zip(expected[:2], zip(*(part[:2] for part in parts), strict=True), strict=True):
        torch.testing.assert_close(torch.cat(pieces), whole)
    for whole, pieces in zip(expected[2:], zip(*(part[2:] for part in parts), strict=True), strict=True):
        torch.testing.assert_close(sum(pieces), whole)


def trained(world: World, batch_norm: str, micro_batches: int, share: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = SmallNet()
    torch.manual_seed(1)
    x, y = torch.randn(12, 3, 8, 8), torch.randint(0, 10, (12,))
    if share:
        x, y = x.chunk(world.size)[world.rank], y.chunk(world.size)[world.rank]
    config = TrainConfig(batch_norm=batch_norm, micro_batches=micro_batches, lr=0.1)  # type: ignore[arg-type]
    with Trainer(model, config=config, world=world) as trainer:
        for _ in range(3):
            assert trainer.step((x, y)).outcome.committed
        return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(
            tensor, other[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_replicas_train_as_one_replica_with_the_whole_batch(micro_batches: int) -> None:

    states = run_ranks(trained, 2, "sync", micro_batches, True)
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    if micro_batches == 1:
        assert_close(states[0], trained(World(), "pooled", 1, False))
