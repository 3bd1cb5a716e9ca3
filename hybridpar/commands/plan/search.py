"""Runs `hybridpar plan`: measures, searches for the fastest plan, prints why, and runs the best ones.

With several workers all of them measure together and run the finalists; the first one searches, prints and writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from hybridpar.comm.world import World, default_device
from hybridpar.commands.plan.progress import ProgressBar, printing
from hybridpar.commands.plan.request import DECIDING, PlanRequest, parse_bytes, parse_shape
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, PlanError, UsageError
from hybridpar.machine.cluster_file import ClusterSpec, read_cluster_file
from hybridpar.machine.process import available_cores, threads_per_worker
from hybridpar.models import build_model, require_trained, seed_everything
from hybridpar.models.deferred import MEASURED_BYTES, DeferredModel, is_deferred
from hybridpar.partition.draw import draw_partition
from hybridpar.partition.table import print_partition
from hybridpar.partition.unit_runner import intra_op_threads
from hybridpar.plan import Compute, Plan, parse_plan, read_plan
from hybridpar.planner.decide import run_in_turns
from hybridpar.planner.explain import PARTS, describe, notes, rows, what_ifs
from hybridpar.planner.finalists import Verified, finalists, verified
from hybridpar.planner.fixed import Fixed
from hybridpar.planner.inputs import PlannerInputs, inputs_of_plan
from hybridpar.planner.links import measure_cluster
from hybridpar.planner.probes import Measured, Question, measure_inputs
from hybridpar.planner.record import plan_of
from hybridpar.planner.scaling import Point, curve_lines, scaling_curve
from hybridpar.planner.search import Answer, find_plan
from hybridpar.planner.trials import random_batch
from hybridpar.planner.ways import compute_of_way
from hybridpar.run.worker import tune_worker
from hybridpar.train.trainer import open_trial

if TYPE_CHECKING:
    from hybridpar.planner.evaluate import Outcome

#: Workers of a cluster up to which its scaling curve is made.
_CURVE_WORKERS = 16

#: Steps of each finalist, in turns, where there is time for them.
ROUNDS = 15


def run_plan(request: PlanRequest) -> int:
    """Search for a plan, run the best ones where that was asked for, print why, write what was asked for."""
    request.check()
    world = World.join(lanes=2) if request.is_here else World(device=default_device())
    with closing(world), intra_op_threads(None):
        if request.is_here and request.workers not in (None, world.size):
            raise UsageError(
                f"--workers {request.workers} in a job of {world.size}",
                "The workers that measure are those that are planned for.",
                "Leave it out, or start as many.",
            )
        with ProgressBar(quiet=not world.is_main) as bar:
            _search(request, world, bar)
    return 0


def _search(request: PlanRequest, world: World, bar: ProgressBar) -> None:
    model: nn.Module | None = None
    if request.inputs is not None:
        inputs, compute = _recorded(request), read_plan(request.inputs).compute
        if request.cluster is not None and compute is not None:  # threads, graphs and kernels are of the machine there
            compute = Compute(memory_format=compute.memory_format, amp=compute.amp)
    else:
        model = _build(request)
        measured = _measured(request, model, world, bar)
        inputs, compute = measured.inputs, compute_of_way(_options(request), measured.way)
    found: list[tuple[PlannerInputs, Answer, list[Outcome]]] = []

    def decide() -> list[str]:
        bar.announce("searching")
        capped = inputs.on(_capped(inputs.cluster, request))
        answer = find_plan(capped, progress=bar.advance)
        found.append((capped, answer, finalists(answer, request.verify) if request.verify else []))
        return [plan_of(answer, one, compute).to_json() for one in found[0][2]]

    plans = [parse_plan(json.loads(text)) for text in world.from_main(decide, long=True)]
    times = _run(plans, model, request, world, bar) if model is not None and plans else []

    def tell() -> None:
        capped, answer, outcomes = found[0]
        ran = [index for index, row in enumerate(times) if row]
        result = verified([outcomes[index] for index in ran], [times[index] for index in ran]) if ran else None
        report(request, capped, answer, bar, compute, result)

    world.from_main(tell, long=True)


def _options(request: PlanRequest) -> TrainConfig:
    """What a training with these options would be asked for."""
    memory_format = request.memory_format or "auto"
    return TrainConfig(batch_size=request.batch_size, fidelity=request.fidelity or "exact", memory_format=memory_format)


def _build(request: PlanRequest) -> nn.Module:
    """The model that is to be planned, on the meta device where it is large, can be built there, and is not run."""
    seed_everything(request.seed)
    deferred = None
    if not request.verify:
        with suppress(UsageError):  # a name that is none is refused when it is built
            deferred = DeferredModel(lambda: build_model(request.model, request.classes))
    if deferred is None:
        model = build_model(request.model, request.classes)
    else:
        model = deferred.module if deferred.nbytes > MEASURED_BYTES else deferred.whole()
    require_trained(model, request.model)
    return model


def _measured(request: PlanRequest, model: nn.Module, world: World, bar: ProgressBar) -> Measured:
    """What the search reads, measured by all workers, or for a cluster that is not at hand by this process alone."""
    cluster: ClusterSpec | None = None
    if request.is_here:
        tune_worker(TrainConfig(), world)
        if not request.measure:
            bar.announce("measuring the links")
            cluster = measure_cluster(world, fresh=not request.cache)
    else:
        assert request.cluster is not None
        cluster = read_cluster_file(request.cluster)
        torch.set_num_threads(threads_per_worker(1, available_cores()))
        if cluster.hosts[0].kind != "cuda":
            world.device = torch.device("cpu")
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    shape = parse_shape(request.input)
    fixed = _decided(request, Fixed())
    asked = Question(
        request.model,
        shape,
        request.batch_size,
        request.fidelity or "exact",
        fixed,
        copies=request.optimizer_copies,
        options=_options(request),
        decided=frozenset({"memory_format"} if request.memory_format else ()),
    )
    try:
        torch.empty(max(2, min(-(-request.batch_size // world.size), 64)), *shape, device=world.device)
        model = model if is_deferred(model) else model.to(world.device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"cannot put a micro-batch of {request.input} on {world.device}: {str(error).splitlines()[0]}",
            "The model and a whole micro-batch must fit into the memory of the device that is measured.",
            "Use a smaller --batch-size or --input.",
        ) from error
    return measure_inputs(
        model,
        asked,
        world,
        cluster=cluster,
        measure=request.measure,
        passes=request.passes,
        cache=request.cache,
        open_trial=open_trial,
        announce=bar.announce,
        progress=bar.advance,
    )


def _run(
    plans: Sequence[Plan], model: nn.Module, request: PlanRequest, world: World, bar: ProgressBar
) -> list[list[float]]:
    """Milliseconds of the steps of plans, all of which are open at the same time and take turns; a collective."""
    bar.announce("running the finalists in turns")
    example = random_batch(parse_shape(request.input), request.batch_size, world.device)
    how = ROUNDS, request.verify_seconds
    return run_in_turns(plans, model, _options(request), world, example, open_trial, *how)


def report(
    request: PlanRequest,
    inputs: PlannerInputs,
    answer: Answer,
    bar: ProgressBar,
    compute: Compute | None = None,
    verified: Verified | None = None,
) -> None:
    """Write what was asked for, and print why."""
    written, failed = [], None
    outcome = answer.chosen if verified is None else verified.chosen
    plan = plan_of(answer, outcome, compute)
    try:
        if request.output is not None:
            plan.save(request.output)
            written.append(f"plan written to {request.output}")
        if request.draw is not None:
            graph = inputs.profile.timed(plan.partition.micro_batch or 1)
            draw_partition(graph, plan, request.draw)
            written.append(f"picture written to {request.draw}")
    except HybridparError as error:  # said below the report, which took a minute to make
        failed = error
    bar.announce("asking what else would help")
    asked = what_ifs(inputs, answer)
    points = []
    if inputs.workers <= _CURVE_WORKERS:
        bar.announce("numbers of workers")
        points = scaling_curve(inputs, bar.advance)
    bar.close()
    _print(inputs, answer, plan, asked, points, written, verified)
    if failed is not None:
        raise failed


def _capped(cluster: ClusterSpec, request: PlanRequest) -> ClusterSpec:
    """The cluster with devices of the memory that was asked for."""
    if request.memory is None:
        return cluster
    cap = parse_bytes(request.memory)
    hosts = tuple(host.model_copy(update={"memory": cap}) for host in cluster.hosts)
    return cluster.model_copy(update={"hosts": hosts})


def _recorded(request: PlanRequest) -> PlannerInputs:
    """What the search of a plan's file read, for the cluster and the fidelity that are named."""
    assert request.inputs is not None
    plan = read_plan(request.inputs)
    if request.model and plan.model.name != request.model:
        raise PlanError(
            f"{request.inputs} is a plan of {plan.model.name}, not of {request.model}",
            "What was recorded is about one model.",
            f"Name {plan.model.name}, or measure {request.model}: leave out --inputs.",
        )
    known = plan.model.input
    if request.input != PlanRequest.input and known is not None and parse_shape(request.input) != known:
        raise PlanError(
            f"{request.inputs} is a plan for inputs of {'x'.join(map(str, known))}, not {request.input}",
            "What was recorded was measured with these.",
            "Leave out --input, or measure again: leave out --inputs.",
        )
    recorded = inputs_of_plan(plan, str(request.inputs))
    if request.cluster is not None:
        recorded = recorded.on(read_cluster_file(request.cluster))
    recorded = replace(recorded, fixed=_decided(request, recorded.fixed))
    return recorded if request.fidelity is None else recorded.with_fidelity(request.fidelity)


