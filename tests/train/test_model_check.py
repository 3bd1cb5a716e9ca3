"""A model that does not fit its data is refused with one error, and one that fits is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.train.model_check import check_outputs


class Net(nn.Module):
    """A small classifier; what it returns goes through a function first."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda scores: scores, outputs: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3))
        self.head = nn.Linear(4, outputs)
        self.change = change

    def forward(self, images: Tensor) -> Any:
        return self.change(self.head(self.body(images).mean((2, 3))))


class TwoInputs(Net):
    def forward(self, images: Tensor, lengths: Tensor) -> Any:
        return super().forward(images)


class TupleInEvaluation(Net):
    def forward(self, images: Tensor) -> Any:
        scores = super().forward(images)
        return scores if self.training else ("scores", scores)


def check(model: nn.Module, **options: Any) -> None:
    check_outputs(model, "mine:net", 10, (3, 8, 8), TrainConfig(**options), torch.device("cpu"))


@pytest.mark.parametrize("model", [Net(), Net(lambda x: {"logits": x}), Net(lambda scores: (scores, scores))])
@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_a_model_that_fits_is_accepted(model: nn.Module, amp: str) -> None:
    check(model, amp=amp)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Net(outputs=5), "mine:net has 5 outputs, and the data has 10 classes"),
        (Net(lambda scores: {"scores": scores}), "mine:net returned a dict; a tensor of shape (batch, 10) is needed"),
        (Net(lambda scores: (scores[:, :5], scores)), "mine:net has 5 outputs, and the data has 10 classes"),
        (TupleInEvaluation(), "mine:net returned a tuple in evaluation mode"),
        (Net(lambda scores: scores.argmax(1)), "shape (2,) and type int64 for 2 images"),
        (nn.Conv2d(3, 10, 3), "shape (2, 10, 6, 6) and type float32"),
        (TwoInputs(), "missing 1 required positional argument: 'lengths'"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(model)
    assert said in caught.value.what
    assert caught.value.fix
    assert caught.value.exit_code == 2


def test_an_error_in_the_forward_pass_shows_the_users_lines_alone() -> None:
    def complain(scores: Tensor) -> Tensor:
        raise ValueError("my own complaint")

    with pytest.raises(UsageError) as caught:
        check(Net(complain))
    assert caught.value.what == "mine:net failed on images of shape (2, 3, 8, 8): ValueError: my own complaint"
    assert caught.value.why.count('File "') == caught.value.why.count(f'File "{__file__}"') == 2
    assert "in complain" in caught.value.why
    assert isinstance(caught.value.__cause__, ValueError)
