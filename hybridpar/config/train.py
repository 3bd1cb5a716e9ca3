"""The options of a training run as frozen dataclasses, one for each group that `hybridpar train --help` shows.

The docstring of a field is its help text on the command line, and its default is the default there. Nothing here
imports torch, so that the command line is read at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hybridpar.config.data import AugmentConfig, DataConfig, ModelConfig, Rule, augment_rules, data_rules, model_rules
from hybridpar.config.optimizer import OptimizerConfig, check_optimizer, optimizer_rules
from hybridpar.config.outer import OuterConfig
from hybridpar.config.recipe import LATE, RecipeConfig, refuse
from hybridpar.config.server import LOCAL
from hybridpar.errors import UsageError
from hybridpar.schedule.schedules import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How workers exchange gradients."""

    compress: str = "none"
    """Codec of gradients between replicas: `none`, `fp16`, `onebit`, `qsgd_mn:bits=4`, `powersgd:rank=2`, ...; a .toml
    file of parameter names and codecs; or `auto`, which measures. Anything but `none` changes the result."""
    hierarchy: Annotated[
        bool,
        tyro.conf.arg(
            help="Use the codec of --compress inside a node, too.",
            help_behavior_hint="(default: workers of a node add in full precision)",
        ),
    ] = True
    """With several nodes of several workers: add in full precision inside a node, and use the codec of `--compress`
    between nodes only."""
    batch_norm: Literal["pooled", "local", "sync", "frozen"] = "pooled"
    """BatchNorm statistics. `pooled`: running statistics of the whole batch; `sync`: also normalise over all replicas;
    `local`: per replica, averaged at checkpoints; `frozen`: normalise by those that the model has, and keep them."""
    guard: Annotated[
        bool,
        tyro.conf.arg(
            help="Do not skip steps in which a gradient is not finite.",
            help_behavior_hint="(default: all workers skip them)",
        ),
    ] = True
    """Whether a step in which any gradient is not finite is skipped, on all workers."""
    shard_optimizer: bool = False
    """Divide the optimizer's state among the replicas, each of which updates a part of the parameters and hands it
    round: the same result in less memory, for another half of the traffic."""
    sync_lanes: int = 2
    """Lanes that gradients are sent on: CUDA streams, or threads with a process group each."""
    bucket_mb: float = 8.0
    """Size of the buckets that gradients are sent in, in MiB."""

    @property
    def chooses(self) -> bool:
        """Whether codecs are measured and chosen (`--compress auto`)."""
        return self.compress.strip() == "auto"

    @property
    def bucket_bytes(self) -> int:
        """`bucket_mb` in bytes, at least one."""
        return max(1, int(self.bucket_mb * 2**20))


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Parallelism: workers, and the stages, replicas and micro-batches that they are used for."""

    workers: int | None = None
    """Workers on this machine; default: one per GPU, else 2 on the CPU. Under torchrun: the workers it started."""
    stages: int = 1
    """Stages that the model is cut into: lanes of one worker, or spread over the workers."""
    replicas: int | None = None
    """Copies of the whole pipeline, which share each batch; default: as many as the workers allow."""
    shares: str = "equal"
    """What each replica gets of a batch, for workers of unequal speed: `equal`; numbers such as `1,2`, by rank, in any
    unit; or `auto`: from equal parts on, as measured while training, and again when speeds change."""
    micro_batches: int = 1
    """Micro-batches per replica and step; their gradients are added up."""
    schedule: str | None = None
    """Order of passes: 1f1b, gpipe, interleaved, looped_bfs, zero_bubble, or another registered one; default: greedy,
    the fastest of all on the measured times."""
    placement: str | None = None
    """Stages on lanes: one per lane (`linear`), round-robin (`loop`), or V-shaped (`v`); default: linear, and loop
    where there are more stages than workers. Or, for every replica, the rank that runs each stage: `0,0;1,2` is worker
    0 alone beside workers 1 and 2 as a pipeline."""
    recompute: tuple[int, ...] = ()
    """Stages that keep only their inputs, and compute their activations again in the backward pass."""

    @property
    def share_list(self) -> tuple[float, ...] | None:
        """The numbers of `shares`; None for `equal` and `auto`.

        Raises:
            UsageError: It is neither a word nor a list of numbers, or they sum to nothing.
        """
        said = self.shares.strip()
        if said in ("equal", "auto"):
            return None
        try:
            shares = tuple(float(part) for part in said.split(","))
        except ValueError:
            shares = ()
        if not shares or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
            raise UsageError(
                f"--shares is {self.shares}",
                "It must be equal, auto, or a number for each replica: none below 0, and not all of them 0.",
                "Write for instance --shares 1,2 where the second worker is twice as fast.",
            )
        return shares

    @property
    def homes(self) -> tuple[tuple[int, ...], ...] | None:
        """For every replica the rank that runs each stage, as `placement` says; None where it names a kind or nothing.

        Raises:
            UsageError: It is neither, or does not fit the numbers of stages and replicas.
        """
        said = self.placement
        if said in (None, "linear", "loop", "v"):
            return None
        try:
            homes = tuple(tuple(map(int, row.split(","))) for row in said.split(";"))
        except ValueError:
            homes = ((-1,),)
        ranks = [rank for row in homes for rank in set(row)]
        if sorted(ranks) != list(range(len(ranks))) or any(len(row) != self.stages for row in homes):
            raise UsageError(
                f"--placement {said} with --stages {self.stages}",
                "It is linear, loop, v, or for every replica, parted by `;`, a rank for each stage. Ranks are numbered "
                "from 0; each is in one replica.",
                "Write for instance --stages 2 --placement '0,0;1,2'.",
            )
        if self.replicas not in (None, len(homes)):
            raise UsageError(
                f"--placement {said} with --replicas {self.replicas}",
                f"It places {len(homes)} replica(s).",
                "Leave out --replicas.",
            )
        return homes

    @property
    def workers_wanted(self) -> int | None:
        """Number of workers that stages and replicas ask for; None where they leave it open."""
        if (homes := self.homes) is not None:
            return 1 + max(map(max, homes))
        return self.stages * self.replicas if self.stages > 1 and self.replicas is not None else None


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Kernels and precision: how the model is computed on a device."""

    amp: Literal["none", "bf16", "fp16"] = "none"
    """Run the forward pass in bfloat16, or in float16 with dynamic loss scaling, where autocast allows it."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Memory format of images and activations; auto: contiguous, and channels_last with --kernels."""
    channels_last: bool = False
    """Former spelling of `--memory-format channels_last`."""
    kernels: str = "off"
    """Tuned kernels for depthwise convolutions and BatchNorm, used where they are faster: `auto`, or a file of
    `hybridpar tune`."""
    compile: bool = False
    """Compile the model, or every stage of it, with torch.compile."""
    cuda_graph: bool = False
    """Capture the training step as one CUDA graph and replay it; for small kernels on a GPU."""

    def __post_init__(self) -> None:
        """Read the former spelling of `memory_format`."""
        if self.channels_last and self.memory_format == "auto":
            object.__setattr__(self, "memory_format", "channels_last")

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
    checkpoint_every: str = "epoch,60s"
    """When to save: `epoch`, a number of steps, seconds as `60s`, several joined by commas, or `never`."""
    keep: int = 2
    """Checkpoints to keep besides the best."""
    keep_best: Annotated[str, tyro.conf.arg(metavar="[METRIC:]K")] = "1"
    """Checkpoints of the K best epochs to keep, by `test_accuracy` or another figure, as in `test_loss:3`."""
    stop_early: Annotated[str | None, tyro.conf.arg(metavar="[METRIC:]EPOCHS")] = None
    """End the run after so many epochs without a better `test_accuracy`, or other figure, as in `test_loss:5`."""
    overwrite: bool = False
    """Replace a finished run in the run directory."""
    log: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    """Send figures to `tensorboard`, `wandb` or `mlflow`; several joined by commas or repeated, or `none`. Default:
    tensorboard, where it is installed."""
    timeline: Path | None = None
    """Write when everything ran in some steps, beside what was predicted, as a trace for Perfetto."""
    profile: bool = False
    """Write a trace of torch.profiler of some steps of every worker, for Perfetto, to profile/ in the run directory."""


