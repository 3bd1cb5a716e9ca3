"""The plan of a run: everything in which two runs of the same model differ, as typed, versioned JSON.

A plan is plain data: typed, versioned, JSON in and out, in a stable order so that two plans can be compared with a
text diff. Reading one never runs code. The planner writes plans, and simulator, drawer and executor read them. All
sections but `partition` are optional: a plain data-parallel run has a plan of a single stage.

A plan belongs to one model: `model.fingerprint` covers names, shapes and dtypes of its parameters and buffers, and a
plan made for another model is refused. A plan of another version is refused too: it has to be made again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from hybridpar.errors import PlanError, ScheduleError, cannot_write, shortened
from hybridpar.formats.file_reader import first_problem, read_json
from hybridpar.formats.output_files import written_aside
from hybridpar.schedule.actions import Schedule, read_schedule
from hybridpar.schedule.costs import Costs, Link, unit_ms
from hybridpar.schedule.layout import Edge, Layout
from hybridpar.schedule.schedules import ScheduleRequest, make_all, order_of_replica

PLAN_VERSION: Literal[2] = 2

#: Bytes of a file; what can be wrong with it takes hundreds of times as many.
_MOST_BYTES = 4 << 20


class _Section(BaseModel):
    """Base of all sections: unknown keys are errors, because a misspelt key would silently do nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelInfo(_Section):
    """Which model the plan is for."""

    name: str
    fingerprint: str
    parameters: int = Field(ge=0, description="number of parameter elements")
    input: tuple[int, ...] | None = Field(None, description="shape of one sample, without the batch dimension")


class Stage(_Section):
    """A convex set of units. Times are milliseconds per micro-batch, sizes bytes per micro-batch."""

    units: tuple[str, ...] = Field(description="names of graph nodes, in topological order")
    forward_ms: float | None = Field(None, ge=0)
    backward_ms: float | None = Field(None, ge=0)
    parameter_bytes: int = Field(0, ge=0)
    saved_bytes: int | None = Field(None, ge=0, description="activations kept for backward, one micro-batch")
    cut_bytes: int | None = Field(None, ge=0, description="bytes this stage sends forward")

    @property
    def ms(self) -> float | None:
        """Forward and backward pass together; None where a time is not known."""
        return None if self.forward_ms is None or self.backward_ms is None else self.forward_ms + self.backward_ms


class Partition(_Section):
    """How the graph is cut."""

    stages: tuple[Stage, ...] = Field(min_length=1)
    cut: str = Field("whole", description="what the cut was made for, in words")
    micro_batch: int | None = Field(None, ge=1, description="samples per micro-batch that the times are for")
    edges: tuple[Edge, ...] = Field((), description="what flows between stages, per micro-batch")

    @property
    def balance(self) -> float | None:
        """The longest stage over the mean of all; 1 where none takes any time, None where a time is not known."""
        times = [stage.ms for stage in self.stages if stage.ms is not None]
        if len(times) < len(self.stages):
            return None
        return max(times) * len(times) / sum(times) if any(times) else 1.0

    @property
    def cut_bytes(self) -> int:
        """Bytes that all stages send forward."""
        return sum(stage.cut_bytes or 0 for stage in self.stages)


_Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _read_layout(value: object) -> Layout:
    """A layout from the texts that a plan has for it."""
    if isinstance(value, Layout):
        return value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) for text in value):
        raise ValueError('it is a list with a text for every replica: the rank of each stage, as "0,1"')
    return Layout.parse(value)


class Placement(_Section):
    """Which worker and lane each stage gets."""

    layout: Annotated[InstanceOf[Layout], BeforeValidator(_read_layout), PlainSerializer(Layout.texts)] = Field(
        description="for every replica the rank of each stage; `1.2` is lane 2 of rank 1"
    )
    device: str = "cpu"
    shares: tuple[_Share, ...] | None = Field(
        None, description="what each replica gets of a batch, in any unit; without them equal parts"
    )

    @model_validator(mode="after")
    def _numbers_fit(self) -> Placement:
        count = self.layout.replicas
        if self.shares is not None and (len(self.shares) != count or sum(self.shares) == 0):
            raise ValueError(f"shares are {self.shares}; every replica has one of {count}, and not all are 0")
        return self


