"""The options of a server, and what it knows of each connected worker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from hybridpar.compress import Policy
from hybridpar.errors import HybridparError, UsageError
from hybridpar.server.encoding import PushDecoder
from hybridpar.server.rules import Rules
from hybridpar.server.shard import OptimizerOf
from hybridpar.server.wire import Connection, Frame


@dataclass(frozen=True)
class ServerOptions:
    """What a server must know before a worker connects.

    Attributes:
        number: Which shard it is, from 0.
        rules: What to do with gradients.
        optimizer: Makes the optimizer.
        policy: Codecs of pushes.
        half: Whether weights are sent as float16.
        token: What a worker must know to be let in.
        timeout: Seconds after which a silent worker is an error, where others wait for it.
    """

    number: int
    rules: Rules
    optimizer: OptimizerOf
    policy: Policy
    half: bool
    token: str = field(repr=False)
    timeout: float


@dataclass
class Peer:
    """A worker that is connected.

    Attributes:
        connection: The way to it.
        session: Names the process, so that one that lost its connection is told from its successor.
        clock: Of the weights that it has; None where it has none of this shard.
        decoder: What decodes its pushes.
        push: Push that has arrived but for its end.
        told: When it was last told anything.
        saved: Number of the last request to save that it was sent.
        missed: Since when nothing has come from it, once that has been said.
        rows: Step up to which it has been told what the steps did; None for one that does not want to know.
    """

    connection: Connection
    session: str
    decoder: PushDecoder
    clock: int | None = None
    push: Frame | None = None
    told: float = field(default_factory=time.monotonic)
    saved: int = 0
    missed: float | None = None
    rows: int | None = None

    @property
    def active(self) -> float:
        """When something last came from it, or went to it."""
        return max(self.connection.active, self.told)


def refusal(error: HybridparError) -> dict[str, Any]:
    """An error as a frame tells it."""
    kind = "usage" if isinstance(error, UsageError) else "sync"
    return {"kind": "refused", "error": kind, "what": error.what, "why": error.why, "fix": error.fix}
