"""The options of a training run as frozen dataclasses, one for each group that `hybridpar train --help` shows.

What stands behind `Attributes:` is the help on the command line, and a field's default is the default there. Nothing
here imports torch, so that the command line is read at once.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from hybridpar.config import conflicts
from hybridpar.config.data import DataConfig, ModelConfig, images_over
from hybridpar.config.optimizer import OptimizerConfig, check_optimizer
from hybridpar.config.sync import ONEBIT_RATE, SyncConfig
from hybridpar.errors import UsageError, check, refuse
from hybridpar.schedule.layout import Layout, PlacementKind
from hybridpar.schedule.schedules import SCHEDULES
from hybridpar.spec import AT_LEAST_1, POSITIVE, Options, Spec, Unnamed, check_rules, defaults_of


class PipelineConfig(Options):
    """Parallelism: workers, and the stages, replicas and micro-batches that they are used for.

    Attributes:
        device: `auto`: a GPU for each worker, where there are any; `cuda`: the same, or an error; `cpu`: the CPU in any
            case.
        nproc: Workers on this machine; default: one per GPU, else 2 on the CPU. Under torchrun: the workers it started.
        stages: Stages that the model is cut into: lanes of one worker, or spread over the workers.
        replicas: Copies of the whole pipeline, which share each batch; default: as many as the workers allow.
        shares: What each replica gets of a batch, for workers of unequal speed: `equal`; numbers such as `1,2`, by
            rank, in any unit; or `auto`: from equal parts on, as measured while training, and again when speeds change.
        micro_batches: Micro-batches per replica and step; their gradients are added up.
        schedule: Order of passes: 1f1b, gpipe, interleaved, looped_bfs, or another registered one; default: greedy, the
            fastest of all on the measured times.
        placement: Stages on lanes: one per lane (`linear`), round-robin (`loop`), or V-shaped (`v`); default: linear,
            and loop where there are more stages than workers. Or, for every replica, the rank that runs each stage:
            `0,0;1,2` is worker 0 alone beside workers 1 and 2 as a pipeline.
        recompute: Stages that keep only their inputs, and compute their activations again in the backward pass; or
            `all`, which without --stages cuts the model into eight that run one after the other on each device.
        offload: Stages whose activations wait for the backward pass in the host's memory, where they wait long enough.
            The result is the same; on a CPU it saves nothing.
    """

    device: Literal["auto", "cuda", "cpu"] = "auto"
    nproc: Annotated[int | None, AT_LEAST_1] = None
    stages: Annotated[int, AT_LEAST_1] = 1
    replicas: Annotated[int | None, AT_LEAST_1] = None
    shares: str = "equal"
    micro_batches: Annotated[int, AT_LEAST_1] = 1
    schedule: str | None = None
    placement: str | None = None
    recompute: tuple[Literal["all"]] | tuple[int, ...] = ()
    offload: tuple[int, ...] = ()

    @property
    def share_list(self) -> tuple[float, ...] | None:
        """The numbers of `shares`; None for `equal` and `auto`.

        Raises:
            UsageError: It is neither a word nor a list of numbers, or they sum to nothing.
        """
        if self.shares.strip() in ("equal", "auto"):
            return None
        try:
            shares = tuple(map(float, self.shares.split(",")))
        except ValueError:
            shares = ()
        if not (sum(shares) > 0 and all(0 <= share < math.inf for share in shares)):
            raise UsageError(
                f"--shares is {self.shares}",
                "It must be equal, auto, or a number for each replica: none below 0, and not all of them 0.",
                "Write for instance --shares 1,2 where the second worker is twice as fast.",
            )
        return shares

    def check_shares(self, replicas: int | None) -> None:
        """Check that every replica has a share, where their number is known."""
        shares = self.share_list
        check(
            shares is None or replicas in (None, len(shares)),
            f"--shares {self.shares} for {replicas} replicas",
            "Every replica has a share of the batch: every worker, where the model is not cut.",
            "Give as many numbers as there are replicas.",
        )

    @property
    def layout(self) -> Layout | None:
        """Where stages run, as `placement` says; None where it names a kind or nothing.

        Raises:
            UsageError: It is neither, or does not fit the numbers of stages and replicas.
        """
        if self.placement is None or self.placement in get_args(PlacementKind):
            return None
        try:
            layout = Layout.parse(self.placement.split(";"))
        except ValueError:
            layout = None
        if layout is None or layout.stages != self.stages or self.replicas not in (None, layout.replicas):
            replicas = "" if self.replicas is None else f" and --replicas {self.replicas}"
            raise UsageError(
                f"--placement {self.placement} with --stages {self.stages}{replicas}",
                "It is linear, loop, v, or for every replica, separated by `;`, a rank for each stage. Ranks are "
                "numbered from 0; each is in one replica.",
                "Write for instance --stages 2 --placement '0,0;1,2'.",
            )
        return layout

    @property
    def workers_wanted(self) -> int | None:
        """Number of workers that stages and replicas ask for; None where they leave it open."""
        if (layout := self.layout) is not None:
            return layout.workers
        return self.stages * self.replicas if self.stages > 1 and self.replicas is not None else None


class KernelConfig(Options):
    """Kernels and precision: how the model is computed on a device.

    Attributes:
        amp: Run the forward pass in bfloat16, or in float16 with dynamic loss scaling, where autocast allows it.
        memory_format: Memory format of images and activations; auto: contiguous, and channels_last with --kernels.
        kernels: Tuned kernels for depthwise convolutions and BatchNorm, used where they are faster: `auto`, which times
            what this machine has no record of, once, or a file of `hybridpar tune`.
        compile: Compile the model, or every stage of it, with torch.compile.
        cuda_graph: Capture the training step as one CUDA graph and replay it, for small kernels or fast GPUs. auto: on
            a worker alone, where it is possible and the first replay does what the step before it did; on: refuse to
            begin where it is not possible.
    """

    amp: Literal["none", "bf16", "fp16"] = "none"
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    kernels: str = "off"
    compile: bool = False
    cuda_graph: Literal["auto", "on", "off"] = "auto"

    @property
    def uses_kernels(self) -> bool:
        """Whether tuned kernels may take the place of torch's."""
        return self.kernels.strip() != "off"

    @property
    def uses_channels_last(self) -> bool:
        """Whether images and activations are in channels_last."""
        return self.memory_format == "channels_last" or (self.memory_format == "auto" and self.uses_kernels)


