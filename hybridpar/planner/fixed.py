"""Why: whoever sets an option has decided it, and the search decides the rest.

`Fixed` is a part of what a search reads, so that a plan that was found so is found so again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Fixed:
    """What is decided; None leaves it to the search.

    Attributes:
        workers: Workers that are used, neither more nor fewer.
        stages: Stages of the model.
        replicas: Copies of the pipeline.
        micro_batches: Per replica and step, also where layers normalise over a micro-batch.
        schedule: Order of the passes, where there are several stages.
        placement: How stages are dealt out to lanes, likewise.
        memory_format: `contiguous` or `channels_last`.
        kernels: `stock` or `tuned`.
        codecs: What gradients travel as, by parameter; those that are not named travel as they are.
        parts: Replicas x micro-batches, where layers normalise over a micro-batch; None for the number of workers.
        exchanged: Only plans with several replicas: something was asked for that acts on what replicas exchange.
        staged: Only plans with several stages: something was asked for that acts on stages.
    """

    workers: int | None = None
    stages: int | None = None
    replicas: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    placement: Literal["linear", "loop", "v"] | None = None
    memory_format: str | None = None
    kernels: str | None = None
    codecs: Mapping[str, str] | None = None
    parts: int | None = None
    exchanged: bool = False
    staged: bool = False
