"""Tests convolutions that leave the sums of their result for the norm that follows: exactness and reuse."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from hybridpar.codegen.build import Session
from hybridpar.codegen.compile_pool import Builder
from hybridpar.sync.batchnorm import BatchNormPool
from hybridpar.tvm_kernels import call_plan, norm_kernels, optimize, restore
from hybridpar.tvm_kernels.choice import Choices, active_choices, use_choices
from hybridpar.tvm_kernels.conv_bench import reference
from hybridpar.tvm_kernels.database import Database, parse_records
from hybridpar.tvm_kernels.families import candidates
from hybridpar.tvm_kernels.kernel import MomentsVariant, TunedKernel, load_image
from hybridpar.tvm_kernels.machine import Machine, cpu_fingerprint
from hybridpar.tvm_kernels.measure import torch_threads
from hybridpar.tvm_kernels.moments import attach_moments, behind, moments_in, take_moments
from hybridpar.tvm_kernels.operations.depthwise_batch_norm import ConvNormRecord, conv_norm_key, moments_error
from hybridpar.tvm_kernels.schedules.cpu_gather_moments import piece_rows
from hybridpar.tvm_kernels.shapes import ConvNormShape, ConvShape, Direction, Layout
from tests.tvm_kernels.norms import error, images, parameters, truth
from tests.tvm_kernels.standin import conv_norm_record, norm_record, record_of

LAST = Layout.CHANNELS_LAST
TILE = {"lanes": 8, "tile_rows": 1, "tile_columns": 2, "strip": 4, "columns_outer": 0, "unroll": 1, "stream": 0}


@pytest.fixture(scope="module")
def session() -> Session:
    return Session()


def made(builder: Builder, session: Session, shape: ConvShape, tile: dict[str, int], threads: int = 1) -> TunedKernel:
    variant = MomentsVariant(shape, Direction.FORWARD, LAST, tile)
    built = builder.build(variant.request)
    kernel = load_image(variant, built, session)
    return TunedKernel(kernel.phases, kernel.scratch_bytes, 4, threads, variant.align_out)


def computed(kernel: TunedKernel, shape: ConvShape, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Result and moments."""
    sizes = (shape.batch, shape.channels, shape.out_height, shape.out_width)
    out = torch.empty(sizes, memory_format=torch.channels_last)
    return out, moments_in(kernel(x, weight, bias, out), shape.channels)


# ----------------------------------------------------------------------------------------------------------- the kernel


def drawn(count: int) -> Iterator[tuple[ConvShape, dict[str, int]]]:
    """Channels that fill no vector, strips that images do not fill, and tiles of all kinds."""
    draw = random.Random(5)
    while count:
        sizes = (draw.randint(1, 3), draw.choice([1, 3, 13, 16, 20, 33, 40]), draw.randint(7, 20), draw.randint(7, 20))
        numbers = (draw.choice([1, 3, 5]), 3), (draw.choice([1, 2]), draw.choice([1, 2])), (draw.randint(0, 2), 1)
        shape = ConvShape(*sizes, *numbers, (1, 1))
        space = [
            one
            for machine in (Machine(8, 16), Machine(16, 32))
            for one in candidates(shape, Direction.FORWARD, LAST, 1, machine)
        ]
        if space:
            count -= 1
            yield shape, draw.choice(space)


