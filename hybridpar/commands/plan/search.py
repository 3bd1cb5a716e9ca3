"""`hybridpar plan MODEL --explain`: measures, searches for the fastest plan, prints and writes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hybridpar.commands.plan.partition import ProgressBar
from hybridpar.errors import HybridparError, PlanError, UsageError
from hybridpar.machine.cluster_file import ClusterSpec, read_cluster_file, spec_of_measured
from hybridpar.partition.request import parse_bytes, parse_shape
from hybridpar.planner.request import PlanRequest

if TYPE_CHECKING:
    from rich.console import Console

    from hybridpar.planner.inputs import PlannerInputs
    from hybridpar.planner.measure import Together
    from hybridpar.planner.profile import ModelProfile
    from hybridpar.planner.scaling import KHat, Point
    from hybridpar.planner.search import Answer
    from hybridpar.planner.verify import Verified

#: Points of a scaling curve of a cluster that is at hand or small; larger ones are drawn only where asked for.
_CURVE_WORKERS = 16


def run_search(request: PlanRequest) -> int:
    """Search for a plan, print why, write what was asked for; returns the exit code.

    Raises:
        HybridparError: The request cannot be met; the message says why and what to do.
    """
    prepare(request)
    with ProgressBar() as bar:
        inputs = _inputs(request, bar)
        bar.announce("searching")
        report(request, inputs, search(inputs, bar), bar)
    return 0


def prepare(request: PlanRequest) -> None:
    """Check what can be checked before anything is measured.

    Raises:
        UsageError: A value is out of range, or two options contradict each other.
    """
    request.check()
    if request.draw is not None:
        from hybridpar.partition.draw import require_matplotlib

        require_matplotlib()


def search(inputs: PlannerInputs, bar: ProgressBar) -> Answer:
    """Search, with a progress bar.

    Raises:
        PlanError: No plan fits into the memory.
    """
    from hybridpar.planner.search import find_plan

    bar.announce("searching")
    return find_plan(inputs, progress=bar.advance)


def report(
    request: PlanRequest, inputs: PlannerInputs, answer: Answer, bar: ProgressBar, verified: Verified | None = None
) -> None:
    """Write what was asked for, and print why.

    Args:
        request: What was asked for.
        inputs: What the search read.
        answer: What it found.
        bar: Tells what is being done; it ends before anything is printed.
        verified: What the finalists took, where they were run; the plan that is written is then its choice.

    Raises:
        HybridparError: A file or standard output cannot be written.
    """
    from hybridpar.planner.explain import what_ifs
    from hybridpar.planner.record import plan_of
    from hybridpar.planner.scaling import k_hat, scaling_curve

    written, failed = [], []

    def write(what: str, place: Path | None, how: Callable[[Path], object]) -> None:
        if place is not None:
            try:
                how(place)
                written.append(f"{what} written to {place}")
            except HybridparError as error:  # told below the report, which took a minute to make
                failed.append(error)

    write("plan", request.output, plan_of(answer, None if verified is None else verified.chosen).save)
    bar.announce("asking what else would help")
    asked = what_ifs(inputs, answer)
    equation, points = k_hat(inputs), []
    if request.draw is not None or inputs.workers <= _CURVE_WORKERS or request.explain:
        bar.announce("numbers of workers")
        points = scaling_curve(inputs, bar.advance)
    if request.draw is not None:
        from hybridpar.planner.draw import draw_curve

        title = f"{inputs.profile.info.name}, batch {inputs.batch}"
        write("picture", request.draw, partial(draw_curve, points, equation, title))
    bar.close()
    _print(inputs, answer, [one.told() for one in asked], points, equation, written, verified)
    for error in failed:
        raise error


def _inputs(request: PlanRequest, bar: ProgressBar) -> PlannerInputs:
    """What the search reads: recorded, or measured now."""
    if request.inputs is not None:
        recorded = _recorded(request)
        cluster = recorded.cluster if request.cluster is None else read_cluster_file(request.cluster)
        recorded = recorded.on(_capped(cluster, request))
        return recorded if request.fidelity is None else recorded.with_fidelity(request.fidelity)
    described = read_cluster_file(request.cluster) if request.cluster is not None else None
    return measured_inputs(request, described or _measured_cluster(request, bar), bar)


def measured_inputs(
    request: PlanRequest, cluster: ClusterSpec, bar: ProgressBar, together: Together | None = None
) -> PlannerInputs:
    """What the search reads, with the model measured now.

    Args:
        request: What was asked for.
        cluster: The machine.
        bar: Tells what is being done.
        together: What the workers of a job measured together, where one of them asks; None elsewhere.

    Raises:
        HybridparError: The model cannot be traced, or does not run.
    """
    from hybridpar.planner.inputs import PlannerInputs

    cluster = _capped(cluster, request)
    profile, rates = _profile(request, cluster, bar, together)
    inputs = PlannerInputs(
        profile,
        cluster,
        request.batch_size,
        request.fidelity or "exact",
        rates,
        optimizer_copies=request.optimizer_copies,
        overhead_ms=_overhead_ms(profile) if request.measure else 0.0,
    )
    from hybridpar.planner.calibrate import calibrated
    from hybridpar.planner.rehearse import rehearsed

    return calibrated(rehearsed(inputs, () if together is None else together.rehearsals))


def _capped(cluster: ClusterSpec, request: PlanRequest) -> ClusterSpec:
    """The cluster with devices of the memory that was asked for."""
    if request.memory is None:
        return cluster
    cap = parse_bytes(request.memory)
    hosts = tuple(host.model_copy(update={"memory": cap}) for host in cluster.hosts)
    return cluster.model_copy(update={"hosts": hosts})


def _overhead_ms(profile: ModelProfile) -> float:
    """What the host adds to every computation of a stage; that of a GPU's streams is a part of their times."""
    import torch

    from hybridpar.planner.step_costs import measure_hand_over

    return measure_hand_over(torch.device("cpu")) if profile.threads is not None else 0.0


