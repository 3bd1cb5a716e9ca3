"""Runs `hybridpar plan`: what `hybridpar train` decides before its first step, and why, without the training.

All workers measure together and run the finalists; the first one searches, prints and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hybridpar.comm.world import World, default_device
from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.machine.cluster_file import ClusterSpec, read_cluster_file
from hybridpar.machine.process import available_cores, threads_per_worker
from hybridpar.models.deferred import module_of
from hybridpar.observe.progress import progress_bar
from hybridpar.partition.profile import intra_op_threads
from hybridpar.partition.table import print_partition
from hybridpar.planner.batch import measure_batch
from hybridpar.planner.decide import Decision, Verified, decide_plan
from hybridpar.planner.explain import PARTS, caveats, notes, rows
from hybridpar.planner.fixed import decided_options, fixed_by, not_modelled
from hybridpar.planner.inputs import Question
from hybridpar.planner.probes import LEAST_STEPS, measure_inputs
from hybridpar.planner.record import plan_of
from hybridpar.planner.resolve import join_workers
from hybridpar.planner.search import Answer, find_plan
from hybridpar.planner.ways import compute_of_way
from hybridpar.run.data import check_batch, load_data, open_model, steps_of, with_images_of_model
from hybridpar.run.worker import tune_worker
from hybridpar.train.trainer import open_trial


def search(config: TrainConfig, model: str, output: Path | None = None, cluster: Path | None = None) -> int:
    """Search for a plan, for this machine or the one that a file describes, print why, and write it if asked to."""
    if option := not_modelled(config):
        raise UsageError(f"a plan with {option}", "No prediction knows it.", f"Train with {option}, or leave it out.")
    world = join_workers(config) if cluster is None else World(device=default_device())
    with closing(world), intra_op_threads(None):
        with progress_bar(shown=world.is_main) as show:
            decision = _decide(
                *(with_images_of_model(config, model), model, world),
                None if cluster is None else read_cluster_file(cluster),
                announce=lambda text: show(description=text),
                advance=lambda done, total: show(completed=done, total=total),
            )
        world.from_main(lambda: report(decision, output), long=True)
    return 0


def _decide(
    config: TrainConfig,
    name: str,
    world: World,
    cluster: ClusterSpec | None,
    announce: Callable[[str], None],
    advance: Callable[[int, int], None],
) -> Decision:
    if cluster is None:
        tune_worker(config, world)
    else:
        torch.set_num_threads(threads_per_worker(1, available_cores()))
        if cluster.hosts[0].kind != "cuda":
            world.device = torch.device("cpu")
    announce("loading the data set and the model")
    data = load_data(config, world)
    model, _ = open_model(config, name, data, world)
    module = module_of(model)
    shape, samples = data.sample_shape, len(data.train)
    decided = decided_options(config)
    if config.batch_size == "auto":
        if cluster is not None:
            raise UsageError("--batch-size auto with --cluster", "It times steps on this machine.", "Name a number.")
        choice = measure_batch(module, config, world, shape, samples, open_trial=open_trial, announce=announce)
        config = replace(config, batch_size=choice.batch)
    check_batch(config, samples, world.size if cluster is None else cluster.workers)
    fixed = fixed_by(config, decided, world.size, [path for path, _ in module.named_parameters()], config.given or ())
    question = Question(name, tuple(shape), config, fixed, decided, steps_of(config, samples), insists=True)
    if cluster is None:
        return decide_plan(module, world, question, open_trial, announce, advance)
    question = replace(question, fixed=replace(fixed, workers=None))  # fewer than all may be faster
    inputs, _ = measure_inputs(module, question, world, cluster=cluster, announce=announce, progress=advance)
    announce("searching")
    answer = find_plan(inputs)
    return Decision(plan_of(answer, answer.chosen, compute_of_way(config, None)), (), answer)


def report(decision: Decision, output: Path | None) -> None:
    """Write what was asked for, and print why."""
    plan, answer = decision.plan, decision.answer
    assert answer is not None  # on the worker that prints
    inputs = answer.inputs
    if output is not None:
        plan.save(output)
    about = notes(answer) + (caveats(inputs) if not decision.lines else [])
    if inputs.run_steps is not None and inputs.run_steps < LEAST_STEPS:
        short = f"a run of {inputs.run_steps} steps is not planned by hybridpar train"
        about = [*about, f"{short}; name the file of this plan with --plan"]
    console, cluster = Console(width=None if sys.stdout.isatty() else 160), inputs.cluster
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    where = f"on {cluster.name}: {cluster.workers} workers, fidelity {inputs.fidelity}"
    say(f"{inputs.profile.info.name}, batch {inputs.batch}, {where}")
    console.print(plan_table(answer, decision.result))
    for line in decision.lines:
        say(line)
    if len(plan.partition.stages) > 1:
        console.print()
        print_partition(plan, console)
    console.print("\nabout these figures", style="bold")
    for line in about:
        say(f"  {line}")
    if output is not None:
        say(f"plan written to {output}")


def plan_table(answer: Answer, verified: Verified | None) -> Table:
    """The chosen plan and others: where their time goes, what those took that were run in turns, and why they lost."""
    ran = () if verified is None else verified.outcomes
    shown = rows(answer, ran=ran)
    scored = any(row.outcome is not None and row.outcome.score != row.outcome.step_ms for row in shown)
    figures = ["step ms", *PARTS.values(), *["to the same loss ms"] * scored, "GB", *["measured ms"] * bool(ran)]
    table = Table(box=None, pad_edge=False)
    for name in ("plan", *figures, "verdict"):
        table.add_column(name, justify="right" if name in figures else "left", overflow="fold")
    for row in shown:
        values, verdict = ["-"] * len(figures), row.verdict
        if row.outcome is not None and row.parts is not None:
            times = [row.parts.step, *(getattr(row.parts, name) for name in PARTS), *[row.outcome.score] * scored]
            values[: len(times) + 1] = [*(f"{time:,.1f}" for time in times), f"{row.outcome.memory_bytes / 1e9:,.2f}"]
        if verified is not None and row.outcome in ran:
            index = ran.index(row.outcome)
            values[-1], verdict = f"{verified.measured_ms[index]:,.1f}", verified.verdict(index)
        table.add_row(row.name, *values, verdict)
    return table
