"""Trains random models that keep state in random layouts, beside a plain loop: equal, or refused for a listed reason.

    python -m tests.state.random_state --seeds 0:1000 --workers 1 --jobs 2

Each case follows from its number. Cases run in processes of their own, so that one which hangs or dies is counted, and
its number printed, as are those that differ.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import torch

from hybridpar.comm.world import World
from tests.ranks import run_ranks
from tests.state.cases import Case, draw
from tests.state.plain_loop import differences, plain_loop, with_trainer

#: Seconds after which a case counts as hung.
LONGEST = 60.0

#: What may be refused: how the message begins, and of which cases it is right.
REFUSALS: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    (r"\d stages are asked for, the model has \d+ unit", lambda case: case.stages > 2 or case.joining in TIED),
    (
        r"--recompute \d with .* whose forward changes its attribute",
        lambda case: case.has("objects"),
    ),
    (r".* cannot be cut into stages because of .*: forward writes into it", lambda case: case.has("changes")),
    (r"counter_of_the_root changes its attribute 'calls'", lambda case: True),
    (r"cannot trace .*", lambda case: case.joining == "buffer_of_the_root"),
    (r"features cannot be cut into stages", lambda case: case.joining == "features_by_hook"),
    (r"'.*', which leaves stage \d, needs a gradient now", lambda case: case.frozen > 0),
)

#: Joinings with a parameter, a buffer or a piece that is used at both ends.
TIED = {"shared", "tied_decoder", "tied_layers", "statistics_read_early", "parameters_of_the_root"}


def run_case(seed: int, workers: int) -> tuple[str, list[str]]:
    """The outcome of a case, and what there is to say about it."""
    case = draw(seed, workers)
    try:
        plain_loop(case)
    except RuntimeError as error:  # such as a change in place of what autograd has saved
        return "unfit", [str(error)]
    try:
        parts = run_ranks(_on_worker, workers, seed, workers, timeout=LONGEST) if workers > 1 else [_on(case, None)]
    except BaseException:
        lines = traceback.format_exc().splitlines()
        return "crashed", [line[:300] for line in lines if re.match(r"[\w.]+(Error|Exception|NotMet)\b", line)]
    refused, differ = parts[0]
    if any(part[0] != refused for part in parts):
        return "wrong", [f"workers refuse differently: {[part[0] for part in parts]}"]
    if refused is None:
        differ = [f"worker {rank}:{text}" for rank, part in enumerate(parts) for text in part[1]]
        return ("wrong" if differ else "equal"), differ
    message, steps = refused
    for pattern, is_right in REFUSALS:
        if re.match(pattern, message):
            late = 2 if pattern.endswith("needs a gradient now") else 0
            return (f"refused: {pattern}" if is_right(case) and steps <= late else "wrong"), [message]
    return "wrong", [f"refused after {steps} steps: {message}"]


def _on_worker(world: World, seed: int, workers: int) -> tuple[tuple[str, int] | None, list[str]]:
    return _on(draw(seed, workers), world)


def _on(case: Case, world: World | None) -> tuple[tuple[str, int] | None, list[str]]:
    found, rank = with_trainer(case, world), 0 if world is None else world.rank % case.replicas
    return found.refused, [] if found.refused else differences(case, plain_loop(case, rank), found)


# ---------------------------------------------------------------- many cases, each where it can do no harm


def run_cases(seeds: Sequence[int], workers: int, jobs: int) -> Iterator[tuple[int, str, list[str]]]:
    """The outcomes of cases, in their order; those of a hundred are known together."""
    hundreds = [seeds[first : first + 100] for first in range(0, len(seeds), 100)]
    with ThreadPoolExecutor(jobs) as pool:
        for known in pool.map(partial(_run_apart, workers=workers), hundreds):
            yield from known


def _run_apart(seeds: Sequence[int], workers: int) -> list[tuple[int, str, list[str]]]:
    known: list[tuple[int, str, list[str]]] = []
    while len(known) < len(seeds):
        pipe, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_serve, args=(theirs, seeds[len(known) :], workers))
        process.start()
        theirs.close()
        try:
            while len(known) < len(seeds) and pipe.poll(LONGEST + 10):
                known.append((seeds[len(known)], *pipe.recv()))
        except EOFError:
            known.append((seeds[len(known)], "died", []))
        else:
            known += [(seed, "hung", []) for seed in seeds[len(known) : len(known) + 1]]
        process.kill()
        process.join()
    return known


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.state.plain_loop"])


def _serve(pipe: Connection, seeds: Sequence[int], workers: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    os.environ["HYBRIDPAR_KERNELS"] = "off"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HYBRIDPAR_CACHE"] = cache
        for seed in seeds:
            pipe.send(run_case(seed, workers))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that the arguments name; 1 if any was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:200", help="first and last number, as 0:200, or numbers joined by commas")
    parser.add_argument("--workers", type=int, default=1, choices=(1, 2))
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    given = parser.parse_args(arguments)
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last)) if last else [int(seed) for seed in first.split(",")]
    outcomes: Counter[str] = Counter()
    for seed, outcome, lines in run_cases(seeds, given.workers, given.jobs):
        outcomes[outcome] += 1
        if outcome not in ("equal", "unfit") and not outcome.startswith("refused"):
            print(f"{seed} {outcome}: {draw(seed, given.workers)}", *lines[:12], sep="\n    ", flush=True)
    for outcome, count in outcomes.most_common():
        print(f"{count:6} {outcome}")
    return int(bool({"wrong", "crashed", "hung", "died"} & outcomes.keys()))


if __name__ == "__main__":
    sys.exit(main())
