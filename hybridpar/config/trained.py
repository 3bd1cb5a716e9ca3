"""Options of the commands that use a trained model: which run or weights, and what is otherwise than in the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from hybridpar.config.data import images_over
from hybridpar.config.train import TrainConfig

#: The argument without a flag of these commands: `run: RunArgument`.
RunArgument = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="RUN",
        help="A run directory; a checkpoint in it (step-N); or weights as `train --weights` takes them, with --model "
        "and --data.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TrainedOptions:
    """Model and data: which weights of a run, and what is not as the run's own options say."""

    weights: Annotated[str | None, tyro.conf.arg(metavar="[best|last][,ema|,raw]")] = None
    """Those of the best epoch of the run by --checkpoints, or of its last checkpoint; and of these the moving average
    of --model-ema, or what was trained. Default: best, and ema where the run keeps one."""
    model: str | None = None
    """Model that the weights are of; default: that of the run."""
    model_arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Argument of the model's builder, as key=value; may be repeated. Default: those of the run."""
    data: str | None = None
    """Data set, as `train --data` takes it; default: that of the run."""
    data_root: Path | None = None
    """Directory of the data set's files; default: that of the run."""
    image_size: int | None = None
    """Side of the images, in pixels; default: as the run tested them."""
    debug: bool = False
    """Show tracebacks."""

    def changed(self, config: TrainConfig) -> TrainConfig:
        """The options of a run, or those by default, with what is otherwise."""
        named = ("model_arg", "data", "data_root", "debug")
        changes = {name: value for name in named if (value := getattr(self, name))}
        if self.image_size is not None:
            changes["image_size"] = images_over(config.image_size, f"{self.image_size},test=auto")
        return replace(config, **changes)