class Pipeline(_Section):
    """How micro-batches flow."""

    schedule: str = "accumulate"
    rows: tuple[tuple[str, ...], ...] = Field(
        (),
        description="for each replica that differs from others the passes of every lane, in their order; without them, "
        "or for another number of micro-batches, they are made by the schedule's name",
    )
    link_bytes_per_second: float | None = Field(
        None, gt=0, description="that rows are made for; without it transfers take no time"
    )
    micro_batches: int = Field(1, ge=1)
    recompute: tuple[int, ...] = Field((), description="stages whose activations are recomputed in backward")
    offload: tuple[int, ...] = Field((), description="stages whose activations wait in the host's memory")


class SyncRule(_Section):
    """Which codec the parameters matching a pattern use; the first match wins.

    Until the workers of a run have agreed on them, a single rule may hold what `--compress` was given: `auto`, the name
    of a file, or several rules.
    """

    pattern: str = "*"
    codec: str = "none"


class Sync(_Section):
    """How gradients are exchanged."""

    lanes: int = Field(2, ge=1)
    bucket_bytes: int = Field(8 << 20, ge=1)
    policy: tuple[SyncRule, ...] = (SyncRule(),)
    batch_norm: Literal["pooled", "local", "sync", "frozen"] = "pooled"
    #: Steps that workers train on their own between two exchanges; None where each step's gradients are exchanged.
    outer: int | None = Field(None, ge=1)
    shard_optimizer: bool = Field(False, description="replicas divide the optimizer's state among each other")

    @property
    def codec(self) -> str:
        """The codecs, as `--compress` takes them."""
        if len(self.policy) == 1 and self.policy[0].pattern == "*":
            return self.policy[0].codec
        return "; ".join(f"{rule.pattern} -> {rule.codec}" for rule in self.policy)

    @property
    def groups(self) -> int:
        """Groups of the replicas: one for each sync lane, and one each for BatchNorm and optimizer that need them."""
        return self.lanes + (self.batch_norm == "sync") + self.shard_optimizer


class Compute(_Section):
    """How a step is computed, in the words of the options of a run."""

    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    kernels: str = Field("off", description="`off`, `auto`, or the file of a database of tuned kernels")
    amp: Literal["none", "bf16", "fp16"] = "none"
    compile: bool = False
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    threads: int | None = Field(None, ge=1, description="of a worker on a CPU; without it as many as it was given")

    @property
    def options(self) -> dict[str, Any]:
        """The options of a run by which it is computed so."""
        return self.model_dump(exclude={"threads"})


class KernelChoice(_Section):
    """What one operation of one layer runs on; `batch_norm_act` is a norm with its activation, both ways."""

    layer: str
    direction: Literal["forward", "input_gradient", "weight_gradient", "batch_norm_act"]
    kernel: str = "stock"


class Kernels(_Section):
    """Kernel choices per layer and direction; what is not named is stock."""

    database: str | None = Field(None, description="what decided")
    choices: tuple[KernelChoice, ...] = ()


class Measured(_Section):
    """What the plan was computed from, so that it can be computed again."""

    device: str = ""
    threads: int | None = Field(None, ge=1)
    dtype: str = "float32"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    profile: str | None = Field(None, description="`measured`, or `analytic` where nothing was run")
    noise: float | None = Field(None, ge=0, description="relative spread of the profile's passes")
    seed: int | None = None
    versions: dict[str, str] = Field(default_factory=dict)


class StepFigures(_Section):
    """What a step costs: times without waiting for data; bytes and memory of a worker, the most of any for memory."""

    step_ms: float | None = Field(None, ge=0)
    bubble: float | None = Field(None, ge=0, le=1)
    exposed_sync_ms: float | None = Field(None, ge=0)
    bytes_sent_per_step: int | None = Field(None, ge=0)
    peak_saved_bytes: int | None = Field(None, ge=0, description="kept for backward passes")
    memory_bytes: int | None = Field(None, ge=0, description="of a device, for everything that training needs")

    @property
    def compute_ms(self) -> float | None:
        """What a step takes besides its exposed exchange."""
        return None if self.step_ms is None else round(self.step_ms - (self.exposed_sync_ms or 0.0), 3)


