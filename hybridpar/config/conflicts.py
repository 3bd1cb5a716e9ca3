"""Features of a run that contradict each other, as tables of pairs; `TrainConfig.features` says which a run has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hybridpar.errors import refuse


def refuse_pairs(features: Mapping[str, tuple[str, bool]], pairs: Iterable[tuple[str, str, str]]) -> None:
    """Refuse the first pair of features that a run has both of; the error names both as users type them."""
    for one, other, why in pairs:
        if features[one][1] and features[other][1]:
            raise refuse(features[one][0], features[other][0], why)


#: Options, as named by `TrainConfig.features`, with which every worker of a pipeline holds the whole model.
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
GRADIENT_CONFLICTS = (
    ("recipe", "another codec", "The recipe says what gradients travel as."),
    ("recipe", "nesterov", "The recipe's momentum is the plain one."),
    ("recipe", "not sgd", "The recipe is one of SGD."),
    ("compile", "batch norm sync", "A compiled pass cannot wait for other workers in its middle."),
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