@pytest.mark.parametrize(("shape", "tile"), [*drawn(8)], ids=lambda one: getattr(one, "text", ""))
def test_random_tiles_leave_the_moments_of_their_result(
    shape: ConvShape, tile: dict[str, int], builder: Builder, session: Session
) -> None:
    x = images(shape.batch, shape.channels, shape.height, shape.width)
    weight, bias = torch.randn(shape.channels, 1, *shape.kernel), torch.randn(shape.channels)
    kernel = made(builder, session, shape, tile)
    y, moments = computed(kernel, shape, x, weight, bias)
    image, gradient = x.contiguous(), torch.empty(y.shape)
    expected = reference(shape, Direction.FORWARD, image, gradient, weight) + bias.view(1, -1, 1, 1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert moments_error(y, moments) < 2e-6
    threaded = TunedKernel(kernel.phases, kernel.scratch_bytes, 4, 2, kernel.align_out)
    again, same = computed(threaded, shape, x, weight, bias)
    assert torch.equal(again, y), "it depends on the number of threads"
    assert torch.equal(same, moments)


#: An image that fills no strip, and sums of a strip in several pieces.
WIDE = ConvShape.parse("2x20x37x41 k3x3 s1x1 p0x0 d1x1")
WIDE_TILE = TILE | {"lanes": 8, "tile_columns": 5, "strip": 32}


@pytest.fixture(scope="module")
def wide(builder: Builder, session: Session) -> TunedKernel:
    assert 1 < piece_rows(WIDE, WIDE_TILE["strip"], 1) < WIDE_TILE["strip"]
    return made(builder, session, WIDE, WIDE_TILE)


@pytest.mark.parametrize("mean", [0.0, 1e3, -3e4])
def test_nothing_is_lost_where_the_mean_is_large(mean: float, wide: TunedKernel) -> None:
    x, weight = images(2, 20, 37, 41), torch.randn(20, 1, 3, 3)
    y, moments = computed(wide, WIDE, x, weight, torch.full((20,), mean))
    assert moments_error(y, moments) < 1e-5
    assert float(moments[1].min()) > 0


def test_a_constant_has_no_variance(wide: TunedKernel) -> None:
    bias = torch.arange(20.0) + 0.1
    _, moments = computed(wide, WIDE, images(2, 20, 37, 41), torch.zeros(20, 1, 3, 3), bias)
    assert torch.equal(moments[0], bias.double())
    assert not moments[1].any()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("at", [(0, 0), (20, 30), (36, 40)])
def test_what_is_not_finite_is_as_the_norm_finds_it(
    value: float, at: tuple[int, int], wide: TunedKernel, kernels: None
) -> None:
    x, weight = images(2, 20, 37, 41), torch.rand(20, 1, 3, 3) + 0.5
    x[0, 3, at[0], at[1]] = value
    y, moments = computed(wide, WIDE, x, weight, torch.zeros(20))
    assert moments.isfinite().all(0).sum() == 19
    weight, bias = parameters(20)
    found = []
    for given in (None, moments):
        running = torch.zeros(20), torch.ones(20)
        z = norm_kernels.forward(y, weight, bias, *running, True, 1.0, 1e-5, "relu6", given)[0]
        found.append((z, *running))
    for own, taken in zip(*found, strict=True):
        torch.testing.assert_close(taken, own, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_nothing_is_allocated_in_a_kernel(builder: Builder) -> None:
    shape = ConvShape.parse("2x16x14x18 k3x3 s2x2 p1x1 d1x1")
    for lanes, stream in ((8, 0), (16, 1)):
        tile = TILE | {"lanes": lanes, "stream": stream}
        text = builder.build(replace(MomentsVariant(shape, Direction.FORWARD, LAST, tile).request, text="ll")).text
        assert "TVMBackendAllocWorkspace" not in text
        assert "call void @hp_" not in text
        assert "malloc" not in text


# -------------------------------------------------------------------------------------------------------- the hand-over


def test_moments_are_those_of_one_tensor_as_it_was() -> None:
    values = torch.zeros(2, 3, dtype=torch.float64)

    def hung() -> Tensor:
        one = torch.randn(2, 3, 4, 4)
        attach_moments(one, values)
        return one

    x = hung()
    assert take_moments(x) is values
    assert take_moments(x) is None, "they are taken once"
    changes: list[Callable[[Tensor], object]] = [
        lambda one: one.add_(1),
        lambda one: one[0].zero_(),
        lambda one: one.detach().mul_(2),
        lambda one: setattr(one, "data", torch.randn(2, 3, 4, 4)),
    ]
    for change in changes:
        x = hung()
        change(x)
        assert take_moments(x) is None
    copies: list[Callable[[Tensor], Tensor]] = [
        copy.copy,
        copy.deepcopy,
        lambda one: pickle.loads(pickle.dumps(one)),
        lambda one: one.view(2, 3, 16),
        lambda one: one[:],
        torch.clone,
        Tensor.detach,
    ]
    for another in copies:
        x = hung()
        assert take_moments(another(x)) is None
        assert take_moments(x) is values, "others looked, and it still has them"


# --------------------------------------------------------------------------------------------------------- in a network

SHAPE = ConvShape.parse("2x20x9x10 k3x3 s2x2 p1x1 d1x1")
NORM = ConvNormShape(SHAPE, "relu6").norm
RECORDS = (
    record_of(SHAPE, Direction.FORWARD, LAST, parameters=TILE),
    norm_record(NORM),
    conv_norm_record(ConvNormShape(SHAPE, "relu6"), parameters=TILE),
)


class Net(nn.Module):
    """A pair, and what may come between."""

    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(20, 20, 3, 2, 1, groups=20, bias=False)
        self.norm, self.act = nn.BatchNorm2d(20), nn.ReLU6(inplace=True)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.between is not None:
            y = self.between(y)
        z: Tensor = self.act(self.norm(y))
        return z


class Took:
    """Notes for each forward of a norm whether it was given moments."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.given: list[bool] = []
        compute = norm_kernels.forward

        def forward(*args: object) -> object:
            self.given.append(len(args) > 9 and args[9] is not None)
            return compute(*args)  # type: ignore[arg-type]

        patch.setattr(norm_kernels, "forward", forward)


@pytest.fixture
def took(monkeypatch: pytest.MonkeyPatch, kernels: None) -> Iterator[Took]:
    before = active_choices()
    with torch_threads(1):
        yield Took(monkeypatch)
    use_choices(before)


def database(*left_out: int) -> Database:
    found = Database()
    found.add(one for place, one in enumerate(RECORDS) if place not in left_out)
    return found


def step(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Result and gradients."""
    own = x.detach().requires_grad_()
    z = net(own)
    torch.manual_seed(1)
    return [z.detach(), *torch.autograd.grad(z, [own, *net.parameters()], torch.randn(z.shape))]


def data(mean: float = 0.0) -> Tensor:
    return images(2, 20, 9, 10, mean=mean)


def test_a_pair_runs_together_and_gives_the_same(took: Took) -> None:
    torch.manual_seed(0)
    net, x = Net(), data(mean=2.0)
    names, state = [*net.state_dict()], copy.deepcopy(net.state_dict())
    apart = step(optimize(net, database(2)), x)
    left = [net.norm.running_mean.clone(), net.norm.running_var.clone()]
    net.load_state_dict(state)
    together = step(optimize(net, database()), x)
    assert took.given == [False, True]
    for one, other in zip([*together, net.norm.running_mean, net.norm.running_var], [*apart, *left], strict=True):
        assert error(one, other) < 3e-6
    assert int(net.norm.num_batches_tracked) == 1
    y = nn.functional.conv2d(x, net.conv.weight, None, 2, 1, 1, 20)
    exact = truth(y, torch.randn(y.shape), net.norm.weight, net.norm.bias, "relu6")
    assert error(together[0], exact[0]) < 3e-6
    assert [*net.state_dict()] == names
    restore(net)
    assert type(net.conv) is nn.Conv2d
    assert "_behind" not in vars(net.conv)


def test_without_gradients_too(took: Took) -> None:
    net = optimize(Net(), database())
    with torch.no_grad():
        net(data())
    assert took.given == [True]
    with torch.inference_mode():
        net(data())
    assert took.given == [True, False]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_all_three_records_are_wanted(missing: int, took: Took) -> None:
    step(optimize(Net(), database(missing)), data())
    assert not any(took.given)


@pytest.mark.parametrize("fields", [{"ms": 1.99}, {"threads": 2}, {"device": "another"}, {"versions": {"torch": "1"}}])
def test_a_record_that_says_otherwise_is_none(fields: dict[str, object], took: Took) -> None:
    net = optimize(Net(), database(2))
    active_choices().database.add([RECORDS[2].model_copy(update=fields)])  # type: ignore[union-attr]
    step(net, data())
    assert took.given == [False]


def test_a_record_whose_parameters_are_no_kernels_is_none(took: Took) -> None:
    records = database(2)
    records.add([conv_norm_record(ConvNormShape(SHAPE, "relu6"), parameters=TILE | {"lanes": 3})])
    step(optimize(Net(), records), data())
    assert took.given == [False]
    key = conv_norm_key(ConvNormShape(SHAPE, "relu6"), 1, cpu_fingerprint())
    assert "lanes=3" in active_choices().decide(key).why  # type: ignore[union-attr]


def test_strict_does_not_ask_for_pairs_and_off_leaves_them(took: Took, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = [record_of(SHAPE, one, LAST, ms=3.0) for one in Direction if one is not Direction.FORWARD]
    records = database(2)
    records.add(backward)
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "strict")
    step(optimize(Net(), records), data())
    assert took.given == [False]
    monkeypatch.setenv("HYBRIDPAR_KERNELS", "off")
    step(optimize(Net(), database()), data())
    assert took.given == [False]


def add_one(y: Tensor) -> Tensor:
    with torch.no_grad():
        y += 1.0
    return y


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": add_one,
    "a view": lambda y: y[:],
    "a copy": lambda y: y.clone(),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_what_comes_between_leads_to_the_norms_own_pass(between: str, took: Took) -> None:
    """The layer is marked first, and then something comes between: on the graph it would not have been marked."""
    torch.manual_seed(0)
    net, x = optimize(Net(), database()), data()
    net.between = BETWEEN[between]
    found = step(net, x)
    assert took.given == [False]
    net.norm.running_mean.zero_(), net.norm.running_var.fill_(1.0)
    for one, other in zip(found, step(restore(net), x), strict=True):
        assert error(one, other) < 1e-5


def another(_module: nn.Module, _inputs: object, y: Tensor) -> Tensor:
    return y * 2


def changed(_module: nn.Module, _inputs: object, y: Tensor) -> None:
    y.detach().mul_(2)


@pytest.mark.parametrize("hook", [another, changed])
def test_hooks_that_change_the_output_lead_to_the_norms_own_pass(hook: Callable[..., object], took: Took) -> None:
    net = optimize(Net(), database())
    handle = net.conv.register_forward_hook(hook)
    step(net, data())
    handle.remove()
    step(net, data())
    assert took.given == [False, True]


def test_who_only_looks_disturbs_nothing(took: Took) -> None:
    net, seen = optimize(Net(), database()), []
    net.conv.register_forward_hook(lambda _m, _i, y: seen.append(float(y.detach().sum())))
    step(net, data())
    assert seen
    assert took.given == [True]


class Two(Net):
    """Somebody else reads what the convolution gives."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z: Tensor = self.act(self.norm(y)) + y.mean()
        return z


class Twice(Net):
    """The convolution is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        self.conv(x)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Two, Twice])