def _recorded(request: PlanRequest) -> PlannerInputs:
    from hybridpar.plan import read_plan
    from hybridpar.planner.inputs import inputs_of_plan

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
    return inputs_of_plan(plan, str(request.inputs))


def _measured_cluster(request: PlanRequest, bar: ProgressBar) -> ClusterSpec:
    """This machine, as one process can measure it."""
    from hybridpar.machine.cluster import default_backend, default_workers
    from hybridpar.machine.probe import probe_cluster

    bar.announce("measuring the machine")
    found = probe_cluster()
    workers = request.workers or default_workers(found)
    return spec_of_measured(found, workers, default_backend(found))


def _profile(
    request: PlanRequest, cluster: ClusterSpec, bar: ProgressBar, together: Together | None
) -> tuple[ModelProfile, dict[str, dict[int, tuple[float, float]]]]:
    import torch

    from hybridpar.machine.process import available_cores, threads_per_worker
    from hybridpar.models import build_model, require_trained, seed_everything
    from hybridpar.partition.profile_cache import cache_directory
    from hybridpar.planner.measure import measure_rates, profile_model
    from hybridpar.planner.steps import planned_codecs

    seed_everything(request.seed)
    model = build_model(request.model, request.classes)
    require_trained(model, request.model)
    on_gpu = cluster.hosts[0].kind == "cuda" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    shape = parse_shape(request.input)
    workers = min(cluster.workers, request.batch_size)
    here = cluster.hosts[0].devices if request.cluster is None else 1
    # A worker of a job has been given its threads; else they are those that one of so many would be given.
    threads = request.threads or (
        torch.get_num_threads() if together is not None else threads_per_worker(here, available_cores())
    )
    try:
        examples = [torch.randn(samples, *shape, device=device) for samples in _sizes(request.batch_size, workers)]
        model = model.to(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"cannot put a micro-batch of {request.input} on {device}: {str(error).splitlines()[0]}",
            "The model and a whole micro-batch must fit into the memory of the device that is measured.",
            "Use a smaller --batch-size or --input.",
        ) from error
    formats = ("contiguous", "channels_last") if len(shape) == 3 else ("contiguous",)
    profile = profile_model(
        model,
        examples,
        name=request.model,
        measure=request.measure,
        passes=request.passes,
        threads=threads,
        formats=formats if request.measure else formats[:1],
        kernels=device.type == cluster.hosts[0].kind == "cpu",
        lanes=(2,) if on_gpu or threads > 1 else (),
        optimizer_copies=request.optimizer_copies,
        crowd=None if together is None else together.crowd,
        cache=cache_directory() if request.cache else None,
        progress=bar.advance,
        announce=bar.announce,
    )
    rates = {} if together is None else together.rates
    if workers > 1 and together is None:
        bar.announce("timing codecs")
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            # Those of a looser fidelity too: what it would gain is said.
            kept = cache_directory() if request.cache else None
            rates = measure_rates(planned_codecs("lossy"), profile.parameters, workers, device, cache=kept)
        finally:
            torch.set_num_threads(before)
    return profile, rates


def _sizes(batch: int, workers: int) -> list[int]:
    """Sizes of micro-batches to profile: that of plain data parallelism, a quarter of it, and a quarter of that.

    A small pass takes longer than the line through two larger ones says, or less.
    """
    whole = min(-(-batch // workers), 64)
    return sorted({max(2, whole // 16), max(2, whole // 4), max(2, whole)})


def _print(
    inputs: PlannerInputs,
    answer: Answer,
    asked: list[str],
    points: list[Point],
    equation: KHat,
    written: list[str],
    verified: Verified | None,
) -> None:
    """Print the report.

    Raises:
        UsageError: Standard output cannot be written.
    """
    from rich.console import Console

    from hybridpar.planner.explain import curve_lines, notes

    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        _print_table(inputs, answer, console)
        if verified is not None:
            _print_verified(answer, verified, console)
        sections = [
            ("what would help", asked),
            ("numbers of workers, same batch", curve_lines(points, equation) if points else []),
            ("about these figures", notes(inputs, answer)),
        ]
        for title, lines in sections:
            if lines:
                console.print(f"\n{title}", style="bold")
                for line in lines:
                    console.print(f"  {line}", highlight=False, soft_wrap=True, markup=False)
        for line in written:
            console.print(line, soft_wrap=True)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(f"cannot print the report: {error.strerror}", fix="Send standard output elsewhere.") from error


def _print_table(inputs: PlannerInputs, answer: Answer, console: Console) -> None:
    from rich.table import Table

    from hybridpar.planner.explain import PARTS, rows

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
    from rich.table import Table

    from hybridpar.planner.explain import describe
    from hybridpar.planner.verify import verdicts

    table = Table(box=None, pad_edge=False, title="run here, in turns", title_justify="left")
    table.add_column("plan", overflow="fold")
    for title in ("predicted ms", "measured ms", "difference"):
        table.add_column(title, justify="right")
    table.add_column("verdict", overflow="fold")
    names: dict[object, str] = {one.candidate: describe(one.candidate, answer) for one in verified.outcomes}
    for name, predicted, measured, more, verdict in verdicts(verified, names):
        table.add_row(name, f"{predicted:,.1f}", f"{measured:,.1f}", f"{100 * more:+.1f} %", verdict)
    console.print()
    console.print(table)
