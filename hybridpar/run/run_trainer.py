"""The trainer of a run: what its loop asks beside the steps themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridpar.comm.flight import FLIGHT
from hybridpar.comm.flight import FOLDER as FLIGHT_FOLDER
from hybridpar.observe.records import StepRecord
from hybridpar.run.directory import RunFolder
from hybridpar.run.state import RunState
from hybridpar.sync.compression_table import WireFormat
from hybridpar.train.trainer import Trainer


class RunTrainer(Trainer):
    """A trainer whose workers make every step together. `ServedTrainer` answers the same for parameter servers."""

    #: Whether each worker goes at its pace, so that it goes through the data for itself, and worker 0 tests and saves.
    independent = False
    #: What is shown of a step that did not count.
    skipped = "was skipped on all workers: a gradient was not finite"

    @property
    def lookahead(self) -> int:
        """Steps that are queued before the figures of one are read, so that reading does not keep a device waiting."""
        return int(self.world.device.type == "cuda" or self.engine.late)

    @property
    def leads(self) -> bool:
        """Whether this worker tests and saves; where workers go together all do, each its part."""
        return not self.independent or self.world.is_main

    @property
    def joins(self) -> bool:
        """Whether this worker replaces another that died, and goes on from where the others are."""
        return False

    def facts(self, wire_format: WireFormat) -> dict[str, Any]:
        """Fields of `RunInfo` on how gradients are exchanged."""
        return {"workers": self.world.size, "codec": str(wire_format.applied)}

    @property
    def notes(self) -> list[str]:
        """The same in lines for the start."""
        return []

    def enter(self, folder: RunFolder, state: RunState, load: Callable[[], int]) -> bool:
        """Come to the others before the first step; False where the run turns out to be over."""
        FLIGHT.open(folder.directory / FLIGHT_FOLDER, self.world.rank, self.world.size)
        return True

    def dismiss(self) -> None:
        """Let go those who wait for this run, which has nothing to do."""

    def records(self, record: StepRecord, warn: Callable[[str], None]) -> list[StepRecord]:
        """The steps of the run that are over, now that this worker has made the step of a record."""
        return [record]

    def fetch(self) -> list[StepRecord]:
        """Have here what a checkpoint holds; the steps of the run that were not known before. A collective."""
        return []

    def gather_in_the_end(self, item: object) -> list[object]:
        """An item of each worker that is there still."""
        return self.world.gather(item)

    def summary(self) -> dict[str, Any]:
        """What it adds to the summary; on the worker that writes files."""
        return {}
