"""Measures the memory of saved activations under 1F1B and GPipe, and compares it with the prediction.

Four stages as lanes of one process. The independent measure hooks every tensor that autograd saves in a real step and
counts distinct storages as long as anything holds them; parameters and buffers are left out.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from benchmarks.pipeline.checks import Check, write_checks
from benchmarks.pipeline.methods import Ours
from benchmarks.pipeline.setups import TINY, Setting, cut_on_main, problem
from benchmarks.rig.rank import process_group
from hybridpar.comm.world import World
from hybridpar.schedule.memory import most_held

SETTING = Setting("resnet18", 112, 32, 8)
QUICK = Setting(TINY, 16, 16, 8)
STAGES = 4
HALF, OFF = 0.5, 0.1


class SavedBytes:
    """Counts what autograd holds for a stage, in a real step.

    Args:
        module: The stage; its parameters and buffers are not counted.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        self._holders: dict[int, int] = {}
        self._lock = threading.Lock()
        self._now = 0
        self.peak = 0

    def hooked(self, forward: Any) -> Any:
        """The stage's forward pass, counted."""

        def run(*inputs: Tensor) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                return forward(*inputs)

        return run

    def _pack(self, tensor: Tensor) -> _Held:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._own or size == 0:
            return _Held(tensor, None, 0, 0)
        with self._lock:
            if place not in self._holders:
                self._now += size
                self.peak = max(self.peak, self._now)
            self._holders[place] = self._holders.get(place, 0) + 1
        return _Held(tensor, self, place, size)

    def let_go(self, place: int, size: int) -> None:
        """One of the holders of a storage is gone."""
        with self._lock:
            self._holders[place] -= 1
            if not self._holders[place]:
                del self._holders[place]
                self._now -= size


class _Held:
    """A tensor that autograd has saved; it is gone when autograd lets go of this."""

    def __init__(self, tensor: Tensor, counter: SavedBytes | None, place: int, size: int) -> None:
        # Detached, or an output that is saved by its own node would keep itself alive in a circle.
        self.tensor, self._counter, self._place, self._size = tensor.detach(), counter, place, size

    def __del__(self) -> None:
        if self._counter is not None:
            self._counter.let_go(self._place, self._size)


def _unpack(held: _Held) -> Tensor:
    return held.tensor


def measure(quick: bool, rounds: int, keep_busy: bool, output: str | None) -> None:
    """Hold 1F1B's memory against GPipe's, and both against what is predicted."""
    del rounds, keep_busy  # bytes do not depend on the time of day
    setting = QUICK if quick else SETTING
    checks: list[Check] = []
    totals: dict[str, int] = {}
    with process_group():
        world = World()
        plan = cut_on_main(
            setting, problem(STAGES, 1, lanes=STAGES, micro_batches=setting.micro_batches), world, passes=2
        )
        for schedule in ("1f1b", "gpipe"):
            ours = Ours(setting, plan, world, schedule)
            ours.step()
            counters = {index: SavedBytes(local.module) for index, local in ours.engine.stages.items()}
            for index, local in ours.engine.stages.items():
                local.run._call = counters[index].hooked(local.run._call)
            ours.step()
            measured = [counters[index].peak for index in sorted(counters)]
            program = ours.engine.executor.program
            assert program is not None
            saved = [stage.saved_bytes or 0 for stage in plan.partition.stages]
            predicted = list(most_held(program.schedule, program.layout, saved).stage_bytes)
            told = ours.engine.peak_saved_bytes
            ours.close()
            totals[schedule] = sum(measured)
            for what, value in (
                ("predicted from the plan", sum(predicted)),
                ("as the engine tells", told),
            ):
                off = value / totals[schedule] - 1
                checks.append(
                    Check(
                        setting=str(setting),
                        link="none",
                        what=f"{schedule}: saved activations {what}, off from the hooks' count",
                        value=abs(off),
                        low=abs(off),
                        high=abs(off),
                        at_most=OFF,
                        extra=f"{value} of {totals[schedule]} bytes; stages predicted {predicted}, counted {measured}",
                    )
                )
    ratio = totals["1f1b"] / totals["gpipe"]
    checks.insert(
        0,
        Check(
            setting=str(setting),
            link="none",
            what=f"saved activations of {STAGES} stages, 1F1B over GPipe",
            value=ratio,
            low=ratio,
            high=ratio,
            at_most=HALF,
            extra=f"{totals['1f1b']} over {totals['gpipe']} bytes",
        ),
    )
    write_checks(checks, output)