class PlanningConfig(Options):
    """Planning: whether the fastest way to train is searched for, and what it may change.

    Attributes:
        plan: `auto`: measure machine and model once, and search for the fastest way to train that the other options
            allow; `none`: train as the other options say; or the file of a plan, which is followed.
        fidelity: What `--plan auto` and `--compress auto` may choose: `exact`: the same result up to rounding; `close`:
            also 16-bit arithmetic and gradients; `lossy`: also codecs that are known to keep the accuracy.
    """

    plan: Literal["auto", "none"] | Path = "auto"
    fidelity: Literal["exact", "close", "lossy"] = "exact"

    @property
    def plan_file(self) -> Path | None:
        """The plan to follow, where a file was named."""
        return None if str(self.plan) in ("auto", "none") else Path(self.plan)

    @property
    def searches(self) -> bool:
        """Whether the fastest plan is to be searched for."""
        return str(self.plan) == "auto"


#: A figure of an epoch that can be followed.
Metric = Literal["test_accuracy", "test_loss", "train_loss", "ema_test_accuracy", "ema_test_loss"]


class Checkpoints(Options):
    """`epoch/60s,keep=2,best=3,by=test_loss,stop=5`: when a run saves, and what stays.

    Attributes:
        every: `epoch`, a number of steps as `200`, seconds as `60s`, or several of these; or `never`.
        keep: How many of the last checkpoints stay.
        best: Of how many of the best epochs the checkpoints stay.
        by: The figure that says which epochs are the best: accuracies the larger, losses the smaller. With --model-ema
            it is ema_test_accuracy where nothing else is said, as the average is what is used then.
        stop: End the run after so many tested epochs without a better one; None: never.
    """

    every: Annotated[tuple[str, ...], Unnamed("WHEN")] = ("epoch", "60s")
    keep: Annotated[int, AT_LEAST_1] = 2
    best: Annotated[int, AT_LEAST_1] = 1
    by: Metric = "test_accuracy"
    stop: Annotated[int | None, AT_LEAST_1] = None

    def __post_init__(self) -> None:
        units = [part.lstrip("0123456789") for part in self.every]
        is_known = all(re.fullmatch("epoch|[1-9][0-9]*s?", part) for part in self.every) and len(units) == len({*units})
        check(
            is_known or self.never,
            f"--checkpoints {'/'.join(self.every)}",
            "It must be epoch, a number of steps as 200, seconds as 60s, one of each separated by /, or never.",
            "Write for instance --checkpoints epoch/60s.",
        )

    @property
    def never(self) -> bool:
        """Whether nothing is saved but at the end of a run that is interrupted."""
        return self.every == ("never",)

    @property
    def steps(self) -> int | None:
        """Steps from one checkpoint to the next."""
        return next((int(part) for part in self.every if part.isdigit()), None)

    @property
    def seconds(self) -> float | None:
        """Seconds from one checkpoint to the next."""
        return next((float(part[:-1]) for part in self.every if part[:-1].isdigit() and part[-1] == "s"), None)


