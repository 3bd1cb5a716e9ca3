"""The inputs of a prediction, each with its unit. Profile, cluster and plan, which they are made from, check them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hybridpar.schedule.actions import Kind


@dataclass(frozen=True, slots=True)
class Link:
    """A full-duplex connection: a transfer of n bytes that has it alone takes latency + n / speed.

    Attributes:
        latency_ms: Time from the start of a transfer to its first byte.
        bytes_per_second: Speed in each direction; None for a link on which bytes take no time.
    """

    latency_ms: float = 0.0
    bytes_per_second: float | None = None

    def wire_ms(self, size: float) -> float:
        """Time that the bytes themselves take, without the latency."""
        return 0.0 if self.bytes_per_second is None else 1e3 * size / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class BucketCost:
    """One bucket of a stage's gradients.

    Attributes:
        bytes: What the collective gets: the encoded payload where a codec is used.
        ready: When its last gradient is there, as a fraction of the stage's last backward pass.
        encode_ms: Time to encode it; codecs and lanes that compute share the processor.
        decode_ms: Time to decode what comes back; so, too.
        wire_ms: Time that its messages take on the link, without latency.
        latency_ms: Latency of its collectives.
    """

    bytes: int
    ready: float = 1.0
    encode_ms: float = 0.0
    decode_ms: float = 0.0
    wire_ms: float = 0.0
    latency_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """All of it, nothing beside anything else."""
        return self.encode_ms + self.wire_ms + self.latency_ms + self.decode_ms


@dataclass(frozen=True)
class Costs:
    """What each action takes, and what actions share.

    Attributes:
        forward_ms: For every stage one forward pass.
        backward_ms: For every stage one backward pass.
        step_ms: For every stage the optimizer; None for no time.
        saved_bytes: For every stage what a micro-batch holds from its forward to the end of its backward pass.
        link: The network of every worker. All that a worker sends at one time shares its speed, and so does all that
            it receives.
        links: Connections of ordered pairs of workers that are a wire of their own.
        buckets: For every stage its gradient buckets.
        replicas: Workers that sum the gradients of a stage.
        sync_own_link: Whether all-reduces have a wire of their own and do not share that of `link`, as where the
            replicas of a stage are on one host and its stages on several.
        sync_lanes: Collectives that a worker runs at one time.
        control_ms: The messages by which all workers agree on a step.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    step_ms: tuple[float, ...] | None = None
    saved_bytes: tuple[int, ...] | None = None
    link: Link = field(default_factory=Link)
    links: Mapping[tuple[int, int], Link] = field(default_factory=lambda: MappingProxyType({}))
    buckets: tuple[tuple[BucketCost, ...], ...] = ()
    replicas: int = 1
    sync_own_link: bool = False
    sync_lanes: int = 1
    control_ms: float = 0.0

    def compute_ms(self, stage: int, kind: Kind) -> float:
        """Time of a computation or optimizer step that has its worker alone."""
        if kind is Kind.FORWARD:
            return self.forward_ms[stage]
        if kind is Kind.BACKWARD:
            return self.backward_ms[stage]
        return 0.0 if self.step_ms is None else self.step_ms[stage]

    @property
    def sync_factor(self) -> float:
        """What a ring all-reduce over the replicas sends, and receives, for every byte of a bucket."""
        return 2 * (self.replicas - 1) / self.replicas


def unit_ms(stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times of forward and backward passes, for every stage, where they are not known."""
    return (1.0,) * stages, (2.0,) * stages
