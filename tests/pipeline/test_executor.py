"""The executor against its oracle: one process, the unsplit model, the same micro-batches."""

from __future__ import annotations

import copy
import functools
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.errors import ScheduleError
from hybridpar.lanes import Lanes
from hybridpar.pipeline.engine import PipelineEngine
from hybridpar.pipeline.executor import Executor
from hybridpar.pipeline.stage_run import Mailbox
from hybridpar.schedule.actions import Action, Kind
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.schedules import SCHEDULES, ScheduleRequest, make
from tests.lanes.checked import Checker
from tests.partition.nets import CASES as HARD_MODELS
from tests.pipeline.oracle import (
    MODELS,
    Residuals,
    Run,
    Setting,
    adamw,
    assert_equal,
    batches_of,
    compare,
    cut,
    cut_evenly,
    images,
    options_of,
    places,
    run_step,
    seeded,
    state_of,
    step_optimizer,
    train_stages,
    train_whole,
    with_sync,
)


def fits(schedule: str, kind: str) -> bool:
    """Whether a schedule can order stages that are placed so."""
    try:
        make(schedule, ScheduleRequest(Layout.dealt(4, 4 if kind == "linear" else 2, kind), 4))
    except ScheduleError:
        return False
    return True


CASES = [
    (schedule, kind, stages)
    for schedule in SCHEDULES
    for kind in ("linear", "loop", "v")
    for stages in ((2, 3, 4) if kind == "linear" else (2, 4))
    if fits(schedule, kind)
]
LANES = [("1f1b", "linear", 3), ("interleaved", "loop", 4), ("greedy", "v", 4)]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_any_model(name: str, stages: int) -> None:
    # Where a tensor has users in several stages, each stage adds up its own gradients first.
    compare(MODELS[name], stages, exact=name != "dense", schedule="accumulate" if stages == 1 else "1f1b")


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.sweep), pytest.param(2, marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize(("schedule", "kind", "stages"), CASES)
def test_every_access_is_ordered_and_steps_overlap_without_a_trace(
    schedule: str, kind: str, stages: int, seed: int
) -> None:
    check = Checker(seed, max_delay=0.0005)
    compare(Residuals, stages, kind=kind, schedule=schedule, check=check, together=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("schedule", "kind", "stages"), LANES)
def test_every_access_is_ordered_in_any_model(name: str, schedule: str, kind: str, stages: int) -> None:
    check = Checker(1, max_delay=0.0005)
    exact = name != "dense"
    compare(MODELS[name], stages, kind=kind, schedule=schedule, exact=exact, check=check, together=True)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
@pytest.mark.parametrize(("schedule", "kind", "stages"), [*LANES, ("gpipe", "linear", 4)])
def test_any_number_of_micro_batches(micro_batches: int, schedule: str, kind: str, stages: int) -> None:
    setting = Setting(micro_batches)
    compare(Residuals, stages, setting, kind=kind, schedule=schedule, batches=batches_of(14, 2), together=True)


@pytest.mark.parametrize("check", [False, True])
def test_uneven_micro_batches_and_batches(check: bool) -> None:
    # The third batch brings sizes that were not seen before, while the step before it still runs.
    batches = [images(samples, seed=samples) for samples in (10, 10, 7, 10, 5, 13)]
    for seed in range(3 if check else 1):
        checker = Checker(seed, max_delay=0.002) if check else None
        compare(Residuals, 3, batches=batches, check=checker, together=True)


class TestOptions:
    """What a step can be asked for."""

    @pytest.mark.parametrize("pool", [True, False])
    @pytest.mark.parametrize("guard", [True, False])
    def test_batch_norm_and_guard(self, pool: bool, guard: bool) -> None:
        setting = with_sync(Setting(), guard=guard, pool_batch_norm=pool)
        run = compare(Residuals, 3, setting, check=Checker(0, max_delay=0.0005), together=True)
        assert all((norm is not None) is guard for norm in run.norms)

    @pytest.mark.parametrize("guard", [True, False])
    def test_clipping_is_by_the_norm_over_all_stages(self, guard: bool) -> None:
        setting = with_sync(Setting(), clip_norm=0.1, guard=guard)
        run = compare(Residuals, 3, setting, exact=False)
        assert min(norm for norm in run.norms if norm is not None) > 0.1

    def test_clipping_above_the_norm_changes_nothing(self) -> None:
        compare(Residuals, 3, with_sync(Setting(), clip_norm=1e6))

    def test_adamw(self) -> None:
        compare(Residuals, 3, Setting(optimizer=adamw))

    def test_the_users_own_loss(self) -> None:
        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return F.multi_margin_loss(logits, targets) + 0.1 * logits.square().mean()

        compare(Residuals, 3, Setting(loss=loss))

    def test_bfloat16(self) -> None:
        run = compare(Residuals, 3, Setting(autocast=True), schedule="gpipe")
        exact = compare(Residuals, 3, Setting(), schedule="gpipe")
        assert run.losses != exact.losses

    @pytest.mark.parametrize("stages", [2, 3])
    def test_channels_last(self, stages: int) -> None:
        def make() -> nn.Module:
            return Residuals(norm=False).to(memory_format=torch.channels_last)

        batches = [(x.to(memory_format=torch.channels_last), y) for x, y in batches_of(8)]
        seen: list[bool] = []

        def look(engine: PipelineEngine) -> None:
            assert engine.borders.first is not None
            seen.extend(part.channels_last for part in engine.borders.first.parts.values() if len(part.shape) == 4)

        compare(make, stages, batches=batches, on_engine=look)
        assert seen
        assert all(seen)


def total(output: Any, target: Tensor) -> Tensor:
    """A mean over the samples of whatever tensors an output has inside."""
    if isinstance(output, Tensor):
        return (output.float().flatten(1) if output.dim() > 1 else output[:, None]).square().mean() + 0 * target.sum()
    parts = output.values() if isinstance(output, dict) else output
    sums = [total(part, target) for part in parts if part is not None]
    return functools.reduce(torch.add, sums)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", [name for name in HARD_MODELS if name != "dropping"])
def test_models_that_are_hard_to_cut(name: str, schedule: str, stages: int) -> None:
    make, shape = HARD_MODELS[name]
    setting = Setting(2, loss=total)
    batches = [(torch.randn(8, *shape[1:]), torch.zeros(8)) for _ in range(2)]
    model = seeded(make)
    oracle = train_whole(copy.deepcopy(model), batches, setting)
    parts = cut_evenly(model, batches[0][0][:4], stages)
    check = Checker(0, max_delay=0.0005)
    run = train_stages(model, parts, batches, setting, places(stages), schedule=schedule, check=check)
    assert_equal(run, oracle, exact=False)


class Outputs(nn.Module):
    """What several stages made in a dict, with a tuple and nothing at all inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        a = torch.relu(self.first(x))
        b = torch.relu(self.second(a))
        return {"out": self.third(b), "aux": (a, b), "none": None}


@pytest.mark.parametrize("stages", [2, 3])
def test_outputs_are_the_models_own(stages: int) -> None:
    seen: list[Any] = []

    def loss(output: Any, target: Tensor) -> Tensor:
        seen.append((list(output), type(output["aux"]), output["none"]))
        return total(output, target)

    compare(Outputs, stages, Setting(loss=loss))
    assert seen == [(["out", "aux", "none"], tuple, None)] * len(seen)


class TwoInputs(nn.Module):
    """The second input is used in the last stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.head(self.body(x) * scale)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_inputs_reach_the_stage_that_uses_them(stages: int) -> None:
    from hybridpar.partition.planning import partition_model

    model = seeded(TwoInputs)
    whole = copy.deepcopy(model)
    x, scale, y = torch.randn(8, 6), torch.randn(8, 6), torch.randint(0, 5, (8,))
    parts = partition_model(model, (x[:4], scale[:4]), stages, measure=False).stages
    batches = list(zip(zip(x.chunk(2), scale.chunk(2), strict=True), y.chunk(2), strict=True))
    for (a, b), target in batches:
        (F.cross_entropy(whole(a, b), target) / 2).backward()

    class Given(Setting):
        def of_replica(self, batch: Any, replica: int) -> Any:
            return batches

    run = train_stages(model, parts, [(x, y)], Given(2), places(stages), schedule="looped_bfs")
    for name, parameter in whole.named_parameters():
        assert torch.equal(run.gradients[0][name], parameter.grad), name


# ----------------------------------------------------------------- roll-back


class Poisoned(nn.Module):
    """Buffers of all kinds, and a switch that makes the gradient of one parameter NaN, and of no other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.bad = False
        self.stem.weight.register_hook(lambda gradient: gradient * math.nan if self.bad else gradient)
        self.body = nn.Sequential(*(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)) for _ in range(3)))
        self.count = Counter()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.count(self.body(self.stem(x))).mean((2, 3)))


class Counter(nn.Module):
    """A buffer that every forward pass writes to. Looks at its data, so that the tracer keeps it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if bool(torch.isinf(x.detach()).any()):
            raise FloatingPointError("overflow")
        self.calls.add_(1)
        return x


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_one_bad_gradient_rolls_all_stages_back(schedule: str, pool: bool) -> None:
    setting = with_sync(Setting(), pool_batch_norm=pool)
    model = seeded(Poisoned)
    batches = batches_of(8, 4)
    parts = cut(model, batches[0][0][:2], 3)
    assert "stem.weight" in dict(parts[0].named_parameters())
    states: list[dict[str, Tensor]] = []
    optimizers: list[torch.optim.Optimizer] = []

    def make(module: nn.Module) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.AdamW(module.parameters(), lr=0.01))
        return optimizers[-1]

    run = _with_a_bad_step(model, parts, batches, setting, make, schedule, states, optimizers)
    assert run.committed == [True, True, False, True]
    before, after, last = states[1:]
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert any(not torch.equal(tensor, last[name]) for name, tensor in after.items())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in last.values())


