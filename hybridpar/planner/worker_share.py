"""How many samples one worker computes at a time, and with how many threads."""

from __future__ import annotations

from dataclasses import dataclass

from hybridpar.config import TrainConfig
from hybridpar.machine.process import available_cores, threads_per_worker
from hybridpar.planner.stage_plan import shape_of


@dataclass(frozen=True)
class WorkerShare:
    """What one CPU worker of a run does.

    Attributes:
        samples: Of a micro-batch, where batches divide evenly.
        threads: Intra-op threads of a lane.
    """

    samples: int
    threads: int


def micro_batch_samples(config: TrainConfig, replicas: int) -> int:
    """Samples of a micro-batch; where they do not divide evenly some micro-batches have one more."""
    return max(2, config.batch_size // (replicas * config.micro_batches))


def share_of_worker(config: TrainConfig, workers: int) -> WorkerShare:
    """What each of so many workers on this machine does, as the launcher sets it up.

    Args:
        config: Options of the run.
        workers: Workers, all on this machine.

    Raises:
        UsageError: Stages, replicas and workers do not fit each other.
    """
    shape = shape_of(config, workers)
    threads = threads_per_worker(workers, available_cores())
    return WorkerShare(micro_batch_samples(config, shape.replicas), max(1, threads // shape.lanes))