@dataclass(frozen=True, kw_only=True)
class AdvancedConfig:
    """Advanced: reproducibility, timeouts, process settings, debugging."""

    seed: int = 0
    """Seed of weights, shuffling, augmentation and dropout."""
    deterministic: bool = False
    """Use deterministic algorithms only."""
    timeout: float = 120.0
    """Seconds after which a worker that does not answer is an error."""
    tune_process: Annotated[
        bool,
        tyro.conf.arg(
            help="Leave the C allocator, thread counts and CPU affinity of CPU workers as they are.",
            help_behavior_hint="(default: set for training)",
        ),
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
    RecipeConfig,
    OuterConfig,
    SyncConfig,
    PipelineConfig,
    OptimizerConfig,
    AugmentConfig,
    DataConfig,
    ModelConfig,
):
    """All options of a training run."""

    @property
    def is_staged(self) -> bool:
        """Whether the model is to be cut into stages."""
        return self.stages > 1 or self.plan_file is not None

    def parts_per_step(self, micro_batches: int) -> int:
        """Micro-batches that a worker is given for a step; with `--double-buffer half` those of both halves.

        Args:
            micro_batches: Of a replica.
        """
        return micro_batches * (2 if self.double_buffer == "half" else 1)

    def may_compress(self, codec: str) -> bool:
        """Whether gradients may be sent compressed.

        Args:
            codec: As `compress`; a plan may say otherwise than `compress` does.
        """
        said = codec.strip()
        return self.recipe != "none" or said not in ("none", "auto") or (said == "auto" and self.fidelity != "exact")

    def shares_memory(self, codec: str) -> bool:
        """Whether workers of one machine may add gradients through shared memory, which cannot compress.

        Args:
            codec: As of `may_compress`.
        """
        return codec.strip() == "auto" or not self.may_compress(codec)

    def check(self) -> None:
        """Check what can be checked without the data and the machine.

        Raises:
            UsageError: A value is out of range, with the rule it breaks.
        """
        rules = [
            *model_rules(self),
            *data_rules(self),
            *augment_rules(self),
            *optimizer_rules(self),
            Rule("--workers", self.workers, self.workers is None or self.workers >= 1, "at least 1"),
            Rule("--stages", self.stages, self.stages >= 1, "at least 1"),
            Rule("--replicas", self.replicas, self.replicas is None or self.replicas >= 1, "at least 1"),
            Rule("--micro-batches", self.micro_batches, self.micro_batches >= 1, "at least 1"),
            Rule("--sync-lanes", self.sync_lanes, 1 <= self.sync_lanes <= 8, "1 to 8"),
            Rule("--bucket-mb", self.bucket_mb, self.bucket_mb > 0, "greater than 0"),
            Rule("--timeout", self.timeout, self.timeout > 0, "greater than 0"),
            Rule("--keep", self.keep, self.keep >= 1, "at least 1"),
        ]
        for option, value, holds, rule in rules:
            if not holds:
                raise UsageError(f"{option} is {value}", f"It must be {rule}.")
        check_optimizer(self)
        if self.schedule is not None:
            SCHEDULES.get(self.schedule)  # raises where there is none
        self.check_sync()
        if self.uses_servers:
            self._check_with_servers()
        if self.weights is not None and self.resume_from is not None:
            raise refuse(f"--weights {self.weights}", f"--resume-from {self.resume_from}", "Both say where to start.")
        for option, named in (("--overwrite", self.overwrite), ("--resume-from", self.resume_from is not None)):
            if self.resume and named:
                raise UsageError(
                    f"--resume with {option}",
                    "--resume goes on with the run in the run directory; --overwrite deletes that run, and "
                    "--resume-from starts a new one from the checkpoint that it names.",
                    "Leave out one of them.",
                )
        if self.cuda_graph and self.may_compress(self.compress):
            given = f"--compress {self.compress}" if self.recipe == "none" else f"--recipe {self.recipe}"
            raise UsageError(
                f"--cuda-graph with {given}",
                "What a codec keeps is put back by the host where a step does not count.",
                "Leave out one of them.",
            )
        if self.cuda_graph and self.timeline is not None:
            raise UsageError(
                "--cuda-graph with --timeline",
                "A graph runs as a whole, so the actions inside it have no times of their own.",
                "Leave out one of them.",
            )
        self._check_shares()
        if self.homes is not None:
            self.check_unequal()
        self._check_shard_optimizer()
        if self.channels_last and self.memory_format == "contiguous":
            raise UsageError(
                "--channels-last with --memory-format contiguous",
                "They contradict each other.",
                "Leave out one of them.",
            )
        if self.nesterov and self.momentum == 0:
            raise UsageError("--nesterov with --momentum 0", "Nesterov's method needs momentum.", "Set --momentum 0.9.")
        check_recipe(self)

    @property
    def needs_whole(self) -> str | None:
        """An option with which every worker of a pipeline holds the whole model; None where there is none."""
        return next(
            (
                option
                for option, given in (
                    (f"--kernels {self.kernels}", self.uses_kernels),
                    (f"--select-batch {self.select_batch}", self.select_batch),
                    (f"--sync {self.sync}", self.outer_steps),
                    ("--compress auto", self.chooses),
                    (f"--double-buffer {self.double_buffer}", self.double_buffer not in (None, "off")),
                    ("--cuda-graph", self.cuda_graph),
                    (f"--recipe {self.recipe}", self.recipe != "none"),
                    (f"--placement {self.placement}", self.homes is not None),
                )
                if given
            ),
            None,
        )

    def check_unequal(self) -> None:
        """Refuse what needs replicas of equal numbers of workers.

        Raises:
            UsageError: Such an option is given.
        """
        for option, given, why in (
            ("--batch-norm sync", self.batch_norm == "sync", "Workers would wait for each other in different orders."),
            ("--compress auto", self.chooses, "It measures the links of all replicas at once."),
            (f"--double-buffer {self.double_buffer}", self.double_buffer not in (None, "off"), "It compares replicas."),
            (f"--sync {self.sync}", self.outer_steps is not None, "Groups between outer steps are equal."),
            ("--timeline", self.timeline is not None, "It pairs the workers of equal replicas."),
            ("--shard-optimizer", self.shard_optimizer, "Its parts belong to the workers of equal replicas."),
        ):
            if given:
                raise refuse(option, "replicas of different numbers of workers", why)

    def _check_shares(self) -> None:
        """Refuse what cannot be done with shares that change, or that are empty."""
        shares = self.share_list
        tuned = self.shares.strip() == "auto"
        for other, refused, why in (
            ("--cuda-graph", tuned and self.cuda_graph, "A captured step has one size."),
            (
                f"--select-batch {self.select_batch}",
                tuned and bool(self.select_batch),
                "Both change batches by trials.",
            ),
            (
                "--batch-norm sync",
                self.batch_norm == "sync" and shares is not None and 0 in shares,
                "Every replica must have samples to normalise.",
            ),
        ):
            if refused:
                raise refuse(f"--shares {self.shares}", other, why)

    def _check_shard_optimizer(self) -> None:
        """Refuse what needs the state of all parameters on every replica, or keeps it elsewhere."""
        if not self.shard_optimizer:
            return
        for option, given, why in (
            (f"--sync {self.sync}", self.outer_steps is not None, "Workers make steps alone, of all parameters."),
            (f"--sync {self.sync}", self.uses_servers, "Servers hold the optimizer's state, each a part of it."),
            (
                f"--recipe {self.recipe}",
                self.recipe != "none",
                "Its owners of stripes keep the state in parts already.",
            ),
            (
                f"--double-buffer {self.double_buffer}",
                self.double_buffer not in (None, "off"),
                "A late step would wait for the parameters that others have stepped.",
            ),
            ("--cuda-graph", self.cuda_graph, "A captured step makes the whole step on every worker."),
            (
                f"--optimizer {self.optimizer}",
                self.optimizer.startswith("timm/kron"),
                "It draws random numbers for one parameter after the other.",
            ),
        ):
            if given:
                raise refuse("--shard-optimizer", option, why)

    def _check_with_servers(self) -> None:
        """Refuse what needs all gradients in one place, or all workers in one step.

        Raises:
            UsageError: Such an option is given.
        """
        whole = "With parameter servers every worker computes the whole model, at its own pace."
        refused: list[tuple[str, bool, str]] = [
            ("--stages or a plan", self.is_staged or self.plan_file is not None, whole),
            (
                f"--recipe {self.recipe}",
                self.recipe != "none",
                "Its state is the workers', and servers keep their own.",
            ),
            (
                "--double-buffer",
                self.double_buffer not in (None, "off"),
                "Servers that do not wait are late already.",
            ),
            ("--select-batch", bool(self.select_batch), whole),
            ("--replicas", self.replicas is not None, whole),
            ("--shares auto", self.shares.strip() == "auto", "No step is made by all workers together."),
            (f"--shares {self.shares}", 0 in (self.share_list or ()), "A worker without samples has nothing to push."),
            ("--cuda-graph", self.cuda_graph, whole),
            ("--timeline", self.timeline is not None, "A timeline is of workers that make one step together."),
            ("--profile", self.profile, "It is of workers that make one step together."),
            (
                f"--optimizer {self.optimizer}",
                self.optimizer.startswith("timm/kron") and self.outer_steps is None,
                "It draws random numbers of its own, which a shard could neither save nor draw again.",
            ),
            (
                f"--optimizer {self.optimizer} --memory-format channels_last",
                "adafactor" in self.optimizer and self.uses_channels_last and self.outer_steps is None,
                "It looks at the order of dimensions, and servers hold parameters as they lie in memory.",
            ),
            ("--compress auto", self.chooses, "It measures all-reduces, which such a run does not use."),
            ("--stop-early", self.stop_early is not None, "Only rank 0 tests, and no shard is told."),
            ("--kernels", self.uses_kernels, "Which kernels run is agreed on by all workers together."),
            ("--batch-norm sync", self.batch_norm == "sync", "Workers do not meet in the middle of a step."),
            (
                f"--warm-start-steps {self.warm_start_steps}",
                bool(self.warm_start_steps) and self.outer_steps is not None,
                "Servers take outer gradients from the first step on.",
            ),
        ]
        for option, given, rule in refused:
            if given:
                raise UsageError(f"{option} with --sync {self.sync}", rule, "Leave out one of them.")
        if self.workers is not None:
            self.split_count(self.workers)
            self.check_paces(self.workers)


