"""Options of a run: optimizer, learning-rate schedule, loss, and length."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hybridpar.config.rates import Average, Schedule, read_average, read_rate, read_schedule
from hybridpar.errors import UsageError, nearest, not_installed, shortened
from hybridpar.spec import (
    AT_LEAST_0,
    AT_LEAST_1,
    AT_MOST_1,
    BELOW_1,
    POSITIVE,
    defaults_of,
    fields_of,
    read_choice,
    read_fields,
    read_values,
    split_fields,
    split_name,
)

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

#: How timm's source enters an optimizer under a name.
_REGISTERED = re.compile(r"\bOptimInfo\(\s*name=['\"](\w+)")

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
class Groups:
    """Which parameters have weight decay, and rates of their own: keys of `--optimizer` for every optimizer.

    Attributes:
        decay_all: Whether biases and normalisation layers have weight decay, too, as in torchvision.
        no_decay: Patterns of further parameter names without weight decay, as `*.pos_embed`.
        layer_decay: What the learning rate of a layer is multiplied with for the layer before it.
        head_lr: What the learning rate of the head, the last layer, is multiplied with.
    """

    decay_all: bool = False
    no_decay: tuple[str, ...] = ()
    layer_decay: Annotated[float, AT_MOST_1] = 1.0
    head_lr: Annotated[float, POSITIVE] = 1.0

    @property
    def scales_rates(self) -> bool:
        """Whether layers have learning rates of their own."""
        return (self.layer_decay, self.head_lr) != (1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """`sgd:momentum=0.9,nesterov`: an optimizer by name, with arguments of its class and `Groups`.

    Attributes:
        name: One of torch.optim in lower case, or timm/NAME.
        arguments: Of its class, without learning rate and weight decay.
        groups: What holds for every optimizer.
    """

    name: str
    arguments: Mapping[str, Any]
    groups: Groups

    @property
    def momentum(self) -> float:
        """Momentum of SGD."""
        return float(self.arguments.get("momentum", 0.9))  # as `check_optimizer` has checked


@dataclass(frozen=True, kw_only=True)
class Loss:
    """`ce`: cross-entropy; and what all losses have.

    Attributes:
        smoothing: Label smoothing.
    """

    smoothing: Annotated[float, BELOW_1] = 0.0


@dataclass(frozen=True, kw_only=True)
class Binary(Loss):
    """`bce`: binary cross-entropy of each class.

    Attributes:
        threshold: Targets above it count as 1, and others as 0; None: as they are.
    """

    threshold: Annotated[float | None, BELOW_1] = None


@dataclass(frozen=True, kw_only=True)
class Automatic(Binary):
    """`auto`: `bce` where samples have several labels, else `ce`."""


_LOSSES: dict[str, type[Loss]] = {"auto": Automatic, "ce": Loss, "bce": Binary}


@dataclass(frozen=True, kw_only=True)
class GradientLimit:
    """`1.0,mode=norm`: what gradients are clipped to.

    Attributes:
        limit: Of what `mode` says.
        mode: The global `norm`, each `value`, or the norm of a unit's gradient by that of its weights (`agc`, Brock et
            al. 2021).
    """

    limit: Annotated[float, POSITIVE]
    mode: Literal["norm", "value", "agc"] = "norm"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule, loss, and length of the run."""

    epochs: Annotated[int, AT_LEAST_1] = 10
    """Number of epochs."""
    steps: Annotated[int | None, AT_LEAST_1] = None
    """Stop after this many steps in all, whatever --epochs says."""
    test_every: Annotated[int, AT_LEAST_1] = 1
    """Epochs from one test of the model to the next; it is tested after the last one in any case."""
    optimizer: Annotated[str, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = "sgd"
    """sgd, adamw or another of torch.optim in lower case, or timm/NAME (lamb, lion, ...), with arguments, as
    `sgd:momentum=0.9,nesterov` or `adamw:betas=0.9/0.95`. For each: `decay_all`, `no_decay=*.pos_embed`,
    `layer_decay=0.75`, `head_lr=10`."""
    lr: Annotated[float | str | None, tyro.conf.arg(metavar="RATE[/SAMPLES]")] = None
    """Peak learning rate, or `0.1/256`: 0.1 for a batch of 256, and in proportion for others. Default: 0.02, and 0.01
    with --sync onebit-sgd."""
    weight_decay: Annotated[float, AT_LEAST_0] = 5e-4
    """Weight decay; not applied to biases, normalisation layers, and what the model's no_weight_decay() names."""
    lr_schedule: Annotated[str, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = "cosine"
    """`cosine:warmup=5,min=1e-6`, `cosine:cycle=10` with restarts, `step:every=30`, `multistep:at=30/60`, `exp`,
    `poly`, `wsd`, `plateau`, `constant`; all with `warmup=EPOCHS`, usually 1."""
    loss: Annotated[str, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = "auto"
    """`ce` (cross-entropy), `bce` (binary cross-entropy of each class), `auto`: bce where samples have several labels.
    With `smoothing=0.1`; bce with `threshold=0.2`: targets above count as 1."""
    clip_grad: Annotated[float | str | None, tyro.conf.arg(metavar="LIMIT[,mode=MODE]")] = None
    """Clip gradients to this global norm; with `mode=value` each value; with `mode=agc` the norm of a unit's gradient
    over that of its weights."""
    model_ema: Annotated[float | str | None, tyro.conf.arg(metavar="DECAY[,KEY=VALUE,...]")] = None
    """Keep an exponential moving average of parameters and buffers; it is tested too, and saved beside the model.
    `0.9998`: what a step keeps of it; `0.9998,warmup`: that grows from 0; `0.9998,every=N`: updated every N steps."""
    select_batch: Annotated[int, AT_LEAST_0] = 0
    """Every so many epochs, compare batch sizes on a small part of the data, and go on with the largest that learns as
    well; 0: never."""

    @property
    def optim(self) -> Optimizer:
        """What `optimizer` stands for."""
        return read_optimizer(self.optimizer)

    @property
    def groups(self) -> Groups:
        """Which parameters have weight decay, and rates of their own."""
        return self.optim.groups

    @property
    def momentum(self) -> float:
        """Momentum of SGD."""
        return self.optim.momentum

    @property
    def peak_lr(self) -> float:
        """The learning rate of which every step's is a fraction; that of `0.1/256` for the 256 samples."""
        return 0.02 if self.lr is None else read_rate(self.lr).value

    @property
    def rate_schedule(self) -> Schedule:
        """What `lr_schedule` stands for."""
        return read_schedule(self.lr_schedule)

    @property
    def criterion(self) -> Loss:
        """What `loss` stands for."""
        return read_loss(self.loss)

    @property
    def clipping(self) -> GradientLimit | None:
        """What `clip_grad` stands for."""
        return None if self.clip_grad is None else read_limit(self.clip_grad)

    @property
    def ema(self) -> Average | None:
        """What `model_ema` stands for."""
        return None if self.model_ema is None else read_average(self.model_ema)


@functools.cache
def read_optimizer(text: str) -> Optimizer:
    """What a value of `--optimizer` stands for."""
    name, rest = split_name(text)
    label, keys = f"--optimizer {shortened(text)}", fields_of(Groups)
    given = split_fields(label, rest, flags=None)
    groups = {key: given.pop(key) for key in keys & given.keys()}
    arguments = {key: _read_argument(value) for key, value in given.items()}
    for key in given:
        if not key.isidentifier():
            raise UsageError(f"{label}: {shortened(repr(key))}", "It is no name of an argument.")
    return Optimizer(
        name=name, arguments=arguments, groups=Groups(**read_values(label, groups, keys, defaults_of(Groups)))
    )


def _read_argument(text: str) -> Any:
    """The value of an optimizer's argument: a number, on or off, a tuple of such with `/` between them, or text."""
    if "/" in text:
        return tuple(map(_read_argument, text.split("/")))
    words = {"on": True, "true": True, "off": False, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


@functools.cache
def read_loss(text: str) -> Loss:
    """The loss that a value of `--loss` stands for."""
    return read_choice("--loss", text, _LOSSES)


@functools.cache
def read_limit(text: str | float) -> GradientLimit:
    """The limit of gradients that a value of `--clip-grad` stands for."""
    return read_fields(f"--clip-grad {text}", str(text), GradientLimit)


def check_optimizer(config: OptimizerConfig) -> None:
    """Check the specs of optimizer, rates, loss and clipping, without importing torch or timm."""
    _ = config.rate_schedule, config.ema, config.criterion, config.clipping, config.lr is None or read_rate(config.lr)
    if type(momentum := config.optim.arguments.get("momentum", 0.9)) not in (int, float):
        raise UsageError(
            f"--optimizer {config.optimizer}: momentum={momentum}", "It must be a number.", "Write momentum=0.9."
        )
    name = config.optim.name
    names = set(TORCH_OPTIMIZERS)
    if name.startswith(TIMM):
        names = {TIMM + one for one in _timm_names(name)}
    # Where timm says its names in another way, the worker that makes the optimizer tells.
    if name not in names and (names or not name.startswith(TIMM)):
        raise UsageError(f"unknown optimizer {shortened(repr(name))}", fix=nearest(name, names))


def _timm_names(name: str) -> set[str]:
    """Names of timm's optimizers, read from its source; empty where they do not stand there."""
    package = importlib.util.find_spec("timm")
    if package is None:
        raise not_installed(f"the optimizer {shortened(name)} comes with timm", "timm")
    files = [Path(folder, "optim", "_optim_factory.py") for folder in package.submodule_search_locations or ()]
    return {found for file in files if file.is_file() for found in _REGISTERED.findall(file.read_text("utf-8"))}


def state_copies(config: OptimizerConfig) -> int:
    """Tensors of a parameter's size that are kept for it: momentum and the like, and its moving average."""
    name, arguments, average = config.optim.name, config.optim.arguments, int(config.model_ema is not None)
    if name.startswith(TIMM):
        return average + _TIMM_COPIES.get(name.removeprefix(TIMM), 2)
    _, copies = TORCH_OPTIMIZERS.get(name, ("", 2))
    copies += sum(arguments.get(key) is True for key in ("amsgrad", "centered"))
    momentum = config.momentum if name == "sgd" else arguments.get("momentum", 0.0) if name == "rmsprop" else 0.0
    return average + copies + (momentum > 0)
