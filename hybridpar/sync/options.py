"""How gradients are synchronised: options that must be the same on all workers."""

from __future__ import annotations

from dataclasses import dataclass

from hybridpar.compress import Policy


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are synchronised.

    Attributes:
        bucket_bytes: Size at which a bucket is full; a parameter of at least this size has a bucket of its own.
        guard: Roll a step back on all workers when any gradient is not finite.
        clip_norm: Scale the gradient down to this global norm; with another `clip_mode` its limit.
        clip_mode: `norm`, `value` or `agc`, see `hybridpar.sync.clipping`.
        not_clipped: Names of parameters that `agc` leaves alone.
        pool_batch_norm: Pool BatchNorm's running statistics over micro-batches and workers.
        sync_batch_norm: Also normalise by the moments over the replicas, on a group of its own.
        codec: What gradients are sent as: a policy of `hybridpar.compress` or its text. Anything but `none` needs
            process groups.
        seed: Of what codecs draw at random.
        hierarchy: Where there are several nodes, and one of them has several workers, codecs are used between nodes
            alone.
        shard_optimizer: Each replica steps a part of the parameters (`hybridpar.sync.shards`), on a group of its own.
        delayed: Apply each gradient one step late, and sum it meanwhile (`hybridpar.sync.delayed_reducer`).
    """

    bucket_bytes: int = 8 << 20
    guard: bool = True
    clip_norm: float | None = None
    clip_mode: str = "norm"
    not_clipped: tuple[str, ...] = ()
    pool_batch_norm: bool = True
    sync_batch_norm: bool = False
    codec: str | Policy = "none"
    seed: int = 0
    hierarchy: bool = True
    delayed: bool = False
    shard_optimizer: bool = False

    @property
    def global_norm(self) -> float | None:
        """The norm that the gradient of all parameters is clipped to, if it is."""
        return self.clip_norm if self.clip_mode == "norm" else None

    @property
    def policy(self) -> Policy:
        """What gradients are sent as, once workers have agreed on it."""
        assert isinstance(self.codec, Policy)
        return self.codec

    @property
    def uses_nodes(self) -> bool:
        """Whether it matters which workers are on one node, once workers have agreed on the policy."""
        return self.hierarchy and not self.policy.changes_nothing