#: The groups of `train --help` and of configuration files, with the dataclasses whose options each holds.
GROUPS: dict[str, tuple[type, ...]] = {
    "Model and data": (ModelConfig, DataConfig, AugmentConfig),
    "Optimisation": (OptimizerConfig,),
    "Parallelism": (PipelineConfig,),
    "Gradient exchange": (SyncConfig, OuterConfig, RecipeConfig),
    "Kernels and precision": (KernelConfig,),
    "Planning": (PlanningConfig,),
    "Run directory and checkpoints": (RunConfig,),
    "Advanced": (AdvancedConfig,),
}


def check_recipe(config: TrainConfig) -> None:
    """Check that a recipe, or a way to sync, and the other options agree.

    Args:
        config: The options.

    Raises:
        UsageError: Two of them contradict each other; it names both.
    """
    for option, value, least in (
        ("--warm-start-steps", config.warm_start_steps, 0),
        ("--select-batch", config.select_batch, 0),
    ):
        if value is not None and value < least:
            raise UsageError(f"{option} is {value}", f"It must be at least {least}.")
    if config.lr_per_sample is not None and not config.lr_per_sample > 0:
        raise UsageError(f"--lr-per-sample is {config.lr_per_sample}", "It must be greater than 0.")
    if config.lr_per_sample is not None and config.lr != TrainConfig.lr:
        raise refuse(f"--lr-per-sample {config.lr_per_sample:g}", f"--lr {config.lr:g}", "They say the same.")
    if config.recipe != "none":
        _check_knobs(config, f"--recipe {config.recipe}")
    if config.double_buffer in LATE:
        _check_late(config, f"--double-buffer {config.double_buffer}")
    config.check_outer()
    if config.outer_steps is not None:
        _check_outer(config, f"--sync {config.sync}")
    elif config.warm_start_steps and config.recipe == "none":
        why = "Only recipes, and --sync outer:H and local:H, begin in another way than they go on."
        raise UsageError(f"--warm-start-steps {config.warm_start_steps} alone", why, "Leave it out.")
    if config.model_ema:
        _check_average(config)
    if config.amp == "fp16":
        _check_loss_scale(config)
    if config.select_batch:
        _check_select(config, f"--select-batch {config.select_batch}")


