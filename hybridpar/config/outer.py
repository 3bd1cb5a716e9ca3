"""Options of the outer loop, in which workers train many steps between two exchanges, and the rules they must keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridpar.config.data import Rule
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
        fits = f"less than H / fragments, here {every} / {self.outer_fragments}, and at least 0"
        rules = [
            Rule("--outer-lr", self.outer_lr, self.outer_lr is None or self.outer_lr > 0, "greater than 0"),
            Rule(
                "--outer-momentum",
                self.outer_momentum,
                self.outer_momentum is None or 0 <= self.outer_momentum < 1,
                "at least 0 and less than 1",
            ),
            Rule("--outer-qsr", self.outer_qsr, self.outer_qsr is None or self.outer_qsr > 0, "greater than 0"),
            Rule(
                "--outer-fragments",
                self.outer_fragments,
                1 <= self.outer_fragments <= every,
                f"from 1 to the H of --sync {self.sync}",
            ),
            Rule(
                "--outer-delay",
                self.outer_delay,
                0 <= self.outer_delay < max(1, every // max(1, self.outer_fragments)),
                fits,
            ),
            Rule("--outer-mix", self.outer_mix, self.outer_mix is None or 0 <= self.outer_mix <= 1, "from 0 to 1"),
        ]
        for name, value, holds, rule in rules:
            if not holds:
                raise UsageError(f"{name} is {value}", f"It must be {rule}.")
        if self.outer_optimizer == "mean" and self.outer_momentum:
            raise UsageError(
                f"--outer-momentum {self.outer_momentum:g} with --outer-optimizer mean",
                "A mean has no momentum.",
                "Use --outer-optimizer slowmo or nesterov.",
            )
