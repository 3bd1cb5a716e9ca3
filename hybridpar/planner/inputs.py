"""`PlannerInputs`: everything that a search reads, as plain data, recorded in the plan so that it can be repeated.

The same inputs give the same plan. They are JSON in the plan's section `inputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError, with_config

from hybridpar.config import TrainConfig
from hybridpar.errors import PlanError, UsageError, check, nearest
from hybridpar.formats.file_reader import first_problem
from hybridpar.machine.cluster_file import ClusterSpec, Hosts
from hybridpar.optim.build import state_copies
from hybridpar.plan import Plan
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.profile import ModelProfile
from hybridpar.planner.rates import CodecRate

Fidelity = Literal["exact", "close", "lossy"]


def check_fidelity(fidelity: str) -> None:
    """Refuse a fidelity that there is not."""
    known = get_args(Fidelity)
    check(fidelity in known, f"unknown fidelity {fidelity!r}", fix=nearest(fidelity, known))


@with_config(extra="forbid")
@dataclass(frozen=True)
class PlannerInputs:
    """What a search reads.

    Attributes:
        profile: The model.
        cluster: The machine.
        batch: Samples of a step, over all workers.
        fidelity: `exact`, `close` or `lossy`.
        rates: For every codec that was timed how fast it is on the device of the profile.
        optimizer_copies: Tensors per parameter that the optimizer keeps.
        averages: Of these the moving averages, which every replica keeps also where replicas divide the others.
        whole_model: Workers of a pipeline hold the whole model, though each trains its own stages: it was built to be
            measured.
        memory_margin: What a device must have over what is counted: allocators keep more than is in use.
        bucket_bytes: Size at which a bucket of gradients is full.
        sync_lanes: Buckets that a worker exchanges beside each other.
        most_stages: Stages of the longest pipeline that is tried.
        most_micro_batches: Micro-batches per step that are tried at most, where the model leaves their number open.
        fixed: What is decided, and not searched for.
        run_steps: Steps of the run that the plan is for; None where that is not known.

    Raises:
        UsageError: A value is out of its range; the message says which.
    """

    profile: ModelProfile
    cluster: ClusterSpec
    batch: int
    fidelity: Fidelity = "exact"
    rates: Mapping[str, CodecRate] = field(default_factory=dict)
    optimizer_copies: int = 1
    averages: int = 0
    whole_model: bool = False
    memory_margin: float = 1.1
    bucket_bytes: int = 8 << 20
    sync_lanes: int = 2
    most_stages: int = 16
    most_micro_batches: int = 32
    fixed: Fixed = field(default_factory=Fixed)
    run_steps: int | None = None

    def __post_init__(self) -> None:
        check_fidelity(self.fidelity)
        if empty := [codec for codec, rate in self.rates.items() if not rate.tried]:
            raise ValueError(f"no time of {empty[0]}")
        for name, least in (
            ("batch", 1),
            ("optimizer_copies", self.averages),
            ("averages", 0),
            ("memory_margin", 1.0),
            ("bucket_bytes", 1),
            ("sync_lanes", 1),
            ("most_stages", 1),
            ("most_micro_batches", 1),
        ):
            if not getattr(self, name) >= least:
                value = getattr(self, name)
                raise UsageError(f"{name} is {value}", f"It is {least} or more.", f"Use {name}={least}, for instance.")

    @property
    def workers(self) -> int:
        """Workers that can be used: each has at least one sample of a step."""
        return min(self.cluster.workers, self.batch)

    @cached_property
    def by_worker(self) -> tuple[tuple[int, Hosts], ...]:
        """For every worker of the cluster the number of its host and what that is."""
        return self.cluster.by_worker

    def to_data(self) -> dict[str, Any]:
        """As JSON would have it; what is at its default is left out."""
        data: dict[str, Any] = _ADAPTER.dump_python(self, mode="json", exclude_defaults=True)
        return data


@dataclass(frozen=True)
class Question:
    """What a plan is searched for.

    Attributes:
        name: What to call the model.
        sample_shape: Of one sample.
        options: Options of the run, some of which a way to compute a step changes.
        fixed: What is not searched for.
        decided: Names of the options that the user decided on.
        steps: Of the run that the plan is for.
        insists: Measure also where that takes longer than it can save.
    """

    name: str
    sample_shape: tuple[int, ...]
    options: TrainConfig
    fixed: Fixed = field(default_factory=Fixed)
    decided: frozenset[str] = frozenset()
    steps: int | None = None
    insists: bool = False

    def inputs(self, profile: ModelProfile, cluster: ClusterSpec) -> PlannerInputs:
        """What a search reads that is known without timing codecs."""
        options = self.options
        return PlannerInputs(
            profile,
            cluster,
            options.samples_per_step,
            options.fidelity,
            optimizer_copies=state_copies(options),
            averages=int(options.model_ema is not None),
            whole_model=True,  # what is measured for a run is its model, which all workers have built
            bucket_bytes=options.exchange.bucket_bytes,
            sync_lanes=options.exchange.lanes,
            fixed=self.fixed,
            run_steps=self.steps,
        )


_ADAPTER: TypeAdapter[PlannerInputs] = TypeAdapter(PlannerInputs)


def inputs_of_plan(plan: Plan) -> PlannerInputs:
    """What a plan was made from.

    Args:
        plan: The plan.

    Raises:
        PlanError: It does not say, or not in a way that can be read.
    """
    if plan.inputs is None:
        raise PlanError(
            "the plan does not record what it was made from",
            "Only a plan that was searched for has the section `inputs`.",
            "Make one with `hybridpar plan MODEL -o plan.json`.",
        )
    try:
        return _ADAPTER.validate_python(plan.inputs)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise PlanError(
            f"the recorded inputs of the plan are damaged: {where}: {problem}",
            "They are read as they were written.",
            "Correct this value, or plan again, with `hybridpar plan MODEL`.",
        ) from error


#: A machine whose memory, or whose link between hosts, has changed by more than this factor is another one; less may be
#: a busy hour.
CHANGED = 2.0


def check_made_for(plan: Plan, cluster: ClusterSpec) -> None:
    """Refuse a plan that was searched for another machine than the one at hand.

    Compared are the hosts that the plan uses, their devices, and the speed of the link between hosts.
    """
    made_for = inputs_of_plan(plan).cluster
    if plan.workers is not None and plan.workers < made_for.workers:
        made_for = made_for.first(plan.workers)
    if difference := made_for.difference(cluster, CHANGED):
        raise PlanError(
            f"the plan was made elsewhere: {difference} (fingerprints {made_for.key} and {cluster.key})",
            "What is fastest on one machine need not be so on another.",
            "Plan again for this one: `hybridpar plan MODEL -o plan.json`, or train with --plan auto.",
        )
