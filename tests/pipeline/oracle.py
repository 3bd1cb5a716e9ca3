"""Trains the unsplit model in one process and the pipeline's stages, and compares the results.

The oracle here is a loop that anybody would write: forward, backward, step. It shares no code with the pipeline but
the optimizer of torch. `Run` is what both leave behind, and `assert_equal` compares all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hybridpar.comm.world import World
from hybridpar.partition.planning import partition_model, stages_from_plan
from hybridpar.partition.split import split_model
from hybridpar.partition.stage import Stage
from hybridpar.partition.trace import trace_model
from hybridpar.partition.units import find_units
from hybridpar.pipeline.engine import PipelineEngine, PipelineOptions
from hybridpar.pipeline.step import LateOutcome, StepRequest
from hybridpar.schedule.costs import Costs, Link, unit_ms
from hybridpar.schedule.layout import Layout
from hybridpar.schedule.schedules import ScheduleRequest, make_all
from hybridpar.sync.pieces import Gradients, can_step, step_in_pieces
from hybridpar.sync.stage_gradients import SyncOptions
from tests.lanes.checked import Checker, Lanes

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Any], Tensor]


def places(stages: int, kind: str = "linear", *, workers: int = 1) -> Layout:
    """Where stages run: `linear` has a lane for each, `loop` and `v` have half as many lanes as stages."""
    lanes = stages if kind == "linear" else stages // 2
    lane_of = Layout.dealt(stages, lanes, kind).lane_of
    return Layout.repeated((lane * workers // lanes, lane) for lane in lane_of)


def options_of(
    layout: Layout,
    micro_batches: int,
    schedule: str = "1f1b",
    *,
    bytes_per_second: float | None = None,
    **options: Any,
) -> PipelineOptions:
    """Options of a pipeline that follows a schedule."""
    costs = Costs(*unit_ms(layout.stages), link=Link(bytes_per_second=bytes_per_second))
    request = ScheduleRequest(layout, micro_batches, costs)
    return PipelineOptions(layout, make_all(schedule, request), **options)


def images(samples: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(0, 5, (samples,), generator=generator)


def batches_of(samples: int, steps: int = 3) -> list[Batch]:
    return [images(samples, seed=step) for step in range(steps)]


#: Models that were cut before, with their stages.
_cuts: dict[Any, tuple[nn.Module, list[Stage]]] = {}


def cut(model: nn.Module, example: Tensor, stages: int, *, relay: bool = False) -> list[Stage]:
    """Stages of about equal cost; times are estimated, so the cut is always the same.

    Cutting takes half the time of a test, so a model like one that was cut before gets copies of those stages.
    """
    tensors = [*model.parameters(), *model.buffers()]
    form = [(one.shape, one.stride(), one.dtype, one.requires_grad) for one in (*tensors, example)]
    key = type(model), repr(model), *form, stages, relay
    if key not in _cuts:
        made = partition_model(model, example, stages, measure=False)
        parts = stages_from_plan(model, made.plan, example, relay=True) if relay else made.stages
        _cuts[key] = copy.deepcopy((model, parts))
        return parts
    like, parts = _cuts[key]
    before = [*like.modules(), *like.parameters(), *like.buffers()]
    return copy.deepcopy(parts, {id(old): new for old, new in zip(before, [*model.modules(), *tensors], strict=True)})


def cut_evenly(model: nn.Module, example: Tensor, stages: int) -> list[Stage]:
    """Stages of about equally many units, for models where costs leave some stage without anything interesting."""
    units = find_units(trace_model(model, (example,)), (example,))
    count = len(units.graph)
    return split_model(units, [index * stages // count for index in range(count)])


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


class Moments:
    """The BatchNorm rule: moments of all inputs of a step, pooled in float64. A layer that did not run stays."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self.saved = [[buffer.clone() for buffer in layer.buffers()] for layer in self.layers]
        self.seen: list[list[Tensor]] = [[] for _ in self.layers]
        self.hooks = [
            layer.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].detach().clone()))
            for layer, seen in zip(self.layers, self.seen, strict=True)
        ]

    def commit(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for layer, (mean, variance, tracked), seen in zip(self.layers, self.saved, self.seen, strict=True):
            if seen:
                values = torch.cat([x.double().transpose(0, 1).flatten(1) for x in seen], dim=1)
                layer.running_mean.copy_(mean.double().lerp(values.mean(1), 0.1))
                layer.running_var.copy_(variance.double().lerp(values.var(1), 0.1))
                layer.num_batches_tracked.copy_(tracked + 1)


@dataclass(frozen=True)
class Setting:
    """How a model is trained.

    Attributes:
        micro_batches: Per replica and step.
        optimizer: Made from a module.
        loss: Mean loss.
        sync: How gradients are synchronised.
        shares: Samples of every replica; empty for one replica that has all.
        others: Such shares of batches of other sizes.
        autocast: Run forward passes in bfloat16 where that is allowed.
    """

    micro_batches: int = 4
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    loss: Loss = F.cross_entropy
    sync: SyncOptions = field(default_factory=lambda: SyncOptions(bucket_bytes=1024))
    shares: tuple[int, ...] = ()
    others: tuple[tuple[int, ...], ...] = ()
    autocast: bool = False

    def of_replica(self, batch: Batch, replica: int) -> list[Batch]:
        """The micro-batches of a replica; none where it has no sample."""
        size = len(batch[1])
        shares = next((one for one in self.others if sum(one) == size), self.shares or (size,))
        if shares[replica] == 0:
            return []
        start = sum(shares[:replica])
        mine = slice(start, start + shares[replica])
        parts = (tensor[mine].tensor_split(self.micro_batches) for tensor in batch)
        return list(zip(*parts, strict=True))

    def modes(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else nullcontext()


@dataclass
class Run:
    """What training left behind.

    Attributes:
        losses: Of every step.
        norms: Of every step's gradient.
        gradients: Of every step, by parameter; without those that are None.
        state: Parameters and buffers at the end, and the state of optimizers as `parameter/key`.
        committed: Whether each step counted.
        saved_bytes: What stages kept for their backward passes at most.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    committed: list[bool] = field(default_factory=list)
    saved_bytes: int = 0


def state_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    state[f"{names[parameter]}/{key}"] = value.clone()
    return state


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def train_whole(model: nn.Module, batches: Sequence[Batch], setting: Setting) -> Run:
    """The oracle. Each replica's micro-batches are accumulated by themselves, the sums are added in rank order.

    Where gradients are late, each step applies those of the step before.
    """
    optimizer = setting.optimizer(model)
    waiting: dict[str, Tensor] = {}
    run = Run()
    model.train()
    for batch in batches:
        moments = Moments(model) if setting.sync.pool_batch_norm else None
        totals: dict[str, Tensor] = {}
        loss_sum = 0.0
        for replica in range(len(setting.shares or (0,))):
            model.zero_grad()
            for inputs, targets in setting.of_replica(batch, replica):
                with setting.modes():
                    loss = setting.loss(model(inputs), targets) * (len(targets) / len(batch[1]))
                loss.backward()
                loss_sum += float(loss.detach().double())
            for name, gradient in gradients_of(model).items():
                totals[name] = totals[name] + gradient if name in totals else gradient
        if setting.sync.delayed:
            totals, waiting = waiting, totals
        squares = sum(float(gradient.double().square().sum()) for gradient in totals.values())
        run.losses.append(loss_sum)
        run.norms.append(squares**0.5)
        for name, parameter in model.named_parameters():
            parameter.grad = totals.get(name)
        if setting.sync.clip_norm is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], setting.sync.clip_norm)
        run.gradients.append(gradients_of(model))
        optimizer.step()
        if moments is not None:
            moments.commit()
    run.state = state_of(model, [optimizer])
    return run


def train_stages(
    model: nn.Module,
    stages: Sequence[Stage],
    batches: Sequence[Batch],
    setting: Setting,
    where: Layout,
    *,
    schedule: str = "1f1b",
    world: World | None = None,
    check: Checker | None = None,
    together: bool = False,
    on_engine: Callable[[PipelineEngine], None] | None = None,
    **options: Any,
) -> Run:
    """The same by the pipeline. With several workers the returned gradients are those of this worker's stages.

    Args:
        check: Watches every access; its block is around all steps.
        together: Issue all steps before anything is read or waited for; the gradients between are then not known.
        on_engine: Called after the steps, before the engine is closed.
        options: More of `PipelineOptions`.
    """
    optimizers: list[torch.optim.Optimizer] = []

    def make(stage: nn.Module) -> Any:
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            return None
        optimizer = setting.optimizer(stage)
        optimizers.append(optimizer)
        return lambda factor, commit, unwritten: step_optimizer(optimizer, unwritten)

    world = world or World()
    run = Run()
    with Lanes("cpu", check=check) as lanes:
        replicas = world.size // where.workers
        layout = Layout.repeated(where.rows[0], replicas) if replicas > 1 else where
        pipeline = options_of(layout, setting.micro_batches, schedule, sync=setting.sync, **options)
        with setting.modes():
            engine = PipelineEngine(model, stages, world, lanes, setting.loss, make, pipeline, setting.micro_batches)
        try:
            outcomes = []
            with check or nullcontext():
                for batch in batches:
                    share = setting.of_replica(batch, engine.replica)
                    with setting.modes():
                        outcomes.append(run_step(engine, share, len(batch[1])))
                    if not together:
                        engine.wait()
                        run.gradients.append(gradients_of(model))
                engine.wait()
            run.losses = [outcome.loss for outcome in outcomes]
            run.norms = [outcome.grad_norm for outcome in outcomes]
            run.committed = [outcome.committed for outcome in outcomes]
            run.saved_bytes = engine.peak_saved_bytes
            if on_engine is not None:
                on_engine(engine)
            engine.collect()
            run.state = state_of(model, optimizers)
        finally:
            engine.close()
    return run


def run_step(
    engine: PipelineEngine,
    micro_batches: Sequence[tuple[Any, Any]],
    total: float | Callable[[], float],
    **request: Any,
) -> LateOutcome:
    """One step on this replica's share of so many samples."""
    samples = sum(len(targets) for _, targets in micro_batches)
    return engine.executor.step(StepRequest(micro_batches, samples, **request), total)


def compare(
    make: Callable[[], nn.Module],
    stages: int,
    setting: Setting | None = None,
    *,
    kind: str = "linear",
    schedule: str = "1f1b",
    batches: Sequence[Batch] | None = None,
    exact: bool = True,
    **options: Any,
) -> Run:
    """Train a model whole and as lanes of one worker, and demand the same."""
    setting = setting or Setting()
    batches = batches or batches_of(8)
    model = seeded(make)
    oracle = train_whole(copy.deepcopy(model), batches, setting)
    example = setting.of_replica(batches[0], 0)[0][0]
    parts = cut(model, example, stages)
    run = train_stages(model, parts, batches, setting, places(stages, kind), schedule=schedule, **options)
    assert_equal(run, oracle, exact=exact)
    return run


def seeded(make: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def assert_equal(run: Run, oracle: Run, *, exact: bool = True, rtol: float = 1e-5, whole: bool = True) -> None:
    """Losses, norms, gradients, parameters, buffers and optimizer state are those of the oracle.

    Args:
        exact: Bit for bit, where that can be: pooled moments and norms are summed in another order.
        whole: The run has the gradients and the optimizer state of all parameters, not only of its stages.
    """
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(oracle.losses), rtol=1e-6, atol=1e-7)
    for mine, theirs in zip(run.norms, oracle.norms, strict=True):
        assert mine is None or abs(mine - theirs) <= rtol * max(1.0, theirs)
    for step, (mine, theirs) in enumerate(zip(run.gradients, oracle.gradients, strict=bool(run.gradients))):
        assert mine.keys() <= theirs.keys()
        assert not whole or mine.keys() == theirs.keys(), sorted(mine.keys() ^ theirs.keys())
        for name, gradient in mine.items():
            _same(f"gradient of {name} in step {step}", gradient, theirs[name], exact, rtol)
    expected = oracle.state if whole else {key: oracle.state[key] for key in run.state}
    assert run.state.keys() == expected.keys(), sorted(run.state.keys() ^ expected.keys())
    for name, tensor in expected.items():
        _same(name, run.state[name], tensor, exact and "running" not in name, rtol)


def _same(name: str, value: Tensor, expected: Tensor, exact: bool, rtol: float) -> None:
    if exact:
        assert torch.equal(value, expected), f"{name}: differs by {(value - expected).abs().max()}"
    else:
        torch.testing.assert_close(value, expected, rtol=rtol, atol=1e-6, msg=lambda text: f"{name}: {text}")


def with_sync(setting: Setting, **options: Any) -> Setting:
    """The setting with other options of the sync."""
    return replace(setting, sync=replace(setting.sync, **options))


# ------------------------------------------------------------------ models


class Residuals(nn.Module):
    """Residual blocks, an identity that skips several stages, BatchNorm."""

    def __init__(self, width: int = 6, *, norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=not norm) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) if norm else nn.Identity() for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(x))
            y += x
            x = self.drop(self.relu(y))
        return self.head((x + first).mean((2, 3)))