def test_a_convolution_with_other_readers_makes_no_sums(kind: type[Net], took: Took) -> None:
    net = optimize(kind(), database())
    assert behind(net.conv) is None
    step(net, data())
    assert took.given == [False]


def test_neighbours_in_sequence_are_found_where_nothing_can_be_traced(took: Took) -> None:
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*Net().children())

        def forward(self, x: Tensor) -> Tensor:
            assert float(x.detach().sum())
            result: Tensor = self.body(x)
            return result

    net = optimize(Untraceable(), database())
    assert behind(net.body[0]).norm is net.body[1]  # type: ignore[union-attr]
    step(net, data())
    assert took.given == [True]


def test_norms_that_do_not_look_at_the_batch_get_no_sums(took: Took) -> None:
    net = optimize(Net(), database())
    made = behind(net.conv)
    assert made is not None
    for training, by_batch in ((False, False), (True, False), (True, True)):
        net.train(training)
        net.norm.train(by_batch)
        assert made.wants == ("relu6" if by_batch else None)
        step(net, data())
    assert took.given == [False, False, True]


def test_autocast_tracers_and_compilers_see_what_they_saw_before(took: Took) -> None:
    net = optimize(Net(), database())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(data())
    assert not any(took.given)
    graph = fx.Tracer().trace(net)
    (node,) = (node for node in graph.nodes if node.op == "call_function")
    assert not node.kwargs


