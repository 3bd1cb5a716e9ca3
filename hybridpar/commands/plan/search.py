"""Runs `hybridpar plan`: what `hybridpar train` decides before its first step, and why, without the training.

All workers measure together and run the finalists; the first one searches, prints and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from hybridpar.comm.world import World, default_device
from hybridpar.commands.plan.progress import ProgressBar, printing
from hybridpar.commands.plan.request import PlanRequest
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError, UsageError
from hybridpar.machine.cluster_file import read_cluster_file
from hybridpar.machine.process import available_cores, threads_per_worker
from hybridpar.models.deferred import DeferredModel
from hybridpar.partition.profile import intra_op_threads
from hybridpar.partition.table import print_partition
from hybridpar.planner.batch import measure_batch
from hybridpar.planner.decide import Decision, Verified, decide_plan
from hybridpar.planner.explain import PARTS, describe, notes, rows
from hybridpar.planner.fixed import decided_options, fixed_by, not_modelled
from hybridpar.planner.inputs import PlannerInputs
from hybridpar.planner.probes import LEAST_STEPS, Question, measure_inputs
from hybridpar.planner.record import plan_of
from hybridpar.planner.resolve import join_workers
from hybridpar.planner.search import Answer, find_plan
from hybridpar.planner.ways import compute_of_way
from hybridpar.run.data import check_batch, load_data, open_model, steps_of, with_images_of_model
from hybridpar.run.worker import tune_worker
from hybridpar.train.trainer import open_trial


def run_plan(request: PlanRequest) -> int:
    """Search for a plan, print why, and write what was asked for; `named` are the options that were typed."""
    request.check()
    if option := not_modelled(request):
        raise UsageError(f"a plan with {option}", "No prediction knows it.", f"Train with {option}, or leave it out.")
    world = join_workers(request) if request.cluster is None else World(device=default_device())
    with closing(world), intra_op_threads(None):
        with ProgressBar(quiet=not world.is_main) as bar:
            decision = _decide(request, world, bar)
            world.from_main(lambda: report(request, decision, bar), long=True)
    return 0


def _decide(request: PlanRequest, world: World, bar: ProgressBar) -> Decision:
    config: TrainConfig = with_images_of_model(request, request.model)
    cluster = None if request.cluster is None else read_cluster_file(request.cluster)
    if cluster is None:
        tune_worker(config, world)
    else:
        torch.set_num_threads(threads_per_worker(1, available_cores()))
        if cluster.hosts[0].kind != "cuda":
            world.device = torch.device("cpu")
    bar.announce("loading the data set and the model")
    data = load_data(config, world)
    model, _ = open_model(config, request.model, data, world)
    module = model.module if isinstance(model, DeferredModel) else model
    shape, samples = data.sample_shape, len(data.train)
    decided = decided_options(config)
    if config.batch_size == "auto":
        if cluster is not None:
            raise UsageError("--batch-size auto with --cluster", "It times steps on this machine.", "Name a number.")
        choice = measure_batch(module, config, world, shape, samples, open_trial=open_trial, announce=bar.announce)
        config = replace(config, batch_size=choice.batch)
    check_batch(config, samples, world.size if cluster is None else cluster.workers)
    fixed = fixed_by(config, decided, world.size, [name for name, _ in module.named_parameters()], config.given or ())
    steps = steps_of(config, samples)
    question = Question(request.model, tuple(shape), config, fixed, decided, steps, insists=True)
    if cluster is None:
        return decide_plan(module, world, question, open_trial, bar.announce, bar.advance)
    question = replace(question, fixed=replace(fixed, workers=None))  # fewer than all may be faster
    inputs, _ = measure_inputs(module, question, world, cluster=cluster, announce=bar.announce, progress=bar.advance)
    bar.announce("searching")
    answer = find_plan(inputs)
    plan = plan_of(answer, answer.chosen, compute_of_way(config, None))
    return Decision(plan, (), inputs, answer)


def report(request: PlanRequest, decision: Decision, bar: ProgressBar) -> None:
    """Write what was asked for, and print why."""
    written, failed = [], None
    plan, inputs, answer = decision.plan, decision.inputs, decision.answer
    assert answer is not None  # on the worker that prints
    try:
        if request.output is not None:
            plan.save(request.output)
            written.append(f"plan written to {request.output}")
    except HybridparError as error:  # said below the report, which took a minute to make
        failed = error
    bar.close()
    console = Console(width=None if sys.stdout.isatty() else 160)
    with printing("report"):
        _print_table(inputs, answer, console)
        if decision.result is not None:
            _print_verified(answer, decision.result, console)
        _print_lines(decision.lines, console)
        if len(plan.partition.stages) > 1:
            console.print()
            print_partition(plan, console)
        console.print("\nabout these figures", style="bold")
        _print_lines([f"  {line}" for line in [*notes(inputs, answer), *_not_planned(inputs)]], console)
        _print_lines(written, console)
    if failed is not None:
        raise failed


def _not_planned(inputs: PlannerInputs) -> list[str]:
    """That a run is too short for `hybridpar train` to plan it."""
    steps = inputs.run_steps
    if steps is None or steps >= LEAST_STEPS:
        return []
    return [f"a run of {steps} steps is not planned by hybridpar train; name the file of this plan with --plan"]


def _print_lines(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


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
    shown = rows(answer)
    scored = any(row.outcome is not None and row.outcome.score != row.outcome.step_ms for row in shown)
    for title in ("step ms", *PARTS.values(), *["to the same loss ms"] * scored, "GB"):
        table.add_column(title, justify="right")
    table.add_column("verdict", overflow="fold")
    for row in shown:
        if row.outcome is None or row.parts is None:
            table.add_row(row.name, *["-"] * (len(PARTS) + 2 + scored), row.verdict)
            continue
        figures = [row.parts.step, *(getattr(row.parts, name) for name in PARTS), *[row.outcome.score] * scored]
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
