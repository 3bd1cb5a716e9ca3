"""The options of a training run as frozen dataclasses, one for each group that `hybridpar train --help` shows.

The docstring of a field is its help text on the command line, and its default is the default there. Nothing here
imports torch, so that the command line is read at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from hybridpar.config.checkpoints import Checkpoints, read_checkpoints
from hybridpar.config.conflicts import (
    CONFLICTS,
    GRADIENT_CONFLICTS,
    NEED_EQUAL_REPLICAS,
    NEED_WHOLE_MODEL,
    refuse_pairs,
)
from hybridpar.config.data import DataConfig, ModelConfig, unless
from hybridpar.config.optimizer import OptimizerConfig, check_optimizer
from hybridpar.config.rates import read_rate
from hybridpar.config.sync import ONEBIT_RATE, AllReduce, Exchange, Local, OneBit, Outer, ParameterServers, read_sync
from hybridpar.errors import UsageError, refuse
from hybridpar.schedule.layout import Layout, PlacementKind
from hybridpar.schedule.schedules import SCHEDULES
from hybridpar.spec import AT_LEAST_1, POSITIVE, check_rules


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How workers exchange gradients."""

    sync: Annotated[str, tyro.conf.arg(metavar="NAME[,KEY=VALUE,...]")] = "allreduce"
    """Replicas meet by `allreduce`, `onebit-sgd`, `outer:H,opt=nesterov`, `local:H`, or at servers: `ps,servers=2`,
    `ps-async`, `softsync:N`. Without servers: `lanes=2`, `bucket=8` (MiB), `hierarchy=off`."""
    compress: str = "none"
    """Codec of gradients between replicas: `none`, `fp16`, `onebit`, `qsgd_mn:bits=4`, `powersgd:rank=2`, ...; rules
    such as `layer4.* -> powersgd; *.weight -> onebit`; or `auto`, which measures. Anything but `none` changes the
    result."""
    batch_norm: Literal["pooled", "local", "sync", "frozen"] = "pooled"
    """BatchNorm statistics. `pooled`: running statistics of the whole batch; `sync`: also normalise over all replicas;
    `local`: per replica, averaged at checkpoints; `frozen`: normalise by those that the model has, and keep them."""
    guard: Annotated[bool, unless("Do not skip steps in which a gradient is not finite.", "all workers skip them")] = (
        True
    )
    """Whether a step in which any gradient is not finite is skipped, on all workers."""
    shard_optimizer: bool = False
    """Divide the optimizer's state among the replicas, each of which updates a part of the parameters and hands it
    round: the same result in less memory, for another half of the traffic."""

    @property
    def exchange(self) -> Exchange:
        """How replicas meet without servers; with servers, what holds for the workers that share a host."""
        sync = read_sync(self.sync)
        return sync if isinstance(sync, Exchange) else Exchange()

    @property
    def is_onebit(self) -> bool:
        """Whether this is the recipe `onebit-sgd`."""
        return isinstance(self.exchange, OneBit)

    @property
    def late(self) -> Literal["off", "delay", "half"]:
        """By how much gradients are applied late."""
        return self.exchange.late if isinstance(self.exchange, AllReduce) else "off"

    @property
    def outer(self) -> Outer | None:
        """The outer loop of `outer:H`, or of `local:H`, which is one with the plain mean; None otherwise."""
        sync = self.exchange
        if isinstance(sync, Outer):
            return sync
        return Outer(every=sync.every) if isinstance(sync, Local) else None

    @property
    def parameter_servers(self) -> ParameterServers | None:
        """The parameter servers that gradients go to; None otherwise."""
        sync = read_sync(self.sync)
        return sync if isinstance(sync, ParameterServers) else None

    @property
    def chooses(self) -> bool:
        """Whether codecs are measured and chosen (`--compress auto`)."""
        return self.compress.strip() == "auto"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Parallelism: workers, and the stages, replicas and micro-batches that they are used for."""

    device: Literal["auto", "cpu"] = "auto"
    """`auto`: a GPU for each worker, where there are any; `cpu`: the CPU in any case."""
    nproc: Annotated[int | None, AT_LEAST_1] = None
    """Workers on this machine; default: one per GPU, else 2 on the CPU. Under torchrun: the workers it started."""
    stages: Annotated[int, AT_LEAST_1] = 1
    """Stages that the model is cut into: lanes of one worker, or spread over the workers."""
    replicas: Annotated[int | None, AT_LEAST_1] = None
    """Copies of the whole pipeline, which share each batch; default: as many as the workers allow."""
    shares: str = "equal"
    """What each replica gets of a batch, for workers of unequal speed: `equal`; numbers such as `1,2`, by rank, in any
    unit; or `auto`: from equal parts on, as measured while training, and again when speeds change."""
    micro_batches: Annotated[int, AT_LEAST_1] = 1
    """Micro-batches per replica and step; their gradients are added up."""
    schedule: str | None = None
    """Order of passes: 1f1b, gpipe, interleaved, looped_bfs, or another registered one; default: greedy, the fastest of
    all on the measured times."""
    placement: str | None = None
    """Stages on lanes: one per lane (`linear`), round-robin (`loop`), or V-shaped (`v`); default: linear, and loop
    where there are more stages than workers. Or, for every replica, the rank that runs each stage: `0,0;1,2` is worker
    0 alone beside workers 1 and 2 as a pipeline."""
    recompute: tuple[int | Literal["all"], ...] = ()
    """Stages that keep only their inputs, and compute their activations again in the backward pass; or `all`, which
    without --stages cuts the model into eight that run one after the other on each device."""
    offload: tuple[int, ...] = ()
    """Stages whose activations wait for the backward pass in the host's memory, where they wait long enough. The result
    is the same; on a CPU it saves nothing."""

    @property
    def share_list(self) -> tuple[float, ...] | None:
        """The numbers of `shares`; None for `equal` and `auto`.

        Raises:
            UsageError: It is neither a word nor a list of numbers, or they sum to nothing.
        """
        shares = _numbers(self.shares)
        if shares is not None and not (sum(shares) > 0 and all(0 <= share < math.inf for share in shares)):
            raise UsageError(
                f"--shares is {self.shares}",
                "It must be equal, auto, or a number for each replica: none below 0, and not all of them 0.",
                "Write for instance --shares 1,2 where the second worker is twice as fast.",
            )
        return shares

    @property
    def layout(self) -> Layout | None:
        """Where stages run, as `placement` says; None where it names a kind or nothing.

        Raises:
            UsageError: It is neither, or does not fit the numbers of stages and replicas.
        """
        said = self.placement
        if said is None or said in get_args(PlacementKind):
            return None
        try:
            layout = Layout.parse(said.split(";"))
        except ValueError:
            layout = None
        if layout is None or layout.stages != self.stages:
            raise UsageError(
                f"--placement {said} with --stages {self.stages}",
                "It is linear, loop, v, or for every replica, separated by `;`, a rank for each stage. Ranks are "
                "numbered from 0; each is in one replica.",
                "Write for instance --stages 2 --placement '0,0;1,2'.",
            )
        if self.replicas not in (None, layout.replicas):
            raise UsageError(
                f"--placement {said} with --replicas {self.replicas}",
                f"It places {layout.replicas} replica(s).",
                "Leave out --replicas.",
            )
        return layout

    @property
    def workers_wanted(self) -> int | None:
        """Number of workers that stages and replicas ask for; None where they leave it open."""
        if (layout := self.layout) is not None:
            return layout.workers
        return self.stages * self.replicas if self.stages > 1 and self.replicas is not None else None


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Kernels and precision: how the model is computed on a device."""

    amp: Literal["none", "bf16", "fp16"] = "none"
    """Run the forward pass in bfloat16, or in float16 with dynamic loss scaling, where autocast allows it."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Memory format of images and activations; auto: contiguous, and channels_last with --kernels."""
    kernels: str = "off"
    """Tuned kernels for depthwise convolutions and BatchNorm, used where they are faster: `auto`, which times what this
    machine has no record of, once, or a file of `hybridpar tune`."""
    compile: bool = False
    """Compile the model, or every stage of it, with torch.compile."""
    cuda_graph: bool = False
    """Capture the training step as one CUDA graph and replay it; for small kernels on a GPU."""

    @property
    def uses_kernels(self) -> bool:
        """Whether tuned kernels may take the place of torch's."""
        return self.kernels.strip() != "off"

    @property
    def uses_channels_last(self) -> bool:
        """Whether images and activations are in channels_last."""
        return self.memory_format == "channels_last" or (self.memory_format == "auto" and self.uses_kernels)


