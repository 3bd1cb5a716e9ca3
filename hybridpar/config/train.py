"""The options of a training run as frozen dataclasses, one for each group that `hybridpar train --help` shows.

The docstring of a field is its help text on the command line, and its default is the default there. Nothing here
imports torch, so that the command line is read at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from hybridpar.config.data import DataConfig, ModelConfig, unless
from hybridpar.config.optimizer import OptimizerConfig, check_optimizer
from hybridpar.config.ranges import check_ranges, numbers_of
from hybridpar.config.recipe import RATE, RecipeConfig, refuse
from hybridpar.config.sync import Local, Outer, ParameterServers, read_sync
from hybridpar.errors import UsageError
from hybridpar.schedule.layout import Layout, PlacementKind
from hybridpar.schedule.schedules import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How workers exchange gradients."""

    sync: Annotated[str, tyro.conf.arg(metavar="NAME[,KEY=VALUE,...]")] = "allreduce"
    """Replicas meet by `allreduce`, `outer:H,opt=nesterov`, `local:H`, or at servers: `ps,servers=2`,
    `ps-async`, `softsync:N`."""
    compress: str = "none"
    """Codec of gradients between replicas: `none`, `fp16`, `onebit`, `qsgd_mn:bits=4`, `powersgd:rank=2`, ...; rules
    such as `layer4.* -> powersgd; *.weight -> onebit`; or `auto`, which measures. Anything but `none` changes the
    result."""
    hierarchy: Annotated[
        bool, unless("Use the codec of --compress inside a node, too.", "workers of a node add in full precision")
    ] = True
    """With several nodes of several workers: add in full precision inside a node, and use the codec of `--compress`
    between nodes only."""
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
    sync_lanes: int = 2
    """Lanes that gradients are sent on: CUDA streams, or threads with a process group each."""
    bucket_mb: float = 8.0
    """Size of the buckets that gradients are sent in, in MiB."""

    @property
    def outer(self) -> Outer | None:
        """The outer loop of `outer:H`, or of `local:H`, which is one with the plain mean; None otherwise."""
        sync = read_sync(self.sync)
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
    """Order of passes: 1f1b, gpipe, interleaved, looped_bfs, or another registered one; default: greedy, the fastest of
    all on the measured times."""
    placement: str | None = None
    """Stages on lanes: one per lane (`linear`), round-robin (`loop`), or V-shaped (`v`); default: linear, and loop
    where there are more stages than workers. Or, for every replica, the rank that runs each stage: `0,0;1,2` is worker
    0 alone beside workers 1 and 2 as a pipeline."""
    recompute: tuple[int, ...] = ()
    """Stages that keep only their inputs, and compute their activations again in the backward pass."""
    offload: tuple[int, ...] = ()
    """Stages whose activations wait for the backward pass in the host's memory, where they wait long enough. The result
    is the same; on a CPU it saves nothing."""

    @property
    def share_list(self) -> tuple[float, ...] | None:
        """The numbers of `shares`; None for `equal` and `auto`.

        Raises:
            UsageError: It is neither a word nor a list of numbers, or they sum to nothing.
        """
        shares = numbers_of(self.shares)
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
                "It is linear, loop, v, or for every replica, parted by `;`, a rank for each stage. Ranks are numbered "
                "from 0; each is in one replica.",
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
    RecipeConfig,
    SyncConfig,
    PipelineConfig,
    OptimizerConfig,
    DataConfig,
    ModelConfig,
):
    """All options of a training run."""

    @property
    def is_staged(self) -> bool:
        """Whether the model is to be cut into stages."""
        return self.stages > 1 or self.plan_file is not None

    @property
    def peak_lr(self) -> float:
        """The learning rate of which every step's is a fraction."""
        if self.lr_per_sample is not None:
            return self.lr_per_sample * self.samples_per_step
        return RATE if self.lr is None and self.recipe != "none" else super().peak_lr

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

    def check(self) -> None:
        """Check what can be checked without the data and the machine.

        Raises:
            UsageError: A value is out of range, with the rule it breaks.
        """
        check_ranges(self)
        check_optimizer(self)
        _ = self.data_options, self.images, self.augmentation, self.mixing, self.drop_rates  # each is read, or refused
        if self.schedule is not None:
            SCHEDULES.get(self.schedule)  # raises where there is none
        check_conflicts(self)
        if (servers := self.parameter_servers) is not None and self.workers is not None:
            servers.split_count(self.workers)
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
        if self.nesterov and self.momentum == 0:
            raise UsageError("--nesterov with --momentum 0", "Nesterov's method needs momentum.", "Set --momentum 0.9.")
        check_recipe(self)

    @property
    def needs_whole(self) -> str | None:
        """An option with which every worker of a pipeline holds the whole model; None where there is none."""
        options = _options(self)
        return next((text for text, given in map(options.__getitem__, NEED_WHOLE_MODEL) if given), None)

    @property
    def may_be_unequal(self) -> bool:
        """Whether replicas of a plan may differ in their parts of a batch, and in their numbers of workers."""
        try:
            self.check_unequal()
        except UsageError:
            return False
        return self.shares.strip() == "equal" and not (self.cuda_graph or self.select_batch)

    def check_unequal(self) -> None:
        """Refuse what needs replicas of equal numbers of workers.

        Raises:
            UsageError: Such an option is given.
        """
        options = _options(self)
        for name, why in NEED_EQUAL_REPLICAS.items():
            text, given = options[name]
            if given:
                raise refuse(text, "replicas of different numbers of workers", why)