def _check_loss_scale(config: TrainConfig) -> None:
    for option, given, why in (
        ("--no-guard", not config.guard, "A step whose gradients overflow is rolled back, and the loss scale falls."),
        (
            "--double-buffer",
            config.double_buffer not in (None, "off"),
            "Late gradients have the scale of another step.",
        ),
        ("--cuda-graph", config.cuda_graph, "A captured step does not follow the scale."),
        ("--select-batch", bool(config.select_batch), "Steps on trial would change the scale."),
        ("--kernels", config.uses_kernels, "Tuned kernels compute in float32 and bfloat16."),
    ):
        if given:
            raise refuse("--amp fp16", option, why)


def _check_knobs(config: TrainConfig, recipe: str) -> None:
    if config.compress.strip() != "none" and not config.compress.startswith(config.recipe.replace("-", "_")):
        raise refuse(recipe, f"--compress {config.compress}", "The recipe says what gradients travel as.")
    if config.nesterov:
        raise refuse(recipe, "--nesterov", "The recipe's momentum is the plain one.")
    if config.recipe == "onebit-sgd" and config.optimizer != "sgd":
        raise refuse(recipe, f"--optimizer {config.optimizer}", "The recipe is one of SGD.")
    if config.recipe == "onebit-adam" and config.momentum != TrainConfig.momentum:
        raise refuse(recipe, f"--momentum {config.momentum:g}", "Adam's moments have factors of their own.")
    if config.outer_steps is not None:
        raise refuse(recipe, f"--sync {config.sync}", "The recipe exchanges gradients in every step.")


