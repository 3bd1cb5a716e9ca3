"""A model that does not fit its data is refused with one error, and one that fits is left as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
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


class DictInTraining(Net):
    def forward(self, images: Tensor) -> Any:
        scores = super().forward(images)
        return {"scores": scores} if self.training else scores


class TupleInEvaluation(Net):
    def forward(self, images: Tensor) -> Any:
        scores = super().forward(images)
        return scores if self.training else ("scores", scores)


def check(model: nn.Module, **options: Any) -> None:
    check_outputs(model, "mine:net", 10, (3, 8, 8), TrainConfig(**options), torch.device("cpu"))


@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_a_model_that_fits_is_accepted(amp: str) -> None:
    check(Net(), amp=amp)


@pytest.mark.parametrize("change", [lambda scores: {"logits": scores}, lambda scores: (scores, scores)])
def test_scores_may_be_among_other_outputs(change: Callable[[Tensor], Any]) -> None:
    check(Net(change))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Net(outputs=5), "mine:net has 5 outputs, and the data has 10 classes"),
        (Net(lambda scores: {"scores": scores}), "mine:net returned a dict; a tensor of shape (batch, 10) is needed"),
        (Net(lambda scores: (scores[:, :5], scores)), "mine:net has 5 outputs, and the data has 10 classes"),
        (DictInTraining(), "mine:net returned a dict; a tensor"),
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


class Changing(Net):
    """Changes, in every forward pass, everything that a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, images: Tensor) -> Any:
        self.calls += 1
        self.seen = self.seen + 1
        with torch.no_grad():
            self.head.weight.data.mul_(0.5)
            self.head.bias.add_(random.random() + np.random.rand() + float(torch.rand(())))
        return super().forward(images)


@pytest.mark.parametrize("fails", [False, True])
def test_the_check_changes_nothing(fails: bool) -> None:
    model = Changing()
    model.body.eval()  # a mode of a part stays
    if fails:
        model.change = dict
    before = copy.deepcopy(model)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    if fails:
        with pytest.raises(UsageError):
            check(model)
    else:
        check(model)
    assert model.calls == 0
    assert [module.training for module in model.modules()] == [module.training for module in before.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())
    state = model.state_dict()
    for name, value in before.state_dict().items():
        assert torch.equal(state[name], value), name
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