def _decided(request: PlanRequest, fixed: Fixed) -> Fixed:
    """What is not searched for: also what the options decide."""
    given = {name: value for name in DECIDING if (value := getattr(request, name)) is not None}
    return replace(fixed, **given)


def _print(
    inputs: PlannerInputs,
    answer: Answer,
    plan: Plan,
    asked: list[str],
    points: list[Point],
    written: list[str],
    verified: Verified | None,
) -> None:
    """Print the report."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    sections = [
        ("what would help", asked),
        ("numbers of workers, same batch", curve_lines(points) if points else []),
        ("about these figures", notes(inputs, answer)),
    ]
    with printing("report"):
        _print_table(inputs, answer, console)
        if verified is not None:
            _print_verified(answer, verified, console)
        if len(plan.partition.stages) > 1:
            console.print()
            print_partition(plan, console)
        for title, lines in sections:
            if lines:
                console.print(f"\n{title}", style="bold")
                for line in lines:
                    console.print(f"  {line}", highlight=False, soft_wrap=True, markup=False)
        for line in written:
            console.print(line, soft_wrap=True)


def _print_table(inputs: PlannerInputs, answer: Answer, console: Console) -> None:
    cluster = inputs.cluster
    console.print(
        f"{inputs.profile.info.name}, batch {inputs.batch}, on {cluster.name}: {cluster.workers} workers, "
        f"fidelity {inputs.fidelity}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("plan", overflow="fold")
    for title in ("step ms", *PARTS.values(), "GB"):
        table.add_column(title, justify="right")
    table.add_column("verdict", overflow="fold")
    for row in rows(answer):
        if row.outcome is None or row.parts is None:
            table.add_row(row.name, *["-"] * (len(PARTS) + 2), row.verdict)
            continue
        figures = [row.parts.step, *(getattr(row.parts, name) for name in PARTS)]
        memory = f"{row.outcome.memory_bytes / 1e9:,.2f}"
        table.add_row(row.name, *(f"{value:,.1f}" for value in figures), memory, row.verdict)
    console.print(table)


def _print_verified(answer: Answer, verified: Verified, console: Console) -> None:
    """What the finalists were predicted to take, and took."""
    table = Table(box=None, pad_edge=False, title="run here, in turns", title_justify="left")
    table.add_column("plan", overflow="fold")
    for title in ("predicted ms", "measured ms", "difference"):
        table.add_column(title, justify="right")
    table.add_column("verdict", overflow="fold")
    for index, (outcome, measured) in enumerate(zip(verified.outcomes, verified.measured_ms, strict=True)):
        name, predicted = describe(outcome.candidate, answer), outcome.step_ms
        more = f"{100 * (measured / predicted - 1):+.1f} %"
        table.add_row(name, f"{predicted:,.1f}", f"{measured:,.1f}", more, verified.verdict(index))
    console.print()
    console.print(table)
