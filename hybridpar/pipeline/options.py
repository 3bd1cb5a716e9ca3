"""How a model is trained as a pipeline: options that must be the same on all workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridpar.errors import ScheduleError
from hybridpar.schedule.actions import Edge, Layout
from hybridpar.schedule.schedules import ScheduleRequest
from hybridpar.sync.options import SyncOptions


@dataclass(frozen=True)
class PipelineOptions:
    """How a model is trained as a pipeline.

    Attributes:
        lane_of: For every stage its lane, numbered over all workers of a replica.
        worker_of: For every lane its worker.
        devices: For every lane its device, where one worker drives several; empty for the device of the worker.
        schedule: Name of the schedule.
        recompute: Stages whose activations are computed again in the backward pass.
        compile: Compile every stage with torch.compile.
        threads: Intra-op threads of every lane on a CPU.
        seed: Of the random operations inside the model.
        forward_ms: For every stage the time of a forward pass, as measured; for schedules that look at it.
        backward_ms: The same for the backward pass.
        input_ms: The same for the half of it that gives the gradients of inputs; None where it is not to be split.
        weight_ms: The same for the half that gives the gradients of parameters.
        split_backward: Whether backward passes may be split; where not, schedules that split keep them whole.
        latency_ms: Of a transfer between workers.
        bytes_per_second: Of a transfer between workers; None where transfers take no time.
        saved_bytes: For every stage the activations that a micro-batch keeps for its backward pass.
        memory_cap: Most bytes of activations that a worker may keep; None for no limit. Only `greedy` respects it.
        sync: How gradients are exchanged between replicas.
        sync_lanes: Lanes on which that is done.
        capture: Steps are to be captured, so the host must not decide on them.
        record: On a GPU, note when every action ran, by two events each. On a CPU that is always done.
    """

    lane_of: tuple[int, ...]
    worker_of: tuple[int, ...]
    devices: tuple[str, ...] = ()
    schedule: str = "1f1b"
    recompute: tuple[int, ...] = ()
    compile: bool = False
    threads: int = 1
    seed: int = 0
    forward_ms: tuple[float, ...] | None = None
    backward_ms: tuple[float, ...] | None = None
    input_ms: tuple[float, ...] | None = None
    weight_ms: tuple[float, ...] | None = None
    split_backward: bool = True
    latency_ms: float = 0.0
    bytes_per_second: float | None = None
    saved_bytes: tuple[int, ...] | None = None
    memory_cap: int | None = None
    sync: SyncOptions = field(default_factory=SyncOptions)
    sync_lanes: int = 2
    capture: bool = False
    record: bool = False

    def layout(self, stages: int, edges: tuple[Edge, ...] = ()) -> Layout:
        """Where the stages are, and what flows between them.

        Args:
            stages: Number of stages.
            edges: What flows from stage to stage.

        Raises:
            ScheduleError: There are lanes for another number of stages.
        """
        if len(self.lane_of) != stages:
            raise ScheduleError(
                f"{stages} stages, but lanes are named for {len(self.lane_of)}",
                "Every stage has a lane.",
                "Use the placement of the plan that the stages were made from.",
            )
        return Layout(self.lane_of, self.worker_of, edges)

    def request(self, layout: Layout, micro_batches: int) -> ScheduleRequest:
        """What a schedule is made from.

        Args:
            layout: Where the stages are.
            micro_batches: Of a replica and step.
        """
        return ScheduleRequest(
            layout,
            micro_batches,
            forward_ms=self.forward_ms,
            backward_ms=self.backward_ms,
            input_ms=self.input_ms if self.split_backward else None,
            weight_ms=self.weight_ms if self.split_backward else None,
            saved_bytes=self.saved_bytes,
            memory_cap=self.memory_cap,
            latency_ms=self.latency_ms,
            bytes_per_second=self.bytes_per_second,
        )


#: A model that is not cut: one stage, which runs one micro-batch after the other.
WHOLE = PipelineOptions((0,), (0,), schedule="accumulate")