@dataclass(frozen=True, kw_only=True)
class PlanningConfig:
    """Planning: whether the fastest way to train is searched for, and what it may change."""

    plan: Literal["auto", "none"] | Path = "auto"
    """`auto`: measure machine and model once, and search for the fastest way to train that the other options allow;
    `none`: train as the other options say; or the file of a plan, which is followed."""
    fidelity: Literal["exact", "close", "lossy"] = "exact"
    """Codecs that `--plan auto` and `--compress auto` may choose: `exact`: only `none`; `close`: also fp16 and bf16;
    `lossy`: also those that are known to keep the accuracy."""

    @property
    def plan_file(self) -> Path | None:
        """The plan to follow, where a file was named."""
        return None if str(self.plan) in ("auto", "none") else Path(self.plan)

    @property
    def searches(self) -> bool:
        """Whether the fastest plan is to be searched for."""
        return str(self.plan) == "auto"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run directory and checkpoints: what a run writes, and what it goes on from."""

    run_dir: Path | None = None
    """Directory of this run; default: runs/MODEL-DATA."""
    resume: bool = False
    """Go on from the last whole checkpoint of the run directory."""
    resume_from: Path | None = None
    """Start from this checkpoint (a step-N directory) of any run with the same model."""
    checkpoints: Annotated[str, tyro.conf.arg(metavar="[WHEN][,KEY=VALUE,...]")] = "epoch/60s,keep=2"
    """When to save: `epoch`, a number of steps, seconds as `60s`, several with / between them, or `never`; how
    many of the last to keep (`keep`) and of the best (`best=3,by=test_loss`); with `stop=5` the run ends after so many
    epochs without a better one."""
    overwrite: bool = False
    """Replace a finished run in the run directory."""
    log: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    """Send figures to `tensorboard`, `wandb` or `mlflow`; several joined by commas or repeated, or `none`. Default:
    tensorboard, where it is installed."""
    timeline: Path | None = None
    """Write when everything ran in some steps, beside what was predicted, as a trace for Perfetto."""
    profile: bool = False
    """Write a trace of torch.profiler of some steps of every worker, for Perfetto, to profile/ in the run directory."""

    @property
    def saving(self) -> Checkpoints:
        """What `checkpoints` stands for."""
        return read_checkpoints(self.checkpoints)


@dataclass(frozen=True, kw_only=True)
class AdvancedConfig:
    """Advanced: reproducibility, timeouts, process settings, debugging."""

    seed: int = 0
    """Seed of weights, shuffling, augmentation and dropout."""
    deterministic: bool = False
    """Use deterministic algorithms only."""
    timeout: Annotated[float, POSITIVE] = 120.0
    """Seconds after which a worker that does not answer is an error."""
    tune_process: Annotated[
        bool,
        unless("Leave the C allocator, thread counts and CPU affinity of CPU workers as they are.", "set for training"),
    ] = True
    """Whether the C allocator, thread counts and CPU affinity of CPU workers are set for training."""
    debug: bool = False
    """Show tracebacks."""


@dataclass(frozen=True, kw_only=True)
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
        defaults = {field.name: field.default for field in fields(TrainConfig) if field.name != "given"}
        differing = {name for name, default in defaults.items() if getattr(self, name) != default}
        return (self.given or frozenset()) & defaults.keys() | differing

    @property
    def is_staged(self) -> bool:
        """Whether the model is to be cut into stages."""
        return self.stages > 1 or self.plan_file is not None

    @property
    def peak_lr(self) -> float:
        """The learning rate of which every step's is a fraction."""
        if self.lr is None:
            return ONEBIT_RATE if self.is_onebit else super().peak_lr
        rate = read_rate(self.lr)
        return rate.value if rate.samples is None else rate.value * self.samples_per_step / rate.samples

    def parts_per_step(self, micro_batches: int) -> int:
        """Micro-batches that a worker is given for a step; with `late=half` those of both halves.

        Args:
            micro_batches: Of a replica.
        """
        return micro_batches * (2 if self.late == "half" else 1)

    def may_compress(self, codec: str) -> bool:
        """Whether gradients may be sent compressed.

        Args:
            codec: As `compress`; a plan may say otherwise than `compress` does.
        """
        said = codec.strip()
        return self.is_onebit or said not in ("none", "auto") or (said == "auto" and self.fidelity != "exact")

    def check(self) -> None:
        """Check what can be checked without the data and the machine.

        Raises:
            UsageError: A value is out of range, with the rule it breaks.
        """
        check_rules(self)
        check_optimizer(self)
        _ = self.data_options, self.images, self.augmentation, self.mixing, self.drop_rates  # each is read, or refused
        if self.schedule is not None:
            SCHEDULES.get(self.schedule)  # raises where there is none
        if self.saving.by.startswith("ema_") and self.model_ema is None:
            raise UsageError(
                f"--checkpoints {self.checkpoints} without --model-ema",
                "There is no moving average to test.",
                "Add for instance --model-ema 0.9998.",
            )
        self.check_conflicts()
        if (servers := self.parameter_servers) is not None and self.nproc is not None:
            servers.split_count(self.nproc)
        for option, named in (("--overwrite", self.overwrite), ("--resume-from", self.resume_from is not None)):
            if self.resume and named:
                raise UsageError(
                    f"--resume with {option}",
                    "--resume goes on with the run in the run directory; --overwrite deletes that run, and "
                    "--resume-from starts a new one from the checkpoint that it names.",
                    "Leave out one of them.",
                )
        if self.layout is not None:
            self.check_unequal()
        if self.optim.arguments.get("nesterov") and self.momentum == 0:
            raise UsageError(
                f"--optimizer {self.optimizer}", "Nesterov's method needs momentum.", "Write sgd:momentum=0.9,nesterov."
            )
        self.check_gradients()

    @property
    def features(self) -> dict[str, tuple[str, bool]]:
        """What the tables of conflicts name: an option as users type it, and whether it is given."""
        kron = self.optim.name.startswith("timm/kron")
        sync, optimizer, shares = f"--sync {self.sync}", f"--optimizer {self.optimizer}", f"--shares {self.shares}"
        coded = sync if self.is_onebit else f"--compress {self.compress}"
        codec = self.compress.strip()
        another_codec = codec != "none" and not codec.startswith("onebit_sgd")
        return {
            "adafactor on servers": (
                f"{optimizer} --memory-format channels_last",
                "adafactor" in self.optim.name and self.uses_channels_last,
            ),
            "another codec": (f"--compress {self.compress}", another_codec),
            "batch auto": ("--batch-size auto", self.batch_size == "auto"),
            "batch norm sync": ("--batch-norm sync", self.batch_norm == "sync"),
            "codec": (coded, self.may_compress(self.compress)),
            "codec auto": ("--compress auto", self.chooses),
            "compile": ("--compile", self.compile),
            "cuda graph": ("--cuda-graph", self.cuda_graph),
            "ema": (f"--model-ema {self.model_ema}", self.model_ema is not None),
            "fp16": ("--amp fp16", self.amp == "fp16"),
            "half": (sync, self.late == "half"),
            "placed": (f"--placement {self.placement}", self.layout is not None),
            "kernels": (f"--kernels {self.kernels}", self.uses_kernels),
            "kron": (optimizer, kron),
            "late": (sync, self.late != "off"),
            "local": (sync, type(read_sync(self.sync)) is Local),
            "nesterov": (optimizer, bool(self.optim.arguments.get("nesterov"))),
            "no guard": ("--no-guard", not self.guard),
            "no share": (shares, 0 in (self.share_list or ())),
            "not sgd": (optimizer, self.optim.name != "sgd"),
            "outer": (sync, self.outer is not None),
            "plan file": (f"--plan {self.plan}", self.plan_file is not None),
            "profile": ("--profile", self.profile),
            "recipe": (sync, self.is_onebit),
            "replicas without stages": (
                f"--replicas {self.replicas}",
                self.replicas is not None and not self.is_staged,
            ),
            "resume from": (f"--resume-from {self.resume_from}", self.resume_from is not None),
            "select batch": (f"--select-batch {self.select_batch}", bool(self.select_batch)),
            "servers": (sync, self.parameter_servers is not None),
            "shard optimizer": ("--shard-optimizer", self.shard_optimizer),
            "shares": (shares, self.shares.strip() != "equal"),
            "shares auto": (shares, self.shares.strip() == "auto"),
            "staged": (
                f"--stages {self.stages}" if self.stages > 1 else "--recompute all",
                self.stages > 1 or ("all" in self.recompute and not self.is_staged),
            ),
            "steps": (f"--steps {self.steps}", self.steps is not None),
            "stop early": (f"--checkpoints {self.checkpoints}", self.saving.stop is not None),
            "timeline": ("--timeline", self.timeline is not None),
            "weights": (f"--weights {self.weights}", self.weights is not None),
        }

    @property
    def needs_whole(self) -> str | None:
        """An option with which every worker of a pipeline holds the whole model; None where there is none."""
        features = self.features
        return next((text for text, given in map(features.__getitem__, NEED_WHOLE_MODEL) if given), None)

    def check_conflicts(self) -> None:
        """Refuse two options that contradict each other."""
        refuse_pairs(self.features, CONFLICTS)

    def check_gradients(self) -> None:
        """Refuse two options on gradients that contradict each other; they are all that a `Trainer` knows of."""
        refuse_pairs(self.features, GRADIENT_CONFLICTS)

    def check_unequal(self) -> None:
        """Refuse what needs replicas of equal numbers of workers."""
        features = self.features
        for name, why in NEED_EQUAL_REPLICAS.items():
            text, given = features[name]
            if given:
                raise refuse(text, "replicas of different numbers of workers", why)

    @property
    def may_be_unequal(self) -> bool:
        """Whether replicas of a plan may differ in their parts of a batch, and in their numbers of workers."""
        try:
            self.check_unequal()
        except UsageError:
            return False
        return self.shares.strip() == "equal" and not (self.cuda_graph or self.select_batch)


def _numbers(text: str) -> tuple[float, ...] | None:
    """The numbers of an option such as `1,2`; None for `equal` and `auto`, and empty for anything else."""
    said = text.strip()
    if said in ("equal", "auto"):
        return None
    try:
        return tuple(map(float, said.split(",")))
    except ValueError:
        return ()


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