def _check_late(config: TrainConfig, late: str) -> None:
    for option, given, why in (
        (f"--sync {config.sync}", config.outer_steps is not None, "Only gradients of every step are applied late."),
        ("--cuda-graph", config.cuda_graph, "A captured step ends with its own gradients."),
    ):
        if given:
            raise refuse(late, option, why)
    if config.double_buffer == "half" and (config.optimizer != "sgd" or config.recipe == "onebit-adam"):
        other = "--recipe onebit-adam" if config.recipe == "onebit-adam" else f"--optimizer {config.optimizer}"
        raise refuse(late, other, "Half a batch is half a step for SGD alone: Adam's steps do not grow with gradients.")


def _check_outer(config: TrainConfig, outer: str) -> None:
    plain = config.sync.startswith(LOCAL)
    for option, given, why in (
        (
            f"--compress {config.compress}",
            plain and config.may_compress(config.compress),
            "Parameters are averaged in full precision; outer:H sends them by a codec.",
        ),
        ("--compress auto", config.chooses, "It measures the exchange of gradients in every step."),
        ("--cuda-graph", config.cuda_graph, "Some steps end with an exchange, and others do not."),
        ("--batch-norm sync", config.batch_norm == "sync", "Workers do not meet in a forward pass."),
        ("--shares auto", config.shares.strip() == "auto", "No step is made by all workers together."),
        (
            f"--shares {config.shares}",
            0 in (config.share_list or ()),
            "A worker without samples would train on nothing between two exchanges.",
        ),
    ):
        if given:
            raise refuse(outer, option, why)


def _check_average(config: TrainConfig) -> None:
    for option, given, why in (
        ("--double-buffer half", config.double_buffer == "half", "Each half of a batch would count as a step."),
        ("--cuda-graph", config.cuda_graph, "The decay of the average is not the same in every step."),
        (
            f"--select-batch {config.select_batch}",
            bool(config.select_batch),
            "Trials are undone, and averages are not.",
        ),
    ):
        if given:
            raise refuse("--model-ema", option, why)


def _check_select(config: TrainConfig, select: str) -> None:
    for option, given, why in (
        (f"--steps {config.steps}", config.steps is not None, "How many steps there are depends on what is selected."),
        (f"--sync {config.sync}", config.outer_steps is not None, "Trials end with the same weights on all workers."),
        ("--cuda-graph", config.cuda_graph, "A captured step has one size."),
        (
            f"--optimizer {config.optimizer}",
            config.optimizer != "sgd" or config.recipe == "onebit-adam",
            "Learning rates follow the batch size by the rule of SGD.",
        ),
    ):
        if given:
            raise refuse(select, option, why)
