"""Tests the depthwise convolution op against torch's convolution: results, layouts, gradients, edge cases."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from hybridpar.errors import KernelError
from hybridpar.tvm_kernels import op, space
from hybridpar.tvm_kernels.choice import active_choices
from hybridpar.tvm_kernels.database import KernelRecord
from hybridpar.tvm_kernels.kernel import TunedKernel, Variant
from hybridpar.tvm_kernels.machine import Machine
from hybridpar.tvm_kernels.op import depthwise_conv2d
from hybridpar.tvm_kernels.schedules import outside
from hybridpar.tvm_kernels.shapes import ConvShape, Direction, Layout
from hybridpar.tvm_kernels.space import candidates
from tests.tvm_kernels.standin import StandIn, all_records, key_of, record_of, tuned

LAST = Layout.CHANNELS_LAST
SHAPES = [
    "2x8x9x9 k3x3 s1x1 p1x1 d1x1",
    "1x5x7x10 k3x5 s2x1 p1x2 d1x1",
    "3x17x8x6 k5x5 s2x2 p2x2 d1x1",
    "1x2x9x9 k7x7 s1x1 p3x3 d1x1",
    "2x4x11x12 k3x3 s1x2 p2x0 d2x3",
    "1x3x4x4 k3x3 s1x1 p0x0 d1x1",
]
FORMS = {Layout.CHANNELS_LAST: torch.channels_last, Layout.CONTIGUOUS: torch.contiguous_format}


class Case:
    """Operands of a convolution, and what float64 makes of them."""

    def __init__(self, shape: str, layout: Layout, bias: bool = True) -> None:
        self.shape = one = ConvShape.parse(shape)
        self.x = torch.randn(one.batch, one.channels, one.height, one.width).contiguous(memory_format=FORMS[layout])
        self.weight = torch.randn(one.channels, 1, *one.kernel)
        self.bias = torch.randn(one.channels) if bias else None
        self.gradient = torch.randn(one.batch, one.channels, one.out_height, one.out_width)
        self.gradient = self.gradient.contiguous(memory_format=FORMS[layout])
        self.numbers = [list(one.stride), list(one.padding), list(one.dilation)]

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.x, self.weight, self.bias

    def result(self, run: Callable[..., Tensor], x: Tensor | None = None) -> list[Tensor]:
        """Output and all gradients."""
        operands = [one.detach().requires_grad_() for one in (self.x if x is None else x, self.weight, self.bias)]
        out = run(*operands, *self.numbers)
        return [out.detach(), *torch.autograd.grad(out, operands, self.gradient)]

    @property
    def truth(self) -> list[Tensor]:
        return self.to(torch.float64).result(stock)

    def to(self, dtype: torch.dtype) -> Case:
        cast = Case.__new__(Case)
        cast.__dict__ = {name: one.to(dtype) if isinstance(one, Tensor) else one for name, one in vars(self).items()}
        return cast


def stock(x: Tensor, weight: Tensor, bias: Tensor | None, *numbers: list[int]) -> Tensor:
    return F.conv2d(x, weight, bias, *numbers, x.shape[1])


def close(found: list[Tensor], truth: list[Tensor]) -> None:
    for one, right in zip(found, truth, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=0, atol=1e-5 * float(right.abs().max()))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_are_used_and_right(shape, layout):
    case = Case(shape, layout)
    with tuned(all_records(shape)) as kernels:
        found = case.result(depthwise_conv2d)
    covered = [one for one in Direction if layout is LAST and not outside(case.shape, one)]
    assert kernels.calls == dict.fromkeys(Direction, 0) | dict.fromkeys(covered, 1)
    close(found, case.truth)
    for mine, torchs in zip(found[:2], case.result(stock)[:2], strict=True):
        assert mine.stride() == torchs.stride()


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("shape", SHAPES)
def test_without_records_it_is_torch_bit_by_bit(shape, layout):
    case = Case(shape, layout)
    with tuned([]) as kernels:
        found = case.result(depthwise_conv2d)
    for mine, torchs in zip(found[:3], case.result(stock)[:3], strict=True):
        assert torch.equal(mine, torchs)
    assert not any(kernels.calls.values())


@pytest.mark.parametrize("direction", Direction)
def test_each_direction_is_chosen_for_itself(direction):
    case = Case(SHAPES[0], LAST)
    records = [record for record in all_records(SHAPES[0]) if record.direction is direction]
    with tuned(records) as kernels:
        close(case.result(depthwise_conv2d), case.truth)
    assert kernels.calls == dict.fromkeys(Direction, 0) | {direction: 1}


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_the_rows(threads):
    shape = "5x8x9x9 k3x3 s1x1 p1x1 d1x1"
    case = Case(shape, LAST)
    with tuned(all_records(shape, threads=threads)) as kernels:
        torch.set_num_threads(threads)
        try:
            found = case.result(depthwise_conv2d)
        finally:
            torch.set_num_threads(1)
    assert kernels.calls == dict.fromkeys(Direction, 1)
    forward = sorted(kernels.ranges[:threads])
    assert [begin for begin, _ in forward] == [0, *(end for _, end in forward[:-1])]
    assert forward[-1][1] == 5
    close(found, case.truth)


# ------------------------------------------------------------------------------------------------------ odd operands


def views(x: Tensor) -> dict[str, Tensor]:
    """The same values in tensors that no kernel may be given as they are, or may it?"""
    padded = torch.empty(x.numel() + 1)
    shifted = padded[1:].as_strided(x.shape, x.stride()).copy_(x)
    wide = torch.cat([x, x], 1)
    tall = torch.cat([x, x], 2)
    return {
        "one element behind": shifted,
        "half of the channels": wide[:, : x.shape[1]],
        "half of the rows": tall[:, :, : x.shape[2]],
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
    }


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("view", ["one element behind", "half of the channels", "half of the rows", "transposed"])
def test_views_are_right(layout, view):
    case = Case("2x8x6x9 k3x3 s1x1 p1x1 d1x1", layout)
    x = views(case.x)[view]
    with tuned(all_records(case.shape)):
        found = case.result(depthwise_conv2d, x)
    close(found, case.truth)
    torchs = case.result(stock, x)
    assert found[0].stride() == torchs[0].stride()


@pytest.mark.parametrize("layout", Layout)
def test_the_layout_of_the_result_is_that_of_torch_whatever_the_weights_say(layout):
    case = Case(SHAPES[0], layout)
    case.weight = case.weight.as_strided(case.weight.shape, (9, 1, 3, 1))  # as after model.to(channels_last)
    with tuned(all_records(SHAPES[0])) as kernels:
        found = case.result(depthwise_conv2d)
    close(found, case.truth)
    for mine, torchs in zip(found[:2], case.result(stock)[:2], strict=True):
        assert mine.stride() == torchs.stride()
    assert kernels.calls[Direction.FORWARD] == (layout is LAST)


@pytest.mark.parametrize("layout", Layout)
def test_gradients_come_in_any_layout(layout):
    case = Case(SHAPES[0], layout)
    other = FORMS[next(one for one in Layout if one is not layout)]
    for gradient in (case.gradient.contiguous(memory_format=other), torch.tensor(0.5).expand(case.gradient.shape)):
        case.gradient = gradient
        with tuned(all_records(SHAPES[0])) as kernels:
            close(case.result(depthwise_conv2d), case.truth)
        assert kernels.calls == dict.fromkeys(Direction, int(layout is LAST))


@pytest.mark.parametrize("sizes", [(0, 8, 9, 9), (1, 1, 9, 9), (2, 8, 1, 1)])
def test_sizes_at_the_edge(sizes):
    x, weight = torch.randn(sizes, requires_grad=True), torch.randn(sizes[1], 1, 3, 3, requires_grad=True)
    records = all_records(ConvShape(max(1, sizes[0]), *sizes[1:], (3, 3), (1, 1), (1, 1), (1, 1)))
    with tuned(records):
        found = depthwise_conv2d(x, weight, None, [1, 1], [1, 1], [1, 1])
        gradients = torch.autograd.grad(found.sum(), (x, weight))
    right = stock(x, weight, None, [1, 1], [1, 1], [1, 1])
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(gradients, torch.autograd.grad(right.sum(), (x, weight)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_torch(dtype):
    case = Case(SHAPES[0], LAST)
    x, weight = case.x.to(dtype), case.weight.to(dtype)
    with tuned(all_records(SHAPES[0])) as kernels:
        assert torch.equal(depthwise_conv2d(x, weight, None, *case.numbers), stock(x, weight, None, *case.numbers))
    assert not any(kernels.calls.values())


# ---------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("shape", SHAPES[:5:2])
def test_second_gradients_are_torchs(shape, layout):
    case = Case(shape, layout)

    def penalty(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        operands = [one.detach().requires_grad_() for one in case.operands]
        first = torch.autograd.grad(run(*operands, *case.numbers), operands, case.gradient, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), operands, allow_unused=True)

    with tuned(all_records(shape)) as kernels:
        found = penalty(depthwise_conv2d)
    assert kernels.calls == dict.fromkeys(Direction, 0) | {Direction.FORWARD: int(layout is LAST)}
    for mine, torchs in zip(found, penalty(stock), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_is_wanted_is_computed(frozen):
    case = Case(SHAPES[0], LAST)
    operands = [case.x, case.weight]
    operands[1 - frozen].requires_grad_()
    with tuned(all_records(SHAPES[0])) as kernels:
        depthwise_conv2d(*operands, None, *case.numbers).sum().backward()
    skipped = (Direction.INPUT_GRADIENT, Direction.WEIGHT_GRADIENT)[frozen]
    assert kernels.calls == dict.fromkeys(Direction, 1) | {skipped: 0}


# ------------------------------------------------------------------------------------------------ torch's other parts


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return depthwise_conv2d(x.relu(), self.weight, None, 1, 1).relu()


@pytest.mark.parametrize("layout", Layout)
def test_compiled_it_is_torchs_own(layout):
    net, x = Net(), torch.randn(2, 8, 9, 9).contiguous(memory_format=FORMS[layout])
    with tuned(all_records(SHAPES[0])) as kernels:
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        found = compiled(x)
        (gradient,) = torch.autograd.grad(found.square().sum(), net.parameters())
    assert not any(kernels.calls.values())
    right = net(x)
    assert torch.equal(found, right)
    assert found.stride() == right.stride()
    torch.testing.assert_close(gradient, *torch.autograd.grad(right.square().sum(), net.parameters()))


def test_exported_and_traced_it_is_torchs_own():
    net, x = Net(), torch.randn(2, 8, 9, 9)
    with tuned(all_records(SHAPES[0])) as kernels:
        program = torch.export.export(net, (x,))
        assert [node.target for node in program.graph.nodes].count(torch.ops.aten.conv2d.default) == 1
        found, traced = program.module()(x), torch.jit.trace(net, (x,))(x)
    assert not any(kernels.calls.values())
    for one in (found, traced):
        torch.testing.assert_close(one, net(x))


def test_autocast_is_that_of_torch():
    case = Case(SHAPES[0], LAST)
    case.gradient = case.gradient.bfloat16()
    with tuned(all_records(SHAPES[0])) as kernels, torch.autocast("cpu", dtype=torch.bfloat16):
        found, right = case.result(depthwise_conv2d), case.result(stock)
        called = depthwise_conv2d(*case.operands, *case.numbers)
    assert found[0].dtype is called.dtype is torch.bfloat16
    assert torch.equal(found[0], right[0])
    assert torch.equal(called, right[0])
    assert [one.dtype for one in found[1:]] == [torch.float32] * 3
    for mine, torchs in zip(found[1:], right[1:], strict=True):
        torch.testing.assert_close(mine, torchs, rtol=2e-2, atol=2e-1)
    assert not any(kernels.calls.values())


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_on_a_cpu_that_has_it(autocast, builder, monkeypatch):
    monkeypatch.setattr(space, "this_machine", lambda: Machine(16, 32, bfloat16=True))
    case = Case("2x40x13x12 k3x3 s1x1 p2x2 d2x2", LAST)  # where torch's weight gradient is wrong on some CPUs
    half = case.to(torch.bfloat16)
    keys = [key_of(case.shape, direction, dtype="bfloat16") for direction in Direction]
    tiles = [candidates(key)[0] for key in keys]
    records = [
        record_of(case.shape, key.direction, LAST, dtype="bfloat16", parameters=tile, error=2e-3)
        for key, tile in zip(keys, tiles, strict=True)
    ]

    def make(records: list[KernelRecord]) -> list[TunedKernel]:
        variants = [Variant(record.key, record.parameters) for record in records]
        return [variant.load(builder.build(variant.request)) for variant in variants]

    with tuned(records, make), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if autocast:
            case.gradient = half.gradient
        found = (case if autocast else half).result(depthwise_conv2d)
        assert all(active_choices().decide(key).kernel is not None for key in keys)
    assert [one.dtype for one in found] == [torch.bfloat16, *[torch.float32 if autocast else torch.bfloat16] * 3]
    for one, right in zip(found, half.truth, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=2**-8, atol=1e-3)


def test_a_cpu_without_it_leaves_bfloat16_to_torch_and_says_so(monkeypatch):
    monkeypatch.setattr(space, "this_machine", lambda: Machine(16, 32))
    case = Case(SHAPES[0], LAST)
    x, weight = case.x.bfloat16(), case.weight.bfloat16()
    with tuned(all_records(SHAPES[0], dtype="bfloat16")) as kernels:
        assert torch.equal(depthwise_conv2d(x, weight, None, *case.numbers), stock(x, weight, None, *case.numbers))
        said = active_choices().decide(key_of(SHAPES[0], Direction.FORWARD, dtype="bfloat16")).text
    assert "AVX512_BF16" in said
    assert "\n" not in said
    assert not any(kernels.calls.values())


def test_many_threads_call_at_once():
    shape = "4x8x9x9 k3x3 s1x1 p1x1 d1x1"
    case = Case(shape, LAST)
    found: list[list[Tensor]] = []
    with tuned(all_records(shape, threads=2)):

        def work() -> None:
            torch.set_num_threads(2)
            found.extend(case.result(depthwise_conv2d) for _ in range(10))

        callers = [threading.Thread(target=work) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    torch.set_num_threads(1)
    truth = case.truth
    assert len(found) == 30
    for one in found:
        close(one, truth)


# --------------------------------------------------------------------------------------------------------- in between


def test_a_form_of_call_is_decided_once(monkeypatch):
    monkeypatch.setattr(op, "_MOST_PLANS", 3)
    case = Case(SHAPES[0], LAST)
    with tuned(all_records(SHAPES[0])) as kernels:
        case.result(depthwise_conv2d)
        with monkeypatch.context() as patch:
            patch.setattr(op, "_made", lambda *_: pytest.fail("decided again"))
            for _ in range(3):
                case.result(depthwise_conv2d, case.x * 1)
        assert len(active_choices().plans) == 1
        for size in range(4, 14):
            depthwise_conv2d(torch.randn(1, 8, size, size), case.weight, None, 1, 1)
        assert len(active_choices().plans) <= 3
    assert kernels.calls == dict.fromkeys(Direction, 4)


@pytest.mark.parametrize("reason", ["off", "broken", "slower"])
def test_kernels_that_are_not_there_are_not_noticed(reason, monkeypatch):
    case = Case(SHAPES[0], LAST)
    if reason == "off":
        monkeypatch.setenv("HYBRIDPAR_KERNELS", "off")
    records = all_records(SHAPES[0], **({"stock_ms": 0.5} if reason == "slower" else {}))
    with tuned(records, StandIn(broken=reason == "broken")) as kernels:
        close(case.result(depthwise_conv2d), case.truth)
    assert not any(kernels.calls.values())


@pytest.mark.parametrize(("kept", "calls"), [([], 1), ([Direction.INPUT_GRADIENT], 1), (list(Direction)[1:], 0)])
def test_gradients_of_torch_are_one_call(kept, calls, monkeypatch):
    backward, counted = torch.ops.aten.convolution_backward, []

    def count(*arguments: object) -> object:
        counted.append(arguments[-1])
        return backward(*arguments)

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", count)
    case = Case(SHAPES[0], LAST)
    records = [one for one in all_records(SHAPES[0]) if one.direction in (Direction.FORWARD, *kept)]
    with tuned(records):
        close(case.result(depthwise_conv2d), case.truth)
    assert len(counted) == calls


def test_who_watches_sees_the_operation():
    case = Case(SHAPES[0], LAST)
    with tuned(all_records(SHAPES[0])):
        graph = make_fx(lambda x: depthwise_conv2d(x, case.weight, None, *case.numbers))(case.x).graph
        assert torch.ops.aten.convolution.default in {node.target for node in graph.nodes}
        grads = torch.func.grad(lambda x: depthwise_conv2d(x, case.weight, None, *case.numbers).square().sum())(case.x)
        with torch.autocast("cpu", torch.bfloat16):
            assert depthwise_conv2d(case.x, case.weight, None, *case.numbers).dtype is torch.bfloat16
    wide = case.x.double().requires_grad_()
    stock(wide, case.weight.double(), None, *case.numbers).square().sum().backward()
    assert wide.grad is not None
    close([grads], [wide.grad])


def test_a_result_that_lies_where_a_kernel_cannot_write_is_refused_by_name():
    padded = torch.zeros(64 + 16)
    start = (-padded.data_ptr() // 4) % 16 + 1  # one value behind a line's begin
    kernel = TunedKernel((), 0, align_out=64)
    with pytest.raises(KernelError, match="aligned to 64 bytes"):
        kernel(padded, padded, None, padded[start:])
    kernel(padded, padded, None, padded[start + 15 :])