class Dense(nn.Module):
    """A dense block: every layer uses all earlier ones, so every stage uses all earlier ones."""

    def __init__(self, growth: int = 4) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 + growth * n, growth, 3, padding=1) for n in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(growth) for _ in range(4))
        self.head = nn.Linear(3 + 4 * growth, 5)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            made.append(torch.relu(norm(conv(torch.cat(made, 1)))))
        return self.head(torch.cat(made, 1).mean((2, 3)))


class Shared(nn.Module):
    """A convolution that is called twice, and a scale that is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.scale = nn.Parameter(torch.full((6, 1, 1), 0.7))
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.between = nn.Conv2d(6, 6, 3, padding=1)
        self.last = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        x = torch.relu(self.twice(torch.relu(self.twice(x))))
        x = torch.relu(self.between(x)) * self.scale
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


class Frozen(Residuals):
    """Nothing to train at the beginning, so no gradient flows back over the first borders; and a frozen layer later."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.stem, self.convs[0], self.norms[0], self.convs[2]):
            module.requires_grad_(False)


class Unused(Residuals):
    """A layer that is never called, and a branch whose result nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(4, 4)
        self.branch = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.branch(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Detached(nn.Module):
    """A border is used twice, once without a gradient: a stage uses it only detached."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.side = nn.Conv2d(6, 6, 3, padding=1)
        self.body = nn.Conv2d(3, 6, 3, padding=1)
        self.last = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        side = self.side(torch.relu(self.stem(x)))
        body = torch.relu(self.body(x))
        return self.head((torch.relu(self.last(body)) + side.detach()).mean((2, 3)))


class Ignored(nn.Module):
    """A second head in the middle, whose output `first_output` ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.aux = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 5, 3, padding=1))
        self.last = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.stem(x))
        aux = self.aux(x).mean((2, 3))
        return self.head(torch.relu(self.last(x)).mean((2, 3))), aux


def first_output(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual": Residuals,
    "dense": Dense,
    "shared": Shared,
    "frozen": Frozen,
    "unused": Unused,
    "detached": Detached,
}

#: Those that need a loss of their own, by name.
MORE_MODELS: dict[str, Callable[[], nn.Module]] = {**MODELS, "ignored": Ignored}


def step_optimizer(optimizer: torch.optim.Optimizer, gradients: Gradients | None) -> Tensor | None:
    """Step any optimizer: in pieces where it can be stepped so, else on what is in `.grad`."""
    if gradients is not None and can_step(optimizer):
        return step_in_pieces(optimizer, gradients)
    squares = None if gradients is None else gradients.materialise()
    optimizer.step()
    return squares