class Plan(_Section):
    """A whole plan. See the module header for what it is and who reads it."""

    version: Literal[2] = PLAN_VERSION
    model: ModelInfo
    partition: Partition
    placement: Placement | None = None
    pipeline: Pipeline | None = None
    sync: Sync | None = None
    compute: Compute | None = None
    kernels: Kernels | None = None
    measured: Measured | None = None
    predicted: StepFigures | None = Field(None, description="what the simulator says")
    checksum: str | None = Field(
        None, description="the digest of the plan as it was made or followed, so that an edited one is known"
    )
    inputs: dict[str, Any] | None = Field(None, description="what a search read, to repeat it; see hybridpar.planner")

    @model_validator(mode="after")
    def _sections_agree(self) -> Plan:
        count = len(self.partition.stages)
        if self.placement is not None and self.placement.layout.stages != count:
            raise ValueError(f"the layout has {self.placement.layout.stages} stages, but the partition has {count}")
        pipeline = self.pipeline or Pipeline()
        for name, named in (("recompute", pipeline.recompute), ("offload", pipeline.offload)):
            if any(not 0 <= stage < count for stage in named):
                raise ValueError(f"{name} names stages {named}, but there are only {count}")
        seen: set[str] = set()
        for stage in self.partition.stages:
            twice = seen.intersection(stage.units)
            if twice:
                raise ValueError(f"unit {min(twice)!r} is in two stages")
            seen.update(stage.units)
        return self

    def pass_costs(self, scale: float = 1.0) -> Costs | None:
        """What passes take, with what is computed again, and the link; None where a time is not known."""
        pairs = [(one.forward_ms, one.backward_ms) for one in self.partition.stages]
        known = [(ahead * scale, back * scale) for ahead, back in pairs if ahead is not None and back is not None]
        if len(known) < len(pairs):
            return None
        pipeline = self.pipeline or Pipeline()
        backward = tuple(back + ahead * (index in pipeline.recompute) for index, (ahead, back) in enumerate(known))
        link = Link(bytes_per_second=pipeline.link_bytes_per_second)
        return Costs(tuple(ahead for ahead, _ in known), backward, link=link)

    @property
    def workers(self) -> int | None:
        """Workers that the plan is for; None where it does not say."""
        return None if self.placement is None else self.placement.layout.workers

    @property
    def layout(self) -> Layout:
        """Where stages run; where the plan does not say, on lanes of a single worker."""
        if self.placement is not None:
            return self.placement.layout
        return Layout.dealt(len(self.partition.stages), len(self.partition.stages), workers=1)

    def orders(self, micro_batches: int | None = None) -> tuple[Schedule, ...]:
        """The passes of every lane, for each replica that differs from others; default: of its micro-batches."""
        pipeline = self.pipeline or Pipeline()
        count = pipeline.micro_batches if micro_batches is None else micro_batches
        rows = self._read_rows() if pipeline.rows else ()
        if rows and all(schedule.micro_batches == count for schedule in rows):
            return rows
        saved = tuple(stage.saved_bytes for stage in self.partition.stages if stage.saved_bytes is not None)
        link = Link(bytes_per_second=pipeline.link_bytes_per_second)
        costs = self.pass_costs() or Costs(*unit_ms(self.layout.stages), link=link)
        costs = replace(costs, saved_bytes=saved if len(saved) == self.layout.stages else None)
        request = ScheduleRequest(self.layout, count, costs)
        return make_all(pipeline.schedule, request, self.partition.edges or None)

    def _read_rows(self) -> tuple[Schedule, ...]:
        """The passes that the plan holds; each of them must be there once, for each replica that differs."""
        from hybridpar.schedule.check import check  # most runs need none

        pipeline, kinds, made = self.pipeline or Pipeline(), self.layout.kinds, []
        try:
            if len(pipeline.rows) != len(kinds):
                raise ScheduleError(f"passes of {len(pipeline.rows)} replica(s), where {len(kinds)} differ")
            for index, lanes in zip(kinds, pipeline.rows, strict=True):
                layout, name = self.layout.replica(index, self.partition.edges or None), pipeline.schedule
                if not self.layout.is_equal:
                    name = order_of_replica(name, layout)
                made.append(read_schedule("\n".join(lanes), name))
                check(made[-1], layout)
        except ScheduleError as error:
            raise PlanError(
                f"the passes of the plan cannot be run: {error.what}",
                "pipeline.rows has each forward and backward pass of every stage and micro-batch once, on its lane.",
                "Undo the edit, or delete pipeline.rows: then the schedule makes them.",
            ) from error
        return tuple(made)

    @property
    def digest(self) -> str:
        """Equal for plans that do the same, whatever was predicted or measured of them."""
        compute, pipeline, sync = self.compute or Compute(), self.pipeline or Pipeline(), self.sync or Sync()
        facts = (
            [stage.units for stage in self.partition.stages],
            (self.layout.texts(), self.placement and self.placement.shares),
            compute.model_dump(mode="json"),
            pipeline.model_dump(mode="json"),
            sync.model_dump(mode="json"),
        )
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def is_edited(self) -> bool:
        """Whether it does not do any more what it did when it was made, so that its prediction does not hold."""
        return self.checksum != self.digest

    def to_json(self) -> str:
        """The plan as indented JSON with a fixed key order and absent sections left out."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan; the file is replaced as a whole or not at all.

        Args:
            path: The file.

        Raises:
            PlanError: The file cannot be written.
        """
        try:
            with written_aside(Path(path)) as aside:
                aside.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise PlanError(
                cannot_write(Path(path), error),
                "A plan is a file in a directory that exists, with room for some kilobytes.",
                "Name another place.",
            ) from error


