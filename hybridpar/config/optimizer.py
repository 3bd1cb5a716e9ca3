"""Options of a run: optimizer, learning-rate schedule, loss, and length."""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hybridpar.config.rates import Average, Schedule, read_average, read_schedule
from hybridpar.errors import UsageError, nearest, not_installed, shortened

#: Optimizers of torch.optim by the names that users type: the class, and the tensors that it keeps per parameter.
TORCH_OPTIMIZERS: dict[str, tuple[str, int]] = {
    "adadelta": ("Adadelta", 2),
    "adafactor": ("Adafactor", 1),
    "adagrad": ("Adagrad", 1),
    "adam": ("Adam", 2),
    "adamax": ("Adamax", 2),
    "adamw": ("AdamW", 2),
    "asgd": ("ASGD", 1),
    "muon": ("Muon", 1),
    "nadam": ("NAdam", 2),
    "radam": ("RAdam", 2),
    "rmsprop": ("RMSprop", 1),
    "sgd": ("SGD", 0),
}

#: What stands before the name of an optimizer of timm.
TIMM = "timm/"

#: Tensors per parameter of timm's optimizers that keep another number than 2.
_TIMM_COPIES = {
    **dict.fromkeys(("adan", "adanw", "cadan", "cadanw"), 4),
    **dict.fromkeys(("cmars", "madgrad", "madgradw", "mars"), 3),
    **dict.fromkeys(
        ("adafactor", "adagrad", "clion", "clionc", "csgdc", "csgdp", "csgdw", "kron", "kronc", "kronw"), 1
    ),
    **dict.fromkeys(("larc", "lars", "lion", "lionc", "momentum", "muon", "nlarc", "nlars", "nmuon", "novograd"), 1),
    **dict.fromkeys(("novogradc", "novogradw", "sgd", "sgdc", "sgdp", "sgdw"), 1),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule, loss, and length of the run."""

    epochs: int = 10
    """Number of epochs."""
    steps: int | None = None
    """Stop after this many steps in all, whatever --epochs says."""
    optimizer: str = "sgd"
    """Optimizer: sgd, adamw or another of torch.optim in lower case, or timm/NAME (lamb, lion, rmsproptf, ...)."""
    lr: float | None = None
    """Peak learning rate. Default: 0.02, and 0.01 with a recipe."""
    lr_per_sample: float | None = None
    """Learning rate per sample, in place of --lr: --lr becomes this times --batch-size."""
    momentum: float = 0.9
    """Momentum of SGD, and of other optimizers that have one."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    betas: tuple[float, ...] = ()
    """Factors of the moments of Adam and its kin; default: the optimizer's own."""
    eps: float | None = None
    """What is added to the denominator in Adam and its kin; default: the optimizer's own."""
    opt_arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Another argument of the optimizer, as NAME=VALUE."""
    weight_decay: float = 5e-4
    """Weight decay; never applied to biases, normalisation layers, and what the model's no_weight_decay() names."""
    no_decay: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Pattern of further parameter names without weight decay, as `*.pos_embed`."""
    layer_decay: float = 1.0
    """What the learning rate of a layer is multiplied with for the layer before it; 1: all layers learn alike."""
    head_lr_scale: float = 1.0
    """What the learning rate of the head, the last layer, is multiplied with."""
    lr_schedule: Annotated[str, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = "cosine"
    """After the warm-up: `cosine:min=1e-6`, `step:every=30`, `multistep:at=30/60`, `exp`, `poly`, `wsd`, `plateau`,
    `constant`."""
    warmup_epochs: float = 1.0
    """Epochs of linear warm-up."""
    loss: Literal["auto", "ce", "bce"] = "auto"
    """Loss: cross-entropy, or binary cross-entropy of each class; auto: bce where samples have several labels."""
    label_smoothing: float = 0.0
    """Label smoothing of the loss."""
    bce_threshold: float | None = None
    """With --loss bce, targets above this count as 1 and others as 0."""
    clip_norm: float | None = None
    """Clip gradients to this global norm; with another --clip-mode, to that limit."""
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """What --clip-norm limits: the global `norm`, each `value`, or the norm of a unit's gradient by that of its weights
    (`agc`)."""
    model_ema: Annotated[str | None, tyro.conf.arg(metavar="DECAY[,KEY=VALUE,...]")] = None
    """Keep an exponential moving average of parameters and buffers; it is tested too, and saved beside the model.
    `0.9998`: what a step keeps of it; `0.9998,warmup`: that grows from 0; `0.9998,every=N`: updated every N steps."""
    select_batch: int = 0
    """Every so many epochs, compare batch sizes on a small part of the data, and go on with the largest that learns as
    well; 0: never."""

    @property
    def peak_lr(self) -> float:
        """The learning rate of which every step's is a fraction."""
        return 0.02 if self.lr is None else self.lr

    @property
    def rate_schedule(self) -> Schedule:
        """What `lr_schedule` stands for."""
        return read_schedule(self.lr_schedule)

    @property
    def ema(self) -> Average | None:
        """What `model_ema` stands for."""
        return None if self.model_ema is None else read_average(self.model_ema)

    @property
    def scales_rates(self) -> bool:
        """Whether layers have learning rates of their own."""
        return (self.layer_decay, self.head_lr_scale) != (1.0, 1.0)


def check_optimizer(config: OptimizerConfig) -> None:
    """Check the name of the optimizer and the form of its arguments, without importing torch or timm."""
    _ = config.rate_schedule, config.ema
    name = config.optimizer
    names = set(TORCH_OPTIMIZERS)
    if name.startswith(TIMM):
        names = {TIMM + one for one in _timm_names(name)}
    # Where timm says its names in another way, the worker that makes the optimizer tells.
    if name not in names and (names or not name.startswith(TIMM)):
        raise UsageError(f"unknown optimizer {shortened(repr(name))}", fix=nearest(name, names))
    for text in config.opt_arg:
        if not text.partition("=")[0].isidentifier() or "=" not in text:
            raise UsageError(
                f"--opt-arg {shortened(text)}", "It must be NAME=VALUE.", "Write for instance --opt-arg amsgrad=True."
            )
    if config.clip_mode != "norm" and config.clip_norm is None:
        raise UsageError(
            f"--clip-mode {config.clip_mode} without --clip-norm",
            "The limit is the value of --clip-norm.",
            f"Add for instance --clip-norm {0.01 if config.clip_mode == 'agc' else 1.0}.",
        )


def _timm_names(name: str) -> set[str]:
    """Names of timm's optimizers, read from its source; empty where they do not stand there."""
    package = importlib.util.find_spec("timm")
    if package is None:
        raise not_installed(f"the optimizer {shortened(name)} comes with timm", "timm")
    found: set[str] = set()
    for folder in package.submodule_search_locations or ():
        if (file := Path(folder, "optim", "_optim_factory.py")).is_file():
            found |= _names_in(file)
    return found


@functools.cache  # read once: shards make their optimizers on threads, where Python 3.11 cannot parse at the same time
def _names_in(file: Path) -> set[str]:
    return {
        str(word.value.value)
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "OptimInfo"
        for word in call.keywords
        if word.arg == "name" and isinstance(word.value, ast.Constant)
    }


def state_copies(config: OptimizerConfig) -> int:
    """Tensors of a parameter's size that are kept for it: momentum and the like, and its moving average."""
    name, average = config.optimizer, int(config.model_ema is not None)
    if name.startswith(TIMM):
        return average + _TIMM_COPIES.get(name.removeprefix(TIMM), 2)
    _, copies = TORCH_OPTIMIZERS.get(name, ("", 2))
    return average + copies + (name in ("sgd", "rmsprop") and config.momentum > 0)