def _with_a_bad_step(
    model: Poisoned,
    parts: Any,
    batches: Any,
    setting: Setting,
    make: Any,
    schedule: str,
    states: list[dict[str, Tensor]],
    optimizers: list[torch.optim.Optimizer],
) -> Run:
    """Trains on all batches, the third of which goes bad, and keeps the state after each."""
    from hybridpar.comm.world import World
    from hybridpar.lanes import Lanes

    def step_of(stage: nn.Module) -> Any:
        optimizer = make(stage)
        return lambda factor, commit, unwritten: step_optimizer(optimizer, unwritten)

    run = Run()
    with Lanes("cpu") as lanes:
        options = options_of(places(len(parts)), setting.micro_batches, schedule, sync=setting.sync)
        engine = PipelineEngine(model, parts, World(), lanes, setting.loss, step_of, options, setting.micro_batches)
        for number, batch in enumerate(batches):
            model.bad = number == 2
            outcome = run_step(engine, setting.of_replica(batch, 0), len(batch[1]))
            engine.wait()
            run.committed.append(outcome.committed)
            assert (outcome.bad_parameter == "stem.weight") is (number == 2)
            states.append(state_of(model, optimizers))
        engine.close()
    return run


# --------------------------------------------------------------- recomputing


@pytest.mark.parametrize(
    ("schedule", "pool"),
    [
        *(("1f1b", True), ("gpipe", True), ("gpipe", False)),
        pytest.param("1f1b", False, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("recompute", [(0,), (1, 2), (0, 1, 2)])
def test_recomputing_changes_nothing_but_memory(recompute: tuple[int, ...], schedule: str, pool: bool) -> None:
    setting = with_sync(Setting(), pool_batch_norm=pool)
    compare(Residuals, 3, setting, schedule=schedule, recompute=recompute, check=Checker(0, 0.0005), together=True)


def saved_while_training(recompute: tuple[int, ...]) -> int:
    """Bytes that forward passes of the first stage really keep, as autograd sees them."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.untyped_storage().nbytes()
        return tensor

    model = seeded(Residuals)
    batch = images(8)
    parts = cut(model, batch[0][:2], 2)
    forward = parts[0].forward

    def watched(*leaves: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*leaves)

    parts[0].forward = watched  # type: ignore[method-assign]
    train_stages(model, parts, [batch], Setting(), places(2), schedule="gpipe", recompute=recompute)
    return kept


def test_recomputing_saves_bytes() -> None:
    # The first pass keeps nothing, the second as much as ever; the example run is one more in both.
    plain, again = (saved_while_training(recompute) for recompute in ((), (0,)))
    assert 0 < again <= plain
    model = seeded(Residuals)
    batch = images(8)
    parts = cut(model, batch[0][:2], 2)
    saved = [
        train_stages(model, parts, [batch], Setting(), places(2), schedule="gpipe", recompute=recompute).saved_bytes
        for recompute in ((), (0,), (0, 1))
    ]
    assert saved[0] > saved[1] > saved[2]


class Counting(Residuals):
    """Every forward pass writes to a buffer that is not BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.count(x))


@pytest.mark.parametrize("pool", [True, False])
def test_recomputing_leaves_no_second_trace_in_buffers(pool: bool) -> None:
    run = compare(Counting, 2, with_sync(Setting(4), pool_batch_norm=pool), recompute=(0, 1))
    assert run.state["count.calls"] == 4 * 3


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_is_frozen_after_the_cut_stays_as_it_is(schedule: str) -> None:
    model = seeded(Residuals)
    batches = batches_of(8)
    parts = cut(model, batches[0][0][:2], 3)
    for module in (model.stem, model.convs[0], model.convs[2], model.norms[1]):
        module.requires_grad_(False)
    oracle = train_whole(copy.deepcopy(model), batches, Setting())
    run = train_stages(model, parts, batches, Setting(), places(3), schedule=schedule, together=True)
    assert_equal(run, oracle)


@pytest.mark.parametrize("kind", [Kind.SEND_FORWARD, Kind.SEND_BACKWARD])
def test_an_activation_that_is_missing_is_no_zero(kind: Kind) -> None:
    sent: list[list[Tensor]] = []
    sender = SimpleNamespace(send=lambda tensors, parts: sent.append(tensors))
    part = SimpleNamespace(empty=lambda device: torch.ones(2, device=device))
    facts = SimpleNamespace(parts={"x": part}, gradients=("x",))
    lanes = Lanes("cpu")
    executor: Any = SimpleNamespace(
        borders=SimpleNamespace(names=lambda producer, user: ["x"]),
        **{"_ranks": [0, 1], "_senders": {1: (sender, lanes.caller)}, "_world": World()},
        **{"_mailbox": Mailbox(), "_lanes": lanes},
    )
    executor._crossing = functools.partial(Executor._crossing, executor)
    step: Any = SimpleNamespace(facts=[facts], sent=[])
    send = functools.partial(Executor._send, executor, Action(0, kind, 0, 1), 1, step)
    with pytest.raises(KeyError) if kind is Kind.SEND_FORWARD else nullcontext():
        send()
    assert [tensor.tolist() for (tensor,) in sent] == ([] if kind is Kind.SEND_FORWARD else [[0.0, 0.0]])
    lanes.close()