def test_no_memory_is_kept(took: Took, monkeypatch: pytest.MonkeyPatch) -> None:
    net, made = optimize(Net(), database()), []

    def noted(*args: object) -> Tensor:
        values = moments_in(*args)  # type: ignore[arg-type]
        made.append(weakref.ref(values))
        return values

    monkeypatch.setattr(call_plan, "moments_in", noted)
    z = net(data().requires_grad_())
    gc.collect()
    assert z.requires_grad
    assert made[0]() is None, "the graph of the backward keeps them"
    y = net.conv(data())
    assert made[1]() is not None
    del y
    assert made[1]() is None, "they outlive the tensor that they are of"


def test_copies_of_a_model_have_their_own_norms(took: Took) -> None:
    net = optimize(nn.Sequential(Net()), database())
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        own = behind(twin[0].conv)
        assert own is not None
        assert own.norm is twin[0].norm
        assert own.norm is not net[0].norm
        assert own.wants is None, "a copied norm is torch's own"
        step(twin, data())
        step(optimize(twin, database()), data())
    assert took.given == [True, True]
    alone = copy.deepcopy(net[0].conv)
    gc.collect()
    assert behind(alone).norm is None  # type: ignore[union-attr]
    assert alone(data()).shape == (2, 20, 5, 5)


def test_pooled_norms_take_them_unless_they_look_at_all_replicas(took: Took) -> None:
    torch.manual_seed(0)
    net, x = optimize(Net(), database()), data(mean=1.0)
    pool = BatchNormPool(net)
    net(x)
    assert took.given == [True]
    pool.fold()
    pool.commit(pool.sums)
    y = net.conv(x).detach().double()
    expected = 0.9 + 0.1 * y.var((0, 2, 3))
    torch.testing.assert_close(net.norm.running_var.double(), expected, rtol=1e-5, atol=0)
    pool.group = object()  # type: ignore[assignment]
    assert behind(net.conv).wants is None  # type: ignore[union-attr]
    pool.release()


def test_records_are_lines_of_the_same_database() -> None:
    found = parse_records("\n".join(one.line() for one in RECORDS))
    assert (len(found), found.damaged) == (3, 0)
    assert found.records == list(RECORDS)
    assert found.best(RECORDS[2].key) == RECORDS[2]
    assert Choices(found).digest != Choices(database(2)).digest
    broken = RECORDS[2].line().replace("2x20x9x10", "2x20x0x10")
    newer = RECORDS[2].line().replace('"version": 1', '"version": 2')
    found = parse_records(f"{broken}\n{newer}")
    assert (len(found), found.damaged, found.other_versions) == (0, 1, 1)
    assert ConvNormRecord.model_validate_json(RECORDS[2].line()) == RECORDS[2]
