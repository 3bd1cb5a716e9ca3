"""Options of a run: optimizer, learning rate and its schedule, loss, and length.

Nothing here imports torch.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from hybridpar.errors import UsageError, check, nearest, not_installed, shortened
from hybridpar.spec import (
    AT_LEAST_0,
    AT_LEAST_1,
    AT_MOST_1,
    BELOW_1,
    BETWEEN_0_AND_1,
    POSITIVE,
    Options,
    Spec,
    Unnamed,
    defaults_of,
    fields_of,
    read_literal,
    read_values,
    split_fields,
    split_name,
)

#: Optimizers of torch.optim by the names that users type.
TORCH_OPTIMIZERS = {
    name.lower(): name
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW"),
        *("ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "SGD"),
    )
}

#: What stands before the name of an optimizer of timm.
TIMM = "timm/"


class Groups(Options):
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


class Optimizer(Options):
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


class Loss(Options, choice="ce"):
    """`ce`: cross-entropy; and what all losses have.

    Attributes:
        smoothing: Label smoothing.
    """

    smoothing: Annotated[float, BELOW_1] = 0.0

    def of_each_class(self, several_labels: bool) -> bool:
        """Whether each class has a loss, and a probability, of its own."""
        return False


class Binary(Loss, choice="bce"):
    """`bce`: binary cross-entropy of each class.

    Attributes:
        threshold: Targets above it count as 1, and others as 0; None: as they are.
    """

    threshold: Annotated[float | None, BELOW_1] = None

    def of_each_class(self, several_labels: bool) -> bool:
        return True


class Automatic(Binary, choice="auto"):
    """`auto`: `bce` where samples have several labels, else `ce`."""

    def of_each_class(self, several_labels: bool) -> bool:
        return several_labels


class GradientLimit(Options):
    """`1.0,mode=norm`: what gradients are clipped to.

    Attributes:
        limit: Of what `mode` says.
        mode: The global `norm`, each `value`, or the norm of a unit's gradient by that of its weights (`agc`, Brock et
            al. 2021).
    """

    limit: Annotated[float, Unnamed("LIMIT"), POSITIVE]
    mode: Literal["norm", "value", "agc"] = "norm"


class Moment(NamedTuple):
    """Where in a run a step is, in steps, or in epochs where rates change between these only.

    Attributes:
        now: Of the step.
        total: Of the run.
        epoch: Of an epoch.
        warmup: Of the warm-up, which is over.
        low: The least rate as a fraction of the peak rate.
    """

    now: float
    total: int
    epoch: float
    warmup: int
    low: float

    def between(self, part: float) -> float:
        """A part of the way from the least rate to the peak."""
        return self.low + (1.0 - self.low) * part


class Schedule(Options, choice="constant"):
    """`constant`: the peak rate after the warm-up; and what all schedules have.

    Attributes:
        warmup: Epochs of linear warm-up, at most half of the run.
        warmup_lr: Learning rate of the first step; None: the first of equal steps from zero to the peak rate.
        update: Change the rate before every step, or between epochs only, as timm and torchvision do by default.
    """

    warmup: Annotated[float, AT_LEAST_0] = 1.0
    warmup_lr: Annotated[float | None, AT_LEAST_0] = None
    update: Literal["step", "epoch"] = "step"

    def factor(self, at: Moment) -> float:
        """The rate after the warm-up as a fraction of the peak rate."""
        return 1.0


class Falling(Schedule):
    """What schedules have by which the rate falls.

    Attributes:
        min: Learning rate that they fall to, and not below.
    """

    min: Annotated[float, AT_LEAST_0] = 0.0


class Counted(Falling):
    """What schedules have that are counted in steps or epochs.

    Attributes:
        warmup_prefix: Whether they begin after the warm-up; else they are counted from the first epoch, the warm-up in
            place of their beginning, as timm's default.
    """

    warmup_prefix: bool = True

    def first(self, at: Moment) -> int:
        """Where they begin."""
        return at.warmup if self.warmup_prefix else 0


class Ending(Counted):
    """What schedules have that end where the run does.

    Attributes:
        cooldown: Last epochs of the run, at the rate `min`.
    """

    cooldown: Annotated[float, AT_LEAST_0] = 0.0

    def progress(self, at: Moment) -> float:
        """The part that is over, of the way to the cool-down."""
        first = self.first(at)
        return min(1.0, (at.now - first) / max(1, at.total - round(self.cooldown * at.epoch) - first))


class Cosine(Ending, choice="cosine"):
    """`cosine`: half a period of a cosine, or several with warm restarts.

    It is low + (high - low) (1 + cos(pi progress)) / 2 (Loshchilov and Hutter 2017, equation 5).

    Attributes:
        cycle: Epochs of the first half period, after which the rate starts again at its peak; None: no restarts.
        grow: What the length of a cycle is multiplied with for the next one.
        decay: What the peak rate is multiplied with for the next cycle.
    """

    cycle: Annotated[float | None, POSITIVE] = None
    grow: Annotated[float, AT_LEAST_1] = 1.0
    decay: Annotated[float, AT_MOST_1] = 1.0

    def factor(self, at: Moment) -> float:
        progress, high = self.progress(at), 1.0
        if self.cycle is not None and progress < 1.0:
            since, length, number = at.now - self.first(at), self.cycle * at.epoch, 0
            while since >= length:
                since, length, number = since - length, length * self.grow, number + 1
            progress, high = since / length, self.decay**number
        return at.low + max(0.0, high - at.low) * 0.5 * (1.0 + math.cos(math.pi * progress))


class Poly(Ending, choice="poly"):
    """`poly`: a power of what is left of the run.

    Attributes:
        power: The exponent.
    """

    power: Annotated[float, POSITIVE] = 1.0

    def factor(self, at: Moment) -> float:
        return at.between(math.pow(1.0 - self.progress(at), self.power))


class StableThenDown(Falling, choice="wsd"):
    """`wsd`: constant, then down by 1 - sqrt(progress) (Hägele et al. 2024, equation 1).

    Attributes:
        cooldown: As that of `cosine`.
        decay: Epochs of the way down; below 1 a fraction of what lies between warm-up and cool-down. 0.2: Hägele et
            al. 2024, section 3.
    """

    cooldown: Annotated[float, AT_LEAST_0] = 0.0
    decay: Annotated[float, POSITIVE] = 0.2

    def factor(self, at: Moment) -> float:
        length = at.total - round(self.cooldown * at.epoch) - at.warmup
        down = round(self.decay * length if self.decay < 1 else self.decay * at.epoch)
        progress = (at.now - at.warmup - (length - down)) / max(1, down)
        return at.between(1.0 - math.sqrt(min(1.0, max(0.0, progress))))


class Exponential(Counted, choice="exp"):
    """`exp`: exponential decay.

    Attributes:
        every: Epochs in which the rate falls once by `rate`.
        rate: What the rate is multiplied with.
    """

    every: Annotated[float, POSITIVE] = 1.0
    rate: Annotated[float, AT_MOST_1] = 0.1

    def factor(self, at: Moment) -> float:
        return max(at.low, math.pow(self.rate, (at.now - self.first(at)) / (self.every * at.epoch)))


class Steps(Counted, choice="step"):
    """`step`: equal falls.

    Attributes:
        every: Epochs from one fall of the rate to the next; None: as `fractions` says.
        fractions: Of the run, at which the rate falls without `every`.
        rate: What the rate is multiplied with.
    """

    every: Annotated[float | None, POSITIVE] = None
    fractions: tuple[Annotated[float, BETWEEN_0_AND_1], ...] = (0.5, 0.75)
    rate: Annotated[float, AT_MOST_1] = 0.1

    def factor(self, at: Moment) -> float:
        if self.every is None:
            falls: float = sum(at.now >= fraction * at.total for fraction in self.fractions)
        else:
            falls = (at.now - self.first(at)) // (self.every * at.epoch)
        return max(at.low, math.pow(self.rate, falls))


class MultiStep(Counted, choice="multistep"):
    """`multistep`: falls after named epochs, as torch's MultiStepLR.

    Attributes:
        at: The epochs.
        rate: What the rate is multiplied with.
    """

    at: tuple[Annotated[float, POSITIVE], ...]
    rate: Annotated[float, AT_MOST_1] = 0.1

    def factor(self, at: Moment) -> float:
        return max(at.low, math.pow(self.rate, sum(at.now - self.first(at) >= end * at.epoch for end in self.at)))


class OnPlateau(Falling, choice="plateau"):
    """`plateau`: falls where the test accuracy does not rise; see `hybridpar.optim.schedule.Plateau`.

    Attributes:
        patience: Epochs without a better test accuracy after which the rate falls.
        rate: What the rate is multiplied with.
    """

    patience: Annotated[int, AT_LEAST_0] = 10
    rate: Annotated[float, AT_MOST_1] = 0.1


class Average(Options):
    """`0.9998`: an exponential moving average of parameters and buffers.

    Attributes:
        decay: Part of the average that a step keeps.
        warmup: Let the decay grow from 0.
        every: Steps from one update of the average to the next.
    """

    decay: Annotated[float, Unnamed("DECAY"), BELOW_1]
    warmup: bool = False
    every: Annotated[int, AT_LEAST_1] = 1


_Positive = Annotated[float, POSITIVE]


class LearningRate(Options):
    """`0.1`, or `0.1/256`: for so many samples per step, and in proportion for others (Goyal et al. 2017).

    Attributes:
        rate: The rate, and the samples per step that it is for; alone it is for any number.
    """

    rate: Annotated[tuple[_Positive] | tuple[_Positive, _Positive], Unnamed("RATE")]

    @property
    def samples(self) -> float | None:
        """Samples per step that the rate is for; None: any number."""
        return self.rate[1] if len(self.rate) == 2 else None


class OptimizerConfig(Options):
    """Optimizer, learning-rate schedule, loss, and length of the run.

    Attributes:
        epochs: Number of epochs.
        steps: Stop after this many steps in all, whatever --epochs says.
        test_every: Epochs from one test of the model to the next; it is tested after the last one in any case.
        optimizer: sgd, adamw or another of torch.optim in lower case, or timm/NAME (lamb, lion, ...), with arguments,
            as `sgd:momentum=0.9,nesterov` or `adamw:betas=0.9/0.95`. For each: `decay_all`,
            `no_decay=*.pos_embed`, `layer_decay=0.75`, `head_lr=10`.
        lr: Peak learning rate, or `0.1/256`: 0.1 for a batch of 256, and in proportion for others. Default: 0.02, and
            0.01 with --sync onebit-sgd.
        weight_decay: Weight decay; not applied to biases, normalisation layers, and what the model's no_weight_decay()
            names.
        lr_schedule: `cosine:warmup=5,min=1e-6`, `cosine:cycle=10` with restarts, `step:every=30`, `multistep:at=30/60`,
            `exp`, `poly`, `wsd`, `plateau`, `constant`; all with `warmup=EPOCHS`, usually 1.
        loss: `ce` (cross-entropy), `bce` (binary cross-entropy of each class), `auto`: bce where samples have several
            labels. With `smoothing=0.1`; bce with `threshold=0.2`: targets above count as 1.
        clip_grad: Clip gradients to this global norm; with `mode=value` each value; with `mode=agc` the norm of a
            unit's gradient over that of its weights.
        model_ema: Keep an exponential moving average of parameters and buffers; it is tested too, and saved beside the
            model. `0.9998`: what a step keeps of it; `0.9998,warmup`: that grows from 0; `0.9998,every=N`: updated
            every N steps.
        select_batch: Every so many epochs, compare batch sizes on a small part of the data, and go on with the largest
            that learns as well; 0: never.
    """

    epochs: Annotated[int, AT_LEAST_1] = 10
    steps: Annotated[int | None, AT_LEAST_1] = None
    test_every: Annotated[int, AT_LEAST_1] = 1
    optimizer: Annotated[str, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = "sgd"
    lr: Annotated[float | str | None, tyro.conf.arg(metavar="RATE[/SAMPLES]")] = None
    weight_decay: Annotated[float, AT_LEAST_0] = 5e-4
    lr_schedule: Annotated[str, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = "cosine"
    loss: Annotated[str, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = "auto"
    clip_grad: Annotated[float | str | None, tyro.conf.arg(metavar="LIMIT[,mode=MODE]")] = None
    model_ema: Annotated[float | str | None, tyro.conf.arg(metavar="DECAY[,KEY=VALUE,...]")] = None
    select_batch: Annotated[int, AT_LEAST_0] = 0

    rate = Spec[LearningRate | None]("lr", LearningRate)
    rate_schedule = Spec("lr_schedule", Schedule)
    criterion = Spec("loss", Loss)
    clipping = Spec[GradientLimit | None]("clip_grad", GradientLimit)
    ema = Spec[Average | None]("model_ema", Average)

    @property
    def optim(self) -> Optimizer:
        """What `optimizer` stands for."""
        return read_optimizer(self.optimizer)

    @property
    def peak_lr(self) -> float:
        """The learning rate of which every step's is a fraction; that of `0.1/256` for the 256 samples."""
        return 0.02 if self.rate is None else self.rate.rate[0]


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
    value = read_literal({"on": "True", "off": "False", "none": "None"}.get(text.lower(), text))
    is_finite = not isinstance(value, float) or math.isfinite(value)
    check(is_finite, f"--optimizer with {shortened(text)}", "Numbers are finite.")
    return value


def check_optimizer(config: OptimizerConfig) -> None:
    """Check what `optimizer` says, without importing torch or timm."""
    what, nesterov = f"--optimizer {config.optimizer}", config.optim.arguments.get("nesterov")
    is_number = type(momentum := config.optim.arguments.get("momentum", 0.9)) in (int, float)
    check(is_number, f"{what}: momentum={momentum}", "It must be a number.", "Write momentum=0.9.")
    check(not nesterov or momentum != 0, what, "Nesterov's method needs momentum.", "Write sgd:momentum=0.9,nesterov.")
    both = {"lr", "weight_decay"} & config.optim.arguments.keys()
    check(not both, what, "Learning rate and weight decay are options by themselves.", "Write --lr or --weight-decay.")
    name = config.optim.name
    if name.startswith(TIMM) and importlib.util.find_spec("timm") is None:
        raise not_installed(f"the optimizer {shortened(name)} comes with timm", "timm")
    # The worker that makes the optimizer knows timm's names: timm takes long to import.
    if name not in TORCH_OPTIMIZERS and not name.startswith(TIMM):
        raise UsageError(f"unknown optimizer {shortened(repr(name))}", fix=nearest(name, TORCH_OPTIMIZERS))
