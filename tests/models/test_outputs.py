from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hybridpar.config import TrainConfig
from hybridpar.errors import UsageError
from hybridpar.models import build_model
from hybridpar.models.outputs import OutputLoss, main_output, split_outputs
from hybridpar.train.trainer import Trainer

SCORES, FIRST, SECOND = (torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
FEATURES = torch.zeros(6, 7)
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])

Named = namedtuple("Named", ["logits", "aux_logits2", "aux_logits1"])
Segmented = namedtuple("Segmented", ["aux", "out"])


@dataclass
class HubOutput(OrderedDict):
    """As models of `transformers` return: a dataclass, and a mapping of what is not None."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None

    def __post_init__(self):
        self.update({"logits": self.logits, "hidden_states": self.hidden_states})


@dataclass
class Plain:
    out: torch.Tensor
    aux_head: torch.Tensor
    auxiliary_loss: float = 0.1


@pytest.mark.parametrize(
    ("outputs", "auxiliary"),
    [
        (SCORES, []),
        ((SCORES, FEATURES), []),
        ((SCORES, None, FIRST, SECOND), [FIRST, SECOND]),
        (Named(SCORES, FIRST, SECOND), [FIRST, SECOND]),
        (Segmented(FIRST, SCORES), [FIRST]),
        ({"out": SCORES, "aux": FIRST}, [FIRST]),
        ({"logits": SCORES, "out": FIRST, "features": SECOND}, []),
        (HubOutput(logits=SCORES, hidden_states=(FIRST,)), []),
        (Plain(SCORES, FIRST), [FIRST]),
    ],
)
def test_scores_are_found(outputs, auxiliary):
    main, others = split_outputs(outputs)
    assert main is SCORES
    assert main_output(outputs) is SCORES
    assert [id(one) for one in others] == [id(one) for one in auxiliary]


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"scores": SCORES, 3: None}, "returned a dict without scores; it has 'scores', 3"),
        (([SCORES], SCORES), "returned a tuple without scores"),
        (3.0, "returned a float without scores"),
        (HubOutput(hidden_states=(FIRST,)), "it has 'logits', 'hidden_states'"),
    ],
)
def test_outputs_without_scores_say_what_there_is(outputs, said):
    with pytest.raises(UsageError) as caught:
        main_output(outputs)
    assert said in str(caught.value)


def test_a_tuple_that_the_loss_does_not_all_take_is_refused():
    with pytest.raises(UsageError, match="returned a tuple of 2 items, which the loss does not all take"):
        OutputLoss(cross_entropy)((SCORES, FEATURES), LABELS)


def test_the_loss_is_that_of_all_heads():
    loss = OutputLoss(cross_entropy)
    main, first, second = (cross_entropy(one, LABELS) for one in (SCORES, FIRST, SECOND))
    assert torch.equal(loss(SCORES, LABELS), main)
    assert torch.equal(loss({"out": SCORES, "aux": FIRST}, LABELS), main + 0.4 * first)
    assert torch.equal(loss(Named(SCORES, FIRST, SECOND), LABELS), main + 0.3 * first + 0.3 * second)
    assert torch.equal(OutputLoss(cross_entropy, 0.5)((SCORES, FIRST), LABELS), main + 0.5 * first)
    assert torch.equal(loss.of_scores((SCORES, FIRST), LABELS), main)


class TwoHeads(nn.Module):
    """Returns what GoogLeNet does in training, and scores alone in evaluation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.aux1, self.aux2, self.fc = (nn.Linear(8, 5) for _ in range(3))

    def forward(self, images):
        low = self.first(images).relu()
        high = self.second(low).relu()
        scores = self.fc(high.mean((2, 3)))
        if self.training:
            return Named(scores, self.aux2(high.amax((2, 3))), self.aux1(low.mean((2, 3))))
        return scores


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_with_auxiliary_heads_equals_one_by_hand(stages):
    images, labels = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)), LABELS
    oracle, model = TwoHeads(), TwoHeads()
    scores, second, first = oracle(images)
    expected = cross_entropy(scores, labels) + 0.3 * (cross_entropy(first, labels) + cross_entropy(second, labels))
    expected.backward()
    config = TrainConfig(lr=0.1, optimizer="sgd:momentum=0", weight_decay=0.0, plan="none", stages=stages)
    with Trainer(model, config=config, example=images) as trainer:
        result = trainer.step((images, labels))
        evaluation = trainer.evaluate([(images, labels)])
    assert float(result.loss) == pytest.approx(expected.item(), rel=1e-5)
    for before, after in zip(oracle.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(after, before - 0.1 * before.grad, rtol=1e-5, atol=1e-6)
    assert evaluation.loss == pytest.approx(cross_entropy(model.eval()(images), labels).item(), rel=1e-5)


def test_inception_and_googlenet_return_what_is_weighted():
    with torch.device("meta"):
        for name, heads in (("googlenet", 2), ("inception_v3", 1)):
            model = build_model(name, 7, args={"aux_logits": True})
            assert len(split_outputs(model(torch.zeros(2, 3, 299, 299)))[1]) == heads
