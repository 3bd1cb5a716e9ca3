"""Options of the outer loop, in which workers train many steps between two exchanges, and the rules they must keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridpar.config.ranges import check_ranges, require
from hybridpar.config.server import LOCAL, OUTER, ServerConfig
from hybridpar.errors import UsageError

#: Outer steps from which on a run is long enough for much outer momentum; with fewer it overshoots.
LONG_RUN = 200


@dataclass(frozen=True, kw_only=True)
class OuterConfig(ServerConfig):
    """How replicas are kept in step, and what `--sync outer:H` does at every exchange."""

    outer_optimizer: Literal["mean", "nesterov"] = "mean"
    """With --sync outer:H, what is made of the workers' progress since the last exchange: their `mean`, or Nesterov
    momentum of it (`nesterov`, as DiLoCo)."""
    outer_lr: float | None = None
    """Learning rate of the outer optimizer; default: 1, and 0.7 with `nesterov`."""
    outer_momentum: float | None = None
    """Momentum of `--outer-optimizer nesterov`; default: 0.9 where the run has 200 outer steps or more, else 0.5."""
    outer_qsr: float | None = None
    """Let H grow as the learning rate falls, to (this x peak rate / rate)^2 where that is more than H; 2 is usual."""
    outer_fragments: int = 1
    """Parts of the parameters that are exchanged one after the other, each once in H steps."""
    outer_delay: int = 0
    """Steps that an exchange may take while training goes on; less than H / fragments."""

    def outer_rates(self, outer_steps: int | None) -> tuple[float, float]:
        """Learning rate and momentum of the outer optimizer.

        Args:
            outer_steps: Outer steps of the run; None where that is not known.
        """
        if self.outer_optimizer == "mean":
            return 1.0 if self.outer_lr is None else self.outer_lr, 0.0
        usual = 0.9 if outer_steps is not None and outer_steps >= LONG_RUN else 0.5
        return (
            0.7 if self.outer_lr is None else self.outer_lr,
            usual if self.outer_momentum is None else self.outer_momentum,
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
        parts, delay = self.outer_fragments, self.outer_delay
        require("outer_fragments", parts, 1 <= parts <= every, f"from 1 to the H of --sync {self.sync}")
        fits = f"less than H / fragments, here {every} / {parts}, and at least 0"
        require("outer_delay", delay, 0 <= delay < max(1, every // parts), fits)
        check_ranges(self, ("outer_lr", "outer_momentum", "outer_qsr"))
        if self.outer_optimizer == "mean" and self.outer_momentum:
            raise UsageError(
                f"--outer-momentum {self.outer_momentum:g} with --outer-optimizer mean",
                "A mean has no momentum.",
                "Use --outer-optimizer nesterov.",
            )
