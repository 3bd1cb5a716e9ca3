"""Options of a run that contradict each other: a table of features of runs, and one of those that exclude others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hybridpar.config.sync import Local
from hybridpar.errors import refuse

#: Features of a run by name: the option that gives it, and whether a `TrainConfig` has it. Beside these, every option
#: is a feature of the runs in which it is not at its default.
FEATURES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "adafactor": ("optimizer", lambda run: "adafactor" in run.optim.name and run.uses_channels_last),
    "another codec": ("compress", lambda run: not run.compress.strip().startswith(("none", "onebit_sgd"))),
    "asynchronous": ("sync", lambda run: run.parameter_servers and not run.parameter_servers.waits_for_all),
    "batch auto": ("batch_size", lambda run: run.batch_size == "auto"),
    "batch norm sync": ("batch_norm", lambda run: run.batch_norm == "sync"),
    "codec": ("compress", lambda run: run.compress.strip() != "none" and not (run.chooses and run.fidelity == "exact")),
    "codec auto": ("compress", lambda run: run.chooses),
    "cuda graph": ("cuda_graph", lambda run: run.cuda_graph == "on"),
    "fp16": ("amp", lambda run: run.amp == "fp16"),
    "half": ("sync", lambda run: run.late == "half"),
    "kron": ("optimizer", lambda run: run.optim.name.startswith("timm/kron")),
    "late": ("sync", lambda run: run.late != "off"),
    "local": ("sync", lambda run: type(run.sync_mode) is Local),
    "nesterov": ("optimizer", lambda run: run.optim.arguments.get("nesterov")),
    "no share": ("shares", lambda run: 0 in (run.share_list or ())),
    "not sgd": ("optimizer", lambda run: run.optim.name != "sgd"),
    "outer": ("sync", lambda run: run.outer),
    "placed": ("placement", lambda run: run.layout),
    "plan file": ("plan", lambda run: run.plan_file),
    "plateau": ("lr_schedule", lambda run: run.lr_schedule.strip().startswith("plateau")),
    "recipe": ("sync", lambda run: run.is_onebit),
    "recompute all": ("recompute", lambda run: "all" in run.recompute and not run.is_staged),
    "replicas without stages": ("replicas", lambda run: run.replicas is not None and not run.is_staged),
    "servers": ("sync", lambda run: run.parameter_servers),
    "shares auto": ("shares", lambda run: run.shares.strip() == "auto"),
    "stop early": ("checkpoints", lambda run: run.saving.stop is not None),
}

#: Features with which every worker of a pipeline holds the whole model.
NEED_WHOLE_MODEL = (
    "kernels", "select_batch", "outer", "codec auto", "late", "cuda graph", "recipe", "placed",
)  # fmt: skip

#: Features that need replicas of equal numbers of workers.
NEED_EQUAL_REPLICAS = ("batch norm sync", "codec auto", "late", "outer", "timeline", "shard_optimizer")

#: Features, others that contradict each of them, and why.
CONFLICTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "servers",
        ("placed", "stages", "recompute all", "replicas without stages", "plan file", "select_batch", "cuda graph"),
        "With parameter servers every worker computes the whole model, at its own pace.",
    ),
    (
        "servers",
        ("batch auto", "shares auto", "timeline", "profile", "kernels", "batch norm sync", "codec auto", "stop early"),
        "With parameter servers no step is made by all workers together.",
    ),
    ("asynchronous", ("model_ema", "plateau"), "No worker sees the weights and the tests of every step."),
    ("no share", ("batch norm sync", "servers"), "A worker without samples has nothing to normalise and to push."),
    ("kron", ("servers", "shard_optimizer"), "It draws random numbers of its own, which a part could not redraw."),
    ("servers", ("adafactor",), "It looks at the order of dimensions; servers hold parameters as channels_last lies."),
    ("batch auto", ("stages", "recompute all", "shares"), "It times steps of the whole model, in equal parts."),
    ("batch auto", ("plan file",), "A plan is for the batch that it was made with."),
    ("weights", ("resume_from",), "Both say where to start."),
    ("resume_from", ("resume",), "--resume goes on with the run in the run directory; --resume-from starts a new one."),
    (
        "shard_optimizer",
        ("outer", "servers", "recipe", "late", "cuda graph"),
        "In every step each replica updates its part of the parameters, from gradients of that step, and sends it.",
    ),
    ("recipe", ("another codec",), "The recipe says what gradients travel as."),
    ("recipe", ("nesterov", "not sgd"), "The recipe is one of SGD with plain momentum."),
    ("compile", ("batch norm sync",), "A compiled pass cannot wait for other workers in its middle."),
    ("cuda graph", ("recipe", "codec"), "What a codec keeps is put back by the host where a step does not count."),
    (
        "cuda graph",
        ("late", "outer", "model_ema", "fp16", "select_batch", "shares auto", "timeline"),
        "A captured step is replayed as a whole: of one size, with its own gradients, and the same in every step.",
    ),
    ("half", ("not sgd", "model_ema"), "Half a batch is half a step for SGD alone, and no step for an average."),
    ("local", ("codec",), "Parameters are averaged in full precision; outer:H sends them by a codec."),
    (
        "outer",
        ("codec auto", "batch norm sync", "shares auto", "no share", "select_batch"),
        "Between two exchanges workers train alone, each on its equal part.",
    ),
    ("fp16", ("guard",), "A step whose gradients overflow is rolled back, and the loss scale falls."),
    ("fp16", ("late", "select_batch"), "Gradients must have the scale of the step that they are used in."),
    ("fp16", ("kernels",), "Tuned kernels compute in float32 and bfloat16."),
    ("select_batch", ("batch auto", "shares auto"), "Both change batches by trials."),
    ("select_batch", ("steps",), "How many steps there are depends on what is selected."),
    ("select_batch", ("model_ema",), "Trials are undone, and averages are not."),
    ("select_batch", ("not sgd",), "Learning rates follow the batch size by the rule of SGD."),
)


def features_of(run: Any) -> dict[str, str]:
    """The features that a `TrainConfig` has, with the options that give them, as users type them."""
    options = {name: option for name, (option, has) in FEATURES.items() if has(run)}
    options |= {name: name for name in run.changed}
    return {name: _typed(option, getattr(run, option)) for name, option in options.items()}


def first_of(run: Any, names: Iterable[str]) -> str | None:
    """The option that gives a run the first of some features that it has; None where it has none of them."""
    features = features_of(run)
    return next((features[name] for name in names if name in features), None)


def refuse_conflicts(run: Any) -> None:
    """Refuse the first two features of a `TrainConfig` that contradict each other."""
    features = features_of(run)
    for name, others, why in CONFLICTS:
        other = next((other for other in others if other in features), None)
        if name in features and other is not None:
            raise refuse(features[other], features[name], why)


def _typed(option: str, value: object) -> str:
    flag = option.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
