"""Options of the outer loop, in which workers train many steps between two exchanges, and the rules they must keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridpar.config.ranges import check_ranges, numbers_of, require
from hybridpar.config.server import LOCAL, OUTER, ServerConfig
from hybridpar.errors import UsageError

#: Outer steps from which on a run is long enough for much outer momentum; with fewer it overshoots.
LONG_RUN = 200


@dataclass(frozen=True, kw_only=True)
class OuterConfig(ServerConfig):
    """How replicas are kept in step, and what `--sync outer:H` does at every exchange."""

    outer_optimizer: Literal["mean", "slowmo", "nesterov"] = "mean"
    """With --sync outer:H, what is made of the workers' progress since the last exchange: their `mean`, a momentum of
    it that follows the learning rate (`slowmo`), or Nesterov momentum (`nesterov`, as DiLoCo)."""
    outer_lr: float | None = None
    """Learning rate of the outer optimizer; default: 1, and 0.7 with `nesterov`."""
    outer_momentum: float | None = None
    """Momentum of the outer optimizer; default: 0.5 (`slowmo`) or 0.9 (`nesterov`) where the run has 200 outer steps or
    more, else 0.2 or 0.5."""
    outer_qsr: float | None = None
    """Let H grow as the learning rate falls, to (this x peak rate / rate)^2 where that is more than H; 2 is usual."""
    outer_fragments: int = 1
    """Parts of the parameters that are exchanged one after the other, each once in H steps."""
    outer_delay: int = 0
    """Steps that an exchange may take while training goes on; less than H / fragments."""
    outer_mix: float | None = None
    """Share of the worker's own weights where the result of an exchange arrives; default: 0, and 0.5 with a delay."""
    outer_pace: str = "equal"
    """Steps between a worker's exchanges with servers (--sync outer:H,ps-async): H for all (`equal`), fewer for slower
    workers as is measured (`auto`), or a part of H for each worker, as `1,0.5`."""

    @property
    def outer_share(self) -> float:
        """`outer_mix`, or its default."""
        return (0.5 if self.outer_delay else 0.0) if self.outer_mix is None else self.outer_mix

    def outer_rates(self, outer_steps: int | None) -> tuple[float, float]:
        """Learning rate and momentum of the outer optimizer.

        Args:
            outer_steps: Outer steps of the run; None where that is not known.
        """
        long = outer_steps is not None and outer_steps >= LONG_RUN
        momentum = {"mean": 0.0, "slowmo": 0.5 if long else 0.2, "nesterov": 0.9 if long else 0.5}
        rate = 0.7 if self.outer_optimizer == "nesterov" else 1.0
        return (
            rate if self.outer_lr is None else self.outer_lr,
            momentum[self.outer_optimizer] if self.outer_momentum is None else self.outer_momentum,
        )

    def check_outer(self) -> None:
        """Check the options of the outer loop.

        Raises:
            UsageError: A value is out of range, or has no meaning beside the others.
        """
        named = {
            f"--outer-optimizer {self.outer_optimizer}": self.outer_optimizer != "mean",
            f"--outer-lr {self.outer_lr}": self.outer_lr is not None,
            f"--outer-momentum {self.outer_momentum}": self.outer_momentum is not None,
            f"--outer-qsr {self.outer_qsr}": self.outer_qsr is not None,
            f"--outer-fragments {self.outer_fragments}": self.outer_fragments != 1,
            f"--outer-delay {self.outer_delay}": self.outer_delay != 0,
            f"--outer-mix {self.outer_mix}": self.outer_mix is not None,
            f"--outer-pace {self.outer_pace}": self.outer_pace.strip() != "equal",
        }
        option = next((option for option, given in named.items() if given), None)
        if option is not None and self.sync.partition(":")[0] != OUTER:
            rule = f"It says what --sync {OUTER}:H does at an exchange."
            if self.sync.startswith(LOCAL):
                rule = f"{rule[:-1]}; {LOCAL}:H takes the plain mean."
            raise UsageError(f"{option} with --sync {self.sync}", rule, f"Use --sync {OUTER}:8, or leave it out.")
        every = self.outer_steps
        if every is None:
            return
        self._check_over_servers()
        parts, delay = self.outer_fragments, self.outer_delay
        require("outer_fragments", parts, 1 <= parts <= every, f"from 1 to the H of --sync {self.sync}")
        fits = f"less than H / fragments, here {every} / {parts}, and at least 0"
        require("outer_delay", delay, 0 <= delay < max(1, every // parts), fits)
        check_ranges(self, ("outer_lr", "outer_momentum", "outer_qsr", "outer_mix"))
        if self.outer_optimizer == "mean" and self.outer_momentum:
            raise UsageError(
                f"--outer-momentum {self.outer_momentum:g} with --outer-optimizer mean",
                "A mean has no momentum.",
                "Use --outer-optimizer slowmo or nesterov.",
            )

    @property
    def outer_paces(self) -> tuple[float, ...] | None:
        """The numbers of `outer_pace`; None for `equal` and `auto`.

        Raises:
            UsageError: It is neither a word nor a list of numbers above 0 and at most 1.
        """
        paces = numbers_of(self.outer_pace)
        if paces is not None and not (paces and all(0 < pace <= 1 for pace in paces)):
            raise UsageError(
                f"--outer-pace is {self.outer_pace}",
                "It must be equal, auto, or for each worker its part of H: above 0, and at most 1.",
                "Write for instance --outer-pace 1,0.5 where the second worker takes half of the steps.",
            )
        return paces

    def check_paces(self, workers: int) -> None:
        """Check that `outer_pace` fits a number of workers.

        Args:
            workers: Number of workers.

        Raises:
            UsageError: It does not.
        """
        paces = self.outer_paces
        if paces is not None and len(paces) != workers:
            raise UsageError(
                f"--outer-pace {self.outer_pace} with {workers} worker{'' if workers == 1 else 's'}",
                "It must have a number for each worker.",
            )

    def _check_over_servers(self) -> None:
        """Refuse what an outer loop has only over servers, or only without.

        Raises:
            UsageError: Such an option is given.
        """
        paced = self.outer_paces is not None or self.outer_pace.strip() != "equal"
        if not self.uses_servers:
            if paced:
                raise UsageError(
                    f"--outer-pace {self.outer_pace} with --sync {self.sync}",
                    "In an all-reduce all workers take part after the same step.",
                    f"Use --sync {self.sync},ps or {self.sync},ps-async; or --shares, for samples of each step.",
                )
            return
        for option, given, why in (
            ("--outer-fragments", self.outer_fragments != 1, "A worker sends all that it has learned at once."),
            ("--outer-delay", self.outer_delay != 0, "A worker goes on with the weights that servers answer with."),
            ("--outer-mix", self.outer_mix is not None, "A worker goes on with the weights of the servers."),
        ):
            if given:
                raise UsageError(
                    f"{option} with --sync {self.sync}", why, f"Use --sync {OUTER}:{self.outer_steps}, or leave it out."
                )
