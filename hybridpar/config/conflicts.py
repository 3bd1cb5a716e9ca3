"""Options of a run that contradict each other: a table of features of runs, and tables of those that exclude others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hybridpar.config.sync import Local, read_sync
from hybridpar.errors import refuse

#: Features of a run by name: the option that gives it, and whether a `TrainConfig` has it.
FEATURES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "adafactor": ("optimizer", lambda run: "adafactor" in run.optim.name and run.uses_channels_last),
    "another codec": ("compress", lambda run: not run.compress.strip().startswith(("none", "onebit_sgd"))),
    "asynchronous": ("sync", lambda run: run.parameter_servers and not run.parameter_servers.waits_for_all),
    "batch auto": ("batch_size", lambda run: run.batch_size == "auto"),
    "batch norm sync": ("batch_norm", lambda run: run.batch_norm == "sync"),
    "codec": ("compress", lambda run: run.compress.strip() != "none" and not (run.chooses and run.fidelity == "exact")),
    "codec auto": ("compress", lambda run: run.chooses),
    "compile": ("compile", lambda run: run.compile),
    "cuda graph": ("cuda_graph", lambda run: run.cuda_graph),
    "ema": ("model_ema", lambda run: run.model_ema is not None),
    "fp16": ("amp", lambda run: run.amp == "fp16"),
    "half": ("sync", lambda run: run.late == "half"),
    "kernels": ("kernels", lambda run: run.uses_kernels),
    "kron": ("optimizer", lambda run: run.optim.name.startswith("timm/kron")),
    "late": ("sync", lambda run: run.late != "off"),
    "local": ("sync", lambda run: type(read_sync(run.sync)) is Local),
    "nesterov": ("optimizer", lambda run: run.optim.arguments.get("nesterov")),
    "no guard": ("guard", lambda run: not run.guard),
    "no share": ("shares", lambda run: 0 in (run.share_list or ())),
    "not sgd": ("optimizer", lambda run: run.optim.name != "sgd"),
    "outer": ("sync", lambda run: run.outer),
    "overwrite": ("overwrite", lambda run: run.overwrite),
    "placed": ("placement", lambda run: run.layout),
    "plan file": ("plan", lambda run: run.plan_file),
    "plateau": ("lr_schedule", lambda run: run.lr_schedule.strip().startswith("plateau")),
    "profile": ("profile", lambda run: run.profile),
    "recipe": ("sync", lambda run: run.is_onebit),
    "recompute all": ("recompute", lambda run: "all" in run.recompute and not run.is_staged),
    "replicas without stages": ("replicas", lambda run: run.replicas is not None and not run.is_staged),
    "resume": ("resume", lambda run: run.resume),
    "resume from": ("resume_from", lambda run: run.resume_from is not None),
    "select batch": ("select_batch", lambda run: run.select_batch),
    "servers": ("sync", lambda run: run.parameter_servers),
    "shard optimizer": ("shard_optimizer", lambda run: run.shard_optimizer),
    "shares": ("shares", lambda run: run.shares.strip() != "equal"),
    "shares auto": ("shares", lambda run: run.shares.strip() == "auto"),
    "staged": ("stages", lambda run: run.stages > 1),
    "steps": ("steps", lambda run: run.steps is not None),
    "stop early": ("checkpoints", lambda run: run.saving.stop is not None),
    "timeline": ("timeline", lambda run: run.timeline is not None),
    "weights": ("weights", lambda run: run.weights is not None),
}

#: Features with which every worker of a pipeline holds the whole model.
NEED_WHOLE_MODEL = (
    "kernels", "select batch", "outer", "codec auto", "late", "cuda graph", "recipe", "placed",
)  # fmt: skip

#: Features that need replicas of equal numbers of workers.
NEED_EQUAL_REPLICAS = ("batch norm sync", "codec auto", "late", "outer", "timeline", "shard optimizer")

#: A feature, others that contradict it, and why.
Row = tuple[str, tuple[str, ...], str]

CONFLICTS: tuple[Row, ...] = (
    (
        "servers",
        ("placed", "staged", "recompute all", "replicas without stages", "plan file", "select batch", "cuda graph"),
        "With parameter servers every worker computes the whole model, at its own pace.",
    ),
    (
        "servers",
        ("batch auto", "shares auto", "timeline", "profile", "kernels", "batch norm sync", "codec auto", "stop early"),
        "With parameter servers no step is made by all workers together.",
    ),
    ("asynchronous", ("ema", "plateau"), "No worker sees the weights and the tests of every step."),
    ("servers", ("no share",), "A worker without samples has nothing to push."),
    ("servers", ("kron",), "It draws random numbers of its own: a shard could neither save nor redraw them."),
    ("servers", ("adafactor",), "It looks at the order of dimensions; servers hold parameters as channels_last lies."),
    ("batch auto", ("staged", "recompute all", "shares"), "It times steps of the whole model, in equal parts."),
    ("batch auto", ("plan file",), "A plan is for the batch that it was made with."),
    ("batch auto", ("select batch",), "Both choose the batch."),
    ("shares auto", ("select batch",), "Both change batches by trials."),
    ("weights", ("resume from",), "Both say where to start."),
    ("overwrite", ("resume",), "--resume goes on with the run in the run directory; --overwrite deletes that run."),
    ("resume from", ("resume",), "--resume goes on with the run in the run directory; --resume-from starts a new one."),
    ("cuda graph", ("recipe", "codec"), "What a codec keeps is put back by the host where a step does not count."),
    ("cuda graph", ("shares auto", "timeline"), "A graph is of one size, and runs as a whole."),
    ("no share", ("batch norm sync",), "Every replica must have samples to normalise."),
    (
        "shard optimizer",
        ("outer", "servers", "recipe", "late", "cuda graph"),
        "In every step each replica updates its part of the parameters, from gradients of that step, and sends it.",
    ),
    ("shard optimizer", ("kron",), "It draws random numbers for one parameter after the other."),
)

#: Those of recipes, of the outer loop and of what changes gradients or weights, which a `Trainer` checks, too.
GRADIENT_CONFLICTS: tuple[Row, ...] = (
    ("recipe", ("another codec",), "The recipe says what gradients travel as."),
    ("recipe", ("nesterov", "not sgd"), "The recipe is one of SGD with plain momentum."),
    ("compile", ("batch norm sync",), "A compiled pass cannot wait for other workers in its middle."),
    (
        "cuda graph",
        ("late", "outer", "ema", "fp16", "select batch"),
        "A captured step is replayed as it is: of one size, with its own gradients, and the same in every step.",
    ),
    ("half", ("not sgd", "ema"), "Half a batch is half a step for SGD alone, and no step for an average."),
    ("local", ("codec",), "Parameters are averaged in full precision; outer:H sends them by a codec."),
    (
        "outer",
        ("codec auto", "batch norm sync", "shares auto", "no share", "select batch"),
        "Between two exchanges workers train alone, each on its equal part.",
    ),
    ("fp16", ("no guard",), "A step whose gradients overflow is rolled back, and the loss scale falls."),
    ("fp16", ("late", "select batch"), "Gradients must have the scale of the step that they are used in."),
    ("fp16", ("kernels",), "Tuned kernels compute in float32 and bfloat16."),
    ("select batch", ("steps",), "How many steps there are depends on what is selected."),
    ("select batch", ("ema",), "Trials are undone, and averages are not."),
    ("select batch", ("not sgd",), "Learning rates follow the batch size by the rule of SGD."),
)


def features_of(run: Any) -> dict[str, str]:
    """The features that a `TrainConfig` has, with the options that give them, as users type them."""
    return {name: _typed(option, getattr(run, option)) for name, (option, has) in FEATURES.items() if has(run)}


def refuse_conflicts(run: Any, rows: Iterable[Row]) -> None:
    """Refuse the first two features of a `TrainConfig` that contradict each other."""
    features = features_of(run)
    for name, others, why in rows:
        for other in others:
            if name in features and other in features:
                raise refuse(features[other], features[name], why)


def _typed(option: str, value: object) -> str:
    flag = option.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
