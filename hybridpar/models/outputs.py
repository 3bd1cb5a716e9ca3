"""The precision in which a model runs, the scores among what it returns, and the loss with auxiliary heads.

A model returns a tensor; a tuple or list, whose first item are the scores; or a named tuple, a mapping or an object
with attributes (as models of `transformers` return), whose scores are called `logits` or `out`. Auxiliary scores are
what is called `aux...`, and, in a plain tuple, the other tensors of the shape of the scores.

In training the loss is that of the scores, plus 0.4 times that of an auxiliary output where there is one (as PyTorch's
tutorial trains Inception v3), or 0.3 times that of each of several (GoogLeNet: Szegedy et al. 2015, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from hybridpar.errors import UsageError, shortened
from hybridpar.models.build import article

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Names of the scores among named outputs, the first that is there.
MAIN = ("logits", "out")

#: What the names of auxiliary outputs begin with.
AUXILIARY = "aux"

#: Weight of the loss of a single auxiliary output, and of each of several.
ONE, EACH_OF_SEVERAL = 0.4, 0.3


def main_output(outputs: Any) -> Any:
    """The scores among what a model returned."""
    return split_outputs(outputs)[0]


def split_outputs(outputs: Any) -> tuple[Any, list[Any]]:
    """Scores and auxiliary scores among what a model returned; see above for the rule."""
    import torch

    if isinstance(outputs, torch.Tensor):
        return outputs, []
    named = _named(outputs)
    if named is not None:
        main = next((named[name] for name in MAIN if isinstance(named.get(name), torch.Tensor)), None)
        if main is not None:
            return main, [
                value
                for name, value in named.items()
                if str(name).lower().startswith(AUXILIARY) and isinstance(value, torch.Tensor)
            ]
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], torch.Tensor):
        main = outputs[0]
        return main, [item for item in outputs[1:] if isinstance(item, torch.Tensor) and item.shape == main.shape]
    what = f"the model returned {article(outputs)} without scores"
    raise UsageError(
        f"{what}; it has {shortened(', '.join(map(repr, named)))}" if named else what,
        "Scores are a tensor, the first of a tuple, or called logits or out.",
        "Return them under such a name, or use Trainer with your own loss.",
    )


def _named(outputs: Any) -> Mapping[Any, Any] | None:
    """Outputs by name; None where they have none."""
    if isinstance(outputs, Mapping):
        return outputs
    if isinstance(outputs, (tuple, list)):
        return outputs._asdict() if hasattr(outputs, "_asdict") else None
    return getattr(outputs, "__dict__", None)


class OutputLoss:
    """A loss of scores as a loss of whatever a model returns; works in any training loop.

    Example:
        >>> criterion = OutputLoss(torch.nn.CrossEntropyLoss())           # doctest: +SKIP
        >>> criterion(inception(images), labels).backward()               # doctest: +SKIP
    """

    def __init__(self, loss: Callable[[Any, Tensor], Tensor], auxiliary: float | None = None) -> None:
        self.loss = loss
        self.auxiliary = auxiliary
        #: Of a loss that is a sum: what it is divided by.
        self.count: Callable[[Tensor], Any] | None = getattr(loss, "count", None)

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss that is trained."""
        main, auxiliary = split_outputs(outputs)
        if _named(outputs) is None and sum(item is not None for item in outputs) > 1 + len(auxiliary):
            raise UsageError(
                f"the model returned {article(outputs)} of {len(outputs)} items, which the loss does not all take",
                "It takes scores, and in a tuple auxiliary scores of the same shape.",
                "Return the scores alone, or a dict that calls them logits, or use Trainer with your own loss.",
            )
        try:
            total = self.loss(main, targets)
        except (IndexError, RuntimeError) as error:
            if targets.is_floating_point() or main.ndim < 2 or not targets.numel():
                raise
            low, high, classes = int(targets.min()), int(targets.max()), main.shape[1]
            if 0 <= low <= high < classes:
                raise
            raise UsageError(
                f"targets go from {low} to {high}, and the model has {classes} outputs: {error}",
                "A target is the number of a class, from 0 on.",
                "Number the classes so, or make the model with an output for each (num_classes).",
            ) from error
        usual = ONE if len(auxiliary) == 1 else EACH_OF_SEVERAL
        for scores in auxiliary:
            total = total + (usual if self.auxiliary is None else self.auxiliary) * self.loss(scores, targets)
        return total

    def of_scores(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss of the scores alone, as it is tested."""
        return self.loss(main_output(outputs), targets)


def autocast(amp: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a model's forward pass runs.

    Args:
        amp: `none`, `bf16` or `fp16`, the option `--amp`.
        device: The model's device.

    Returns:
        Autocast to bfloat16 or float16, or a context that does nothing.
    """
    import torch

    if amp == "none":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if amp == "bf16" else torch.float16)