#: The groups of `train --help` and of configuration files, with the dataclasses whose options each holds.
GROUPS: dict[str, tuple[type, ...]] = {
    "Model and data": (ModelConfig, DataConfig),
    "Optimisation": (OptimizerConfig,),
    "Parallelism": (PipelineConfig,),
    "Gradient exchange": (SyncConfig, RecipeConfig),
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
    if config.lr_per_sample is not None and config.lr is not None:
        raise refuse(f"--lr-per-sample {config.lr_per_sample:g}", f"--lr {config.lr:g}", "They say the same.")
    _refuse(config, RECIPE_CONFLICTS)
    if config.warm_start_steps and config.recipe == "none" and config.outer is None:
        why = "Only recipes, and --sync outer:H and local:H, begin in another way than they go on."
        raise UsageError(f"--warm-start-steps {config.warm_start_steps} alone", why, "Leave it out.")


def check_conflicts(config: TrainConfig) -> None:
    """Check that no two options contradict each other.

    Args:
        config: The options.

    Raises:
        UsageError: Two do; it names both.
    """
    _refuse(config, CONFLICTS)


def _refuse(config: TrainConfig, conflicts: tuple[tuple[str, str, str], ...]) -> None:
    options = _options(config)
    for one, other, why in conflicts:
        if options[one][1] and options[other][1]:
            raise refuse(options[one][0], options[other][0], why)


def _options(config: TrainConfig) -> dict[str, tuple[str, bool]]:
    """What the tables below name: an option as users type it, and whether it is given."""
    recipe, kron = config.recipe, config.optimizer.startswith("timm/kron")
    sync, optimizer, shares = f"--sync {config.sync}", f"--optimizer {config.optimizer}", f"--shares {config.shares}"
    coded = f"--compress {config.compress}" if recipe == "none" else f"--recipe {recipe}"
    another_codec = config.compress.strip() != "none" and not config.compress.startswith(recipe.replace("-", "_"))
    return {
        "adafactor on servers": (
            f"{optimizer} --memory-format channels_last",
            "adafactor" in config.optimizer and config.uses_channels_last,
        ),
        "another codec": (f"--compress {config.compress}", another_codec),
        "batch auto": ("--batch-size auto", config.batch_size == "auto"),
        "batch norm sync": ("--batch-norm sync", config.batch_norm == "sync"),
        "codec": (coded, config.may_compress(config.compress)),
        "codec auto": ("--compress auto", config.chooses),
        "compile": ("--compile", config.compile),
        "cuda graph": ("--cuda-graph", config.cuda_graph),
        "ema": (f"--model-ema {config.model_ema}", config.model_ema is not None),
        "fp16": ("--amp fp16", config.amp == "fp16"),
        "half": ("--double-buffer half", config.double_buffer == "half"),
        "placed": (f"--placement {config.placement}", config.layout is not None),
        "kernels": (f"--kernels {config.kernels}", config.uses_kernels),
        "kron": (optimizer, kron),
        "late": (f"--double-buffer {config.double_buffer}", config.double_buffer != "off"),
        "local": (sync, type(read_sync(config.sync)) is Local),
        "nesterov": ("--nesterov", config.nesterov),
        "no guard": ("--no-guard", not config.guard),
        "no share": (shares, 0 in (config.share_list or ())),
        "not sgd": (optimizer, config.optimizer != "sgd"),
        "outer": (sync, config.outer is not None),
        "plan file": (f"--plan {config.plan}", config.plan_file is not None),
        "profile": ("--profile", config.profile),
        "recipe": (f"--recipe {recipe}", recipe != "none"),
        "replicas without stages": (
            f"--replicas {config.replicas}",
            config.replicas is not None and not config.is_staged,
        ),
        "resume from": (f"--resume-from {config.resume_from}", config.resume_from is not None),
        "select batch": (f"--select-batch {config.select_batch}", bool(config.select_batch)),
        "servers": (sync, config.parameter_servers is not None),
        "shard optimizer": ("--shard-optimizer", config.shard_optimizer),
        "shares": (shares, config.shares.strip() != "equal"),
        "shares auto": (shares, config.shares.strip() == "auto"),
        "staged": (f"--stages {config.stages}", config.stages > 1),
        "steps": (f"--steps {config.steps}", config.steps is not None),
        "stop early": ("--stop-early", config.stop_early is not None),
        "timeline": ("--timeline", config.timeline is not None),
        "weights": (f"--weights {config.weights}", config.weights is not None),
    }


#: Options, as named by `_options`, with which every worker of a pipeline holds the whole model.
NEED_WHOLE_MODEL = (
    "kernels", "select batch", "outer", "codec auto", "late", "cuda graph", "recipe", "placed",
)  # fmt: skip

#: Options that need replicas of equal numbers of workers, and why.
NEED_EQUAL_REPLICAS = {
    "batch norm sync": "Workers would wait for each other in different orders.",
    "codec auto": "It measures the links of all replicas at once.",
    "late": "It was made for replicas of equal numbers of workers.",
    "outer": "Groups between outer steps are equal.",
    "timeline": "It pairs the workers of equal replicas.",
    "shard optimizer": "Its parts belong to the workers of equal replicas.",
}

_WHOLE = "With parameter servers every worker computes the whole model, at its own pace."
_TOGETHER = "No step is made by all workers together."

#: Pairs of options that contradict each other, and why.
CONFLICTS = (
    ("batch auto", "servers", "It times steps that all workers make together."),
    ("batch auto", "plan file", "A plan is for the batch that it was made with."),
    ("batch auto", "staged", "It times steps of the whole model."),
    ("batch auto", "shares", "It times steps of equal parts."),
    ("batch auto", "select batch", "Both choose the batch."),
    ("plan file", "servers", "Replicas make their steps apart, and each would have to follow it."),
    ("placed", "servers", _WHOLE),
    ("staged", "servers", _WHOLE),
    ("recipe", "servers", "Its state is the workers', and servers keep their own."),
    ("late", "servers", "Servers that do not wait are late already."),
    ("select batch", "servers", _WHOLE),
    ("replicas without stages", "servers", _WHOLE),
    ("shares auto", "servers", _TOGETHER),
    ("no share", "servers", "A worker without samples has nothing to push."),
    ("cuda graph", "servers", _WHOLE),
    ("timeline", "servers", "A timeline is of workers that make one step together."),
    ("profile", "servers", "It is of workers that make one step together."),
    ("kron", "servers", "It draws random numbers of its own: a shard could neither save nor redraw them."),
    ("adafactor on servers", "servers", "It looks at the order of dimensions; servers hold parameters as they lie."),
    ("codec auto", "servers", "It is searched for among predicted all-reduces, of which there are none."),
    ("stop early", "servers", "Where workers do not wait, rank 0 alone tests, and no shard hears of it."),
    ("kernels", "servers", "Which kernels run is agreed on by all workers together."),
    ("batch norm sync", "servers", "Workers do not meet in the middle of a step."),
    ("weights", "resume from", "Both say where to start."),
    ("cuda graph", "codec", "What a codec keeps is put back by the host where a step does not count."),
    ("cuda graph", "timeline", "A graph runs as a whole, so the actions inside it have no times of their own."),
    ("shares auto", "cuda graph", "A captured step has one size."),
    ("shares auto", "select batch", "Both change batches by trials."),
    ("no share", "batch norm sync", "Every replica must have samples to normalise."),
    ("shard optimizer", "outer", "Workers make steps alone, of all parameters."),
    ("shard optimizer", "servers", "Servers hold the optimizer's state, each a part of it."),
    ("shard optimizer", "recipe", "Its owners of stripes keep the state in parts already."),
    ("shard optimizer", "late", "A late step would wait for the parameters that others have stepped."),
    ("shard optimizer", "cuda graph", "A captured step makes the whole step on every worker."),
    ("shard optimizer", "kron", "It draws random numbers for one parameter after the other."),
)

#: Those of recipes, of the outer loop and of what changes gradients or weights, which a `Trainer` checks, too.
RECIPE_CONFLICTS = (
    ("recipe", "another codec", "The recipe says what gradients travel as."),
    ("recipe", "nesterov", "The recipe's momentum is the plain one."),
    ("recipe", "not sgd", "The recipe is one of SGD."),
    ("recipe", "outer", "The recipe exchanges gradients in every step."),
    ("compile", "batch norm sync", "A compiled pass cannot wait for other workers in its middle."),
    ("late", "outer", "Only gradients of every step are applied late."),
    ("late", "cuda graph", "A captured step ends with its own gradients."),
    ("half", "not sgd", "Half a batch is half a step for SGD alone: Adam's steps do not grow with gradients."),
    ("local", "codec", "Parameters are averaged in full precision; outer:H sends them by a codec."),
    ("outer", "codec auto", "It measures the exchange of gradients in every step."),
    ("outer", "cuda graph", "Some steps end with an exchange, and others do not."),
    ("outer", "batch norm sync", "Workers do not meet in a forward pass."),
    ("outer", "shares auto", _TOGETHER),
    ("outer", "no share", "A worker without samples would train on nothing between two exchanges."),
    ("ema", "half", "Each half of a batch would count as a step."),
    ("ema", "cuda graph", "The decay of the average is not the same in every step."),
    ("ema", "select batch", "Trials are undone, and averages are not."),
    ("fp16", "no guard", "A step whose gradients overflow is rolled back, and the loss scale falls."),
    ("fp16", "late", "Late gradients have the scale of another step."),
    ("fp16", "cuda graph", "A captured step does not follow the scale."),
    ("fp16", "select batch", "Steps on trial would change the scale."),
    ("fp16", "kernels", "Tuned kernels compute in float32 and bfloat16."),
    ("select batch", "steps", "How many steps there are depends on what is selected."),
    ("select batch", "outer", "Trials end with the same weights on all workers."),
    ("select batch", "cuda graph", "A captured step has one size."),
    ("select batch", "not sgd", "Learning rates follow the batch size by the rule of SGD."),
)
