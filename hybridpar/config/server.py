"""Options that say how replicas are kept in step, parameter servers among them, and the rules that they must keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridpar.errors import UsageError

#: Values of `--sync`; `local`, `outer` and `softsync` take a number.
ALL_REDUCE, LOCAL, OUTER = "allreduce", "local", "outer"
SERVER_SYNC, SERVER_ASYNC, SOFT_SYNC = "ps", "ps-async", "softsync"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How replicas are kept in step: by all-reduce, by an outer loop, or by parameter servers."""

    sync: str = ALL_REDUCE
    """`allreduce`: sum the gradients of every step; `outer:H`: train alone for H steps, then exchange the progress, as
    --outer-optimizer and --compress say; `local:H`: likewise, the plain mean; parameter servers: `ps` waits for all
    workers, `ps-async` for none, `softsync:N` for W/N of W workers."""
    servers: int | None = None
    """Parameter server processes beside the workers; default: 1. With 0 every worker hosts one shard."""
    staleness: Literal["none", "inverse", "mean"] | None = None
    """Weight of a gradient computed on parameters of T updates ago: 1 (`none`), 1/T (`inverse`), or 1/N (`mean`), N
    being the mean staleness of `--sync`; default: `inverse`. Not with `ps`."""
    max_staleness: int | None = None
    """Most pushes that a worker may be ahead of the slowest before it waits; default: no limit. Not with `ps`."""
    pull: Literal["fp32", "fp16"] = "fp32"
    """Number format of parameters that workers get from parameter servers."""

    @property
    def uses_servers(self) -> bool:
        """Whether gradients go to parameter servers, in processes of their own or in the workers."""
        return self.sync.partition(":")[0] not in (ALL_REDUCE, LOCAL, OUTER)

    @property
    def outer_steps(self) -> int | None:
        """H, the steps between two exchanges of `outer:H` or `local:H`; None otherwise.

        Raises:
            UsageError: H is not a number of steps.
        """
        kind, _, steps = self.sync.partition(":")
        if kind not in (LOCAL, OUTER):
            return None
        if not (steps.isascii() and steps.isdigit()) or int(steps) < 1:
            raise UsageError(
                f"--sync {self.sync}", f"It must be {kind}:H with a number of steps H, at least 1.", f"Use {kind}:8."
            )
        return int(steps)

    @property
    def waits_for_all(self) -> bool:
        """Whether every update takes a gradient, or the progress, of each worker."""
        return not self.uses_servers or self.sync == SERVER_SYNC

    @property
    def server_processes(self) -> int:
        """Number of server processes beside the workers."""
        return (1 if self.servers is None else self.servers) if self.uses_servers else 0

    def split_count(self, workers: int) -> int:
        """N of n-softsync, in which an update takes floor(workers / N) gradients; 1-softsync takes one of each.

        Args:
            workers: Number of workers.

        Returns:
            N; 1 where every update takes a gradient of each worker, `workers` where it takes one.

        Raises:
            UsageError: N is not between 1 and the number of workers.
        """
        name, _, number = self.sync.partition(":")
        if name != SOFT_SYNC:
            return workers if name == SERVER_ASYNC else 1
        if not number.isdigit() or not 1 <= int(number) <= workers:
            raise UsageError(
                f"--sync {self.sync} with {workers} worker{'' if workers == 1 else 's'}",
                f"N of softsync:N is a whole number from 1 to the number of workers, here 1 to {workers}.",
                f"softsync:1 waits for as many gradients as there are workers, softsync:{workers} for one.",
            )
        return int(number)

    def check_sync(self) -> None:
        """Check these options against each other.

        Raises:
            UsageError: A value is out of range, or an option has no meaning in the mode.
        """
        name, _, number = self.sync.partition(":")
        softsync = name == SOFT_SYNC and number.isdigit()
        if not softsync and self.outer_steps is None and self.sync not in (ALL_REDUCE, SERVER_SYNC, SERVER_ASYNC):
            raise UsageError(
                f"--sync is {self.sync!r}",
                f"It must be {ALL_REDUCE}, {OUTER}:H, {LOCAL}:H, {SERVER_SYNC}, {SERVER_ASYNC}, or {SOFT_SYNC}:N; "
                "H and N are whole numbers.",
            )
        for option, value in (("--staleness", self.staleness), ("--max-staleness", self.max_staleness)):
            if value is not None and self.waits_for_all:
                raise UsageError(
                    f"{option} {value} with --sync {self.sync}",
                    "Every update waits for all workers, so no gradient is computed on old weights.",
                    f"Leave it out, or use --sync {SERVER_ASYNC} or {SOFT_SYNC}:N.",
                )
        if self.max_staleness is not None and self.max_staleness < 0:
            raise UsageError(f"--max-staleness is {self.max_staleness}", "It must be at least 0.")
        if self.servers is not None and self.servers < 0:
            raise UsageError(f"--servers is {self.servers}", "It must be at least 0.")
        for option, given in (("--servers", self.servers is not None), ("--pull", self.pull != "fp32")):
            if given and not self.uses_servers:
                raise UsageError(
                    f"{option} with --sync {self.sync}",
                    "Only runs with parameter servers have it.",
                    f"Add --sync {SERVER_SYNC}, {SERVER_ASYNC} or {SOFT_SYNC}:N, or leave it out.",
                )
