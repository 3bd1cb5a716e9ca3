"""`DataParallel`: DistributedDataParallel that compresses gradients.

    model = hybridpar.DataParallel(model, device_ids=[local_rank], compress="onebit")

It is a subclass that registers hybridpar's communication hook, so that code which looks for DistributedDataParallel
finds it, and everything else of it (buckets, buffers, `no_sync`, `join`) is torch's. Where another trainer makes the
DDP, `DataParallel.adopt` does the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hybridpar.compress import Policy, read_policy
from hybridpar.compress.ddp import CodecState, ddp_hook, world_of
from hybridpar.compress.policy import agree_on_policy, is_auto
from hybridpar.errors import CheckpointError, UsageError, first_line

_log = logging.getLogger(__name__)

#: Bytes at which `auto` takes a bucket to be full: torch's default, except for the first bucket.
_BUCKET_BYTES = 25 << 20


class DataParallel(DistributedDataParallel):
    """`torch.nn.parallel.DistributedDataParallel` that can compress gradients, and takes its place in any script.

    Making it is a collective of the workers of the process group, as with DDP. Without `compress`, and on one worker,
    it is DDP unchanged. With several nodes, of which one has several workers, gradients are added in full precision
    inside a node and compressed between nodes.

    A copy (`copy.deepcopy`) or one read from a file does not compress.

    Args:
        module: The model.
        arguments: As those of DDP, by position.
        compress: How gradients are sent: `none`, a codec such as `onebit` or `powersgd:rank=2`, rules by parameter
            name, or `auto`, which measures the link and the codecs and chooses, given `fidelity="close"` or `"lossy"`.
        seed: For what codecs draw at random; equal on all workers.
        fidelity: What `auto` may choose from: `exact` (no codec), `close` (casts to 16 bits), or `lossy` (also the
            codecs whose accuracy was measured).
        options: As those of DDP, by name: `device_ids`, `process_group`, `bucket_cap_mb`, `find_unused_parameters`,
            `gradient_as_bucket_view`, `static_graph` and so on.

    Attributes:
        compression: The state of the hook, with residuals and bytes sent; None where nothing is compressed.
        compress: What gradients are sent as, as text; with `auto` what was chosen.

    Raises:
        UsageError: There is no such codec, or the workers do not agree.
    """

    compression: CodecState | None = None
    compress: str = "none"
    _may_differ = False

    def __init__(
        self,
        module: nn.Module,
        *arguments: Any,
        compress: str | Policy = "none",
        seed: int = 0,
        fidelity: str = "exact",
        **options: Any,
    ) -> None:
        super().__init__(module, *arguments, **options)
        self._register(compress, seed, fidelity)

    @classmethod
    def adopt(
        cls, ddp: DistributedDataParallel, *, compress: str | Policy, seed: int = 0, fidelity: str = "exact"
    ) -> DataParallel:
        """Give a DDP that another trainer has made this class, in place; a collective of its workers.

        Args:
            ddp: The wrapped model, of DDP's own class, before its first backward pass.
            compress: As the constructor takes it.
            seed: For what codecs draw at random; equal on all workers.
            fidelity: What `auto` may choose from.

        Returns:
            The same object.

        Raises:
            UsageError: There is no such codec, the workers do not agree, or the DDP has a hook or is of another class.
        """
        if type(ddp) is not DistributedDataParallel:
            raise UsageError(
                f"compress={str(compress)!r} with a model wrapped as {type(ddp).__module__}.{type(ddp).__qualname__}",
                "Gradients are compressed in the hook of DistributedDataParallel.",
                "Train with plain DDP, or leave out compress.",
            )
        cls._register(ddp, compress, seed, fidelity)  # type: ignore[arg-type]
        ddp.__class__ = cls
        assert isinstance(ddp, DataParallel)
        return ddp

    def _register(self, compress: str | Policy, seed: int, fidelity: str) -> None:
        """Register the hook, where there is anything to compress."""
        group: Any = self.process_group
        world = world_of(group, self.module)
        agreed = agree_on_policy(compress, dict(self.module.named_parameters()), world, fidelity)
        if not isinstance(agreed, Policy):
            from hybridpar.planner.codecs import choose_codecs

            text, lines = choose_codecs(self.module, world, fidelity, _BUCKET_BYTES, world.size)
            for line in lines if world.rank == 0 else ():
                _log.warning(line)  # shown also where logging is not set up
            agreed = read_policy(text)
        self._may_differ = world.size == 1 or is_auto(compress)
        if agreed.changes_nothing or world.size == 1:
            return
        state, hook = ddp_hook(agreed, self.module, group=group, seed=seed, hierarchical=True)
        try:
            self.register_comm_hook(state, hook)
        except RuntimeError as error:
            state.close()
            raise UsageError(
                f"compress={str(agreed)!r} with a DDP that has a communication hook already",
                f"torch says: {first_line(error)}",
                "Leave out compress, or the other hook (mixed_precision registers one as well).",
            ) from None
        self.compression, self.compress = state, str(agreed)

    def compression_state_dict(self) -> dict[str, Any]:
        """What this worker needs, beside model and optimizer, to resume bit for bit: the residuals of its codecs.

        Each worker has its own, so each saves it; `state_dict` stays that of DDP. `gather_compression` brings those of
        all workers to worker 0.

        Returns:
            Plain values and tensors; empty where nothing is compressed.
        """
        return self.compression.state_dict() if self.compression is not None else {}

    def gather_compression(self) -> list[dict[str, Any]]:
        """The `compression_state_dict` of all workers, for saving one file; a collective.

        Returns:
            By rank on worker 0, with tensors on the CPU; empty on the others, and where nothing is compressed.
        """
        return self.compression.gather_state_dicts() if self.compression is not None else []

    def load_compression_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restore the residuals of codecs.

        Where there are more or fewer workers now, where `auto` has chosen another codec than before, and on one worker,
        they are dropped with a warning.

        Args:
            state: What `compression_state_dict` returned on this worker, or what `gather_compression` returned on
                worker 0.

        Raises:
            CheckpointError: The state is that of another codec, or one worker's is that of another place.
        """
        if not state:
            return
        codec = (state if isinstance(state, Mapping) else state[0])["codec"]
        if codec != self.compress and self._may_differ:
            _log.warning("what codec %s has not sent is dropped: gradients are sent as %s now", codec, self.compress)
        elif self.compression is not None:
            self.compression.load_state_dict(state)
        else:
            raise CheckpointError(
                f"the state is that of codec {codec!r}, and {self.compress!r} is used",
                "What a codec keeps means nothing to another one.",
                "Use the same codec, or start without its state.",
            )

    def close(self) -> None:
        """End the threads and process groups of the hook. Safe to call twice.

        Needed only where a process goes on after training and makes others: `destroy_process_group` and the end of the
        process end them as well.
        """
        if self.compression is not None:
            self.compression.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["compression"], state["compress"] = None, "none"
        return state