class ResolvedPlan(Plan):
    """A plan that leaves nothing open: what a run does, as trainer, engine and pipeline read it.

    Stages of a model that has yet to be cut have no units.
    """

    placement: Placement
    pipeline: Pipeline
    sync: Sync
    compute: Compute
    measured: Measured

    @property
    def is_staged(self) -> bool:
        """Whether the model is cut into stages."""
        return len(self.partition.stages) > 1

    @property
    def channels_last(self) -> bool:
        """Whether images and activations are in channels_last."""
        return self.compute.memory_format == "channels_last"

    def with_rows(self) -> ResolvedPlan:
        """The plan with the passes of every lane, where they have yet to be made."""
        rows = tuple(tuple(order.to_csv().splitlines()) for order in self.orders())
        return self.model_copy(update={"pipeline": self.pipeline.model_copy(update={"rows": rows})})

    def with_codec(self, codec: str) -> ResolvedPlan:
        """The plan with other codecs."""
        return self.model_copy(update={"sync": self.sync.model_copy(update={"policy": (SyncRule(codec=codec),)})})

    def micro_batch_samples(self, batch_size: int) -> int:
        """Samples of a micro-batch; where they do not divide evenly some micro-batches have one more."""
        return max(2, batch_size // (self.layout.replicas * self.pipeline.micro_batches))


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a JSON file. Runs no code from it.

    Args:
        path: The file.

    Returns:
        The plan.

    Raises:
        PlanError: The file is missing, is not a plan, or is of a version this package cannot read.
    """
    fix = "Name a plan that `hybridpar plan` wrote, or write it again."
    data = read_json(Path(path), "the plan", PlanError, fix, why="A plan is one JSON object.", most=_MOST_BYTES)
    return parse_plan(data, shortened(path))


def parse_plan(data: object, source: str = "the plan") -> Plan:
    """Check and type the data of a plan that was read from somewhere."""
    if not isinstance(data, dict) or "version" not in data:
        raise PlanError(f"{source} is not a plan", "A plan is a JSON object with the key `version`.")
    if data["version"] != PLAN_VERSION:
        raise PlanError(
            f"{source} has plan version {shortened(repr(data['version']))}",
            f"This hybridpar reads version {PLAN_VERSION}.",
            "Make the plan again with `hybridpar plan`.",
        )
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise PlanError(
            f"{source} is not a valid plan: {where or 'plan'}: {problem}",
            fix="Undo the edit, or write the plan again with `hybridpar plan`.",
        ) from error