class RunConfig(Options):
    """Run directory and checkpoints: what a run writes, and what it goes on from.

    Attributes:
        run_dir: Directory of this run; default: runs/MODEL-DATA.
        resume: Go on from the last whole checkpoint of the run directory.
        resume_from: Start from this checkpoint (a step-N directory) of any run with the same model.
        checkpoints: When to save: `epoch`, a number of steps, seconds as `60s`, several with / between them, or
            `never`; how many of the last to keep (`keep`) and of the best (`best=3,by=test_loss`); with `stop=5` the
            run ends after so many epochs without a better one.
        log: Send figures to `tensorboard`, `wandb` or `mlflow`; several joined by commas or repeated, or `none`.
            Default: tensorboard, where it is installed.
        timeline: Write when everything ran in some steps, beside what was predicted, as a trace for Perfetto.
        profile: Write a trace of torch.profiler of some steps of every worker, for Perfetto, to profile/ in the run
            directory.
    """

    run_dir: Path | None = None
    resume: bool = False
    resume_from: Path | None = None
    checkpoints: Annotated[str, tyro.conf.arg(metavar="[WHEN][,KEY=VALUE,...]")] = "epoch/60s,keep=2"
    log: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    timeline: Path | None = None
    profile: bool = False

    saving = Spec("checkpoints", Checkpoints)


class AdvancedConfig(Options):
    """Advanced: reproducibility, timeouts, process settings, debugging.

    Attributes:
        seed: Seed of weights, shuffling, augmentation and dropout.
        deterministic: Use deterministic algorithms only.
        timeout: Seconds after which a worker that does not answer is an error.
        tune_process: `--no-tune-process`: leave allocator, threads and affinity of CPU workers as they are; by default
            they are set for training.
        debug: Show tracebacks.
    """

    seed: int = 0
    deterministic: bool = False
    timeout: Annotated[float, POSITIVE] = 120.0
    tune_process: bool = True
    debug: bool = False


class TrainConfig(
    AdvancedConfig,
    RunConfig,
    PlanningConfig,
    KernelConfig,
    SyncConfig,
    PipelineConfig,
    OptimizerConfig,
    DataConfig,
    ModelConfig,
):
    """All options of a training run.

    Attributes:
        given: Names of the options that the user named, on the command line or in a file, whatever the values; None
            for a configuration that was made in Python, where all values are meant.
    """

    given: Annotated[frozenset[str] | None, tyro.conf.Suppress] = None

    @property
    def named(self) -> frozenset[str]:
        """Names of the options that the user set: those that are given, and those that are not at their default."""
        return (self.given or frozenset()) & defaults_of(TrainConfig).keys() | self.changed

    @property
    def changed(self) -> frozenset[str]:
        """Names of the options that are not at their default."""
        defaults = defaults_of(TrainConfig)
        return frozenset(name for name in defaults if name != "given" and getattr(self, name) != defaults[name])

    @property
    def is_staged(self) -> bool:
        """Whether the model is to be cut into stages."""
        return self.stages > 1 or self.plan_file is not None

    @property
    def saving(self) -> Checkpoints:  # type: ignore[override]
        """When to save, and which epochs are the best: by the figure that is named, or that of what is used later."""
        is_averaged = self.model_ema is not None and "by" not in self.checkpoints
        return replace(super().saving, by="ema_test_accuracy") if is_averaged else super().saving

    @property
    def peak_lr(self) -> float:
        """The learning rate of which every step's is a fraction."""
        if self.rate is None and self.is_onebit:
            return ONEBIT_RATE
        per_batch = self.rate is not None and self.rate.samples
        return super().peak_lr * self.samples_per_step / per_batch if per_batch else super().peak_lr

    def parts_per_step(self, micro_batches: int) -> int:
        """Micro-batches that a worker is given for a step; with `late=half` those of both halves.

        Args:
            micro_batches: Of a replica.
        """
        return micro_batches * (2 if self.late == "half" else 1)

    def check(self) -> None:
        """Check what can be checked without the data and the machine.

        Raises:
            UsageError: A value is out of range, with the rule it breaks.
        """
        check_rules(self)
        check_optimizer(self)
        _ = self.data_options  # is read, or refused
        if self.schedule is not None:
            SCHEDULES.get(self.schedule)  # raises where there is none
        check(
            self.model_ema is not None or not self.saving.by.startswith("ema_"),
            f"--checkpoints {self.checkpoints} without --model-ema",
            "There is no moving average to test.",
            "Add for instance --model-ema 0.9998.",
        )
        self.check_conflicts()
        if self.layout is not None and not self.layout.is_equal:
            self.check_unequal()
        # With hosts, `nproc` is the workers of each.
        nproc = self.nproc if getattr(self, "hosts", None) is None else None
        workers = nproc if self.stages == 1 and not self.searches and self.plan_file is None else None
        self.check_shares(self.layout.replicas if self.layout else self.replicas or workers)
        if (servers := self.parameter_servers) is not None and nproc is not None:
            servers.split_count(nproc)

    @property
    def needs_whole(self) -> str | None:
        """An option with which every worker of a pipeline holds the whole model; None where there is none."""
        return conflicts.first_of(self, conflicts.NEED_WHOLE_MODEL)

    def check_conflicts(self) -> None:
        """Refuse two options that contradict each other."""
        conflicts.refuse_conflicts(self)

    def check_unequal(self) -> None:
        """Refuse what needs replicas of equal numbers of workers."""
        if option := conflicts.first_of(self, conflicts.NEED_EQUAL_REPLICAS):
            raise refuse(option, "replicas of different numbers of workers", "It was made for equal replicas.")

    @property
    def may_be_unequal(self) -> bool:
        """Whether replicas of a plan may differ in their parts of a batch, and in their numbers of workers."""
        return not conflicts.first_of(self, (*conflicts.NEED_EQUAL_REPLICAS, "shares", "cuda graph", "select_batch"))


#: The groups of `train --help` and of configuration files, with the dataclasses whose options each holds.
GROUPS: dict[str, tuple[type, ...]] = {
    "Model and data": (ModelConfig, DataConfig),
    "Optimisation": (OptimizerConfig,),
    "Parallelism": (PipelineConfig,),
    "Gradient exchange": (SyncConfig,),
    "Kernels and precision": (KernelConfig,),
    "Planning": (PlanningConfig,),
    "Run directory and checkpoints": (RunConfig,),
    "Advanced": (AdvancedConfig,),
}


class TrainedOptions(Options):
    """Options of the commands that use a trained model: which run or weights, and what is otherwise than in the run.

    Attributes:
        weights: Those of the best epoch of the run by --checkpoints, or of its last checkpoint; and of these the moving
            average of --model-ema, or what was trained. Default: best, and ema where the run keeps one.
        model: Model that the weights are of; default: that of the run.
        model_arg: Argument of the model's builder, as key=value; may be repeated. Default: those of the run.
        data: Data set, as `train --data` takes it; default: that of the run.
        data_root: Directory of the data set's files; default: that of the run.
        image_size: Side of the images, in pixels; default: as the run tested them.
        debug: Show tracebacks.
    """

    weights: Annotated[str | None, tyro.conf.arg(metavar="[best|last][,ema|,raw]")] = None
    model: str | None = None
    model_arg: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    data: str | None = None
    data_root: Path | None = None
    image_size: int | None = None
    debug: bool = False

    def changed(self, config: TrainConfig) -> TrainConfig:
        """The options of a run, or those by default, with what is otherwise."""
        named = ("model_arg", "data", "data_root", "batch_size", "loader_workers", "amp", "debug")
        changes = {name: value for name in named if (value := getattr(self, name, None)) not in (None, ())}
        if self.image_size is not None:
            changes["image_size"] = images_over(config.image_size, f"{self.image_size},test=auto")
        return replace(config, **changes)
