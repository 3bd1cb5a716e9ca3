"""One worker of the trainer against a plain PyTorch loop; several workers are in tests/sync/test_reducer.py."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hybridpar import Trainer
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import CheckpointError, TrainingError, UsageError
from hybridpar.models.outputs import OutputLoss
from hybridpar.optim.build import build_optimizer
from hybridpar.train.checkpoint import load_checkpoint, save_checkpoint
from tests.ranks import run_ranks
from tests.small_nets import SmallNet
from tests.train import training


def make_batch(seed: int = 0, samples: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(0, 10, (samples,), generator=generator)


def make_model(seed: int = 1, **options: Any) -> SmallNet:
    torch.manual_seed(seed)
    return SmallNet(**options)


def train(config: TrainConfig, steps: int = 3, **options: Any) -> nn.Module:
    with Trainer(make_model(), config=config, **options) as trainer:
        for step in range(steps):
            trainer.step(make_batch(step))
        return trainer.model


def by_hand(config: TrainConfig, parts: int = 1, limit: float | None = None) -> nn.Module:
    model, loss = make_model(), nn.CrossEntropyLoss(label_smoothing=config.criterion.smoothing)
    batches = map(make_batch, range(3))
    return training.plain_loop(model, build_optimizer(model, config), batches, parts=parts, limit=limit, loss=loss)


def assert_equal(one: nn.Module, other: nn.Module, *, exact: bool = True, skip: tuple[str, ...] = ()) -> None:
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        if any(part in name for part in skip):
            continue
        if exact:
            assert torch.equal(mine, theirs), name
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, {}),
        ({"optimizer": "sgd:nesterov", "weight_decay": 0.01}, {}),
        ({"optimizer": "adamw", "lr": 0.01}, {}),
        ({"loss": "ce:smoothing=0.1"}, {}),
        ({"guard": False}, {}),
        ({"micro_batches": 5}, {"parts": 5}),
        ({"clip_grad": 0.01}, {"limit": 0.01}),
        ({"clip_grad": 1e9}, {"limit": 1e9}),
        ({"memory_format": "channels_last"}, {}),
    ],
)
def test_a_step_is_that_of_a_plain_loop(options, plain):
    config = TrainConfig(**options)
    exact = not options.keys() & {"clip_grad", "memory_format"}
    # Running statistics are pooled over micro-batches on purpose; see tests/sync/test_batchnorm.py.
    skip = ("running", "tracked") if "micro_batches" in options else ()
    assert_equal(train(config), by_hand(config, **plain), exact=exact, skip=skip)


def test_a_plateau_lowers_the_rate_and_is_in_the_checkpoint(tmp_path):
    config = TrainConfig(lr_schedule="plateau:patience=0,warmup=0", lr=0.5)
    with Trainer(make_model(), config=config) as trainer:
        rates = []
        for step, accuracy in enumerate((0.5, 0.5, 0.6, 0.6)):
            rates.append(trainer.step(make_batch(step)).lr)
            trainer.note_metric(accuracy)
        path = trainer.save(tmp_path)
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05])
    with Trainer(make_model(), config=config) as again:
        again.load(path)
        assert again.step(make_batch()).lr == pytest.approx(0.005)


def test_a_result_tells_what_happened():
    with Trainer(make_model(), config=TrainConfig(lr=0.05, lr_schedule="cosine:warmup=0"), total_steps=4) as trainer:
        results = [trainer.step(make_batch(step)) for step in range(4)]
    model = make_model()
    images, labels = make_batch()
    assert results[0].loss == pytest.approx(nn.functional.cross_entropy(model(images), labels).item(), rel=1e-6)
    assert [result.step for result in results] == [1, 2, 3, 4]
    assert [result.lr for result in results] == [
        pytest.approx(0.05 * (1 + math.cos(math.pi * step / 4)) / 2) for step in range(4)
    ]
    for result in results:
        assert (result.outcome.samples, result.outcome.bytes_sent, result.skipped) == (12, 0, False)
        assert 0 < result.compute_ms == result.step_ms, "a worker alone waits for nobody"


def test_the_users_own_optimizer_and_loss_are_used():
    losses = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses.append(nn.functional.multi_margin_loss(outputs, targets))
        return losses[-1]

    with Trainer(make_model(), lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01), loss) as trainer:
        result = trainer.step(make_batch())
    assert isinstance(trainer.optimizer, torch.optim.RMSprop)
    assert result.loss == pytest.approx(losses[0].item())
    assert result.lr == 0.01


def test_targets_of_several_classes_are_said_or_refused():
    images, labels = make_batch()
    several = nn.functional.one_hot(labels, 10).float()
    config = TrainConfig(plan="none")
    with Trainer(make_model(), config=config) as trainer:
        trainer.step((images, several))
    several[:, 3] = 1.0
    with Trainer(make_model(), config=config) as trainer, pytest.raises(UsageError, match="several_labels=True"):
        trainer.step((images, several))
    with Trainer(make_model(), config=config, several_labels=True) as trainer:
        loss = nn.functional.binary_cross_entropy_with_logits(trainer.model(images), several)
        assert trainer.step((images, several)).loss == pytest.approx(float(loss), rel=1e-6)


class SeenPixels(nn.Module):
    """A user's loss that is a mean over some pixels, as a sum and its count."""

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, ignore_index=255, reduction="sum")

    def count(self, targets):
        return (targets != 255).sum()


UNEVEN = {
    "ignored": nn.CrossEntropyLoss(ignore_index=255),
    "weighed": OutputLoss(nn.CrossEntropyLoss(torch.tensor([10.0, 1, 1, 1]), ignore_index=255, label_smoothing=0.1)),
    "own": SeenPixels(),
}


def pixels():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (8, 6, 6), generator=generator)
    labels[4:, :5] = 255
    labels[6:] = 255  # a micro-batch, and a worker's share, without any
    return torch.randn(8, 3, 6, 6, generator=generator), labels


def pixel_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Conv2d(5, 4, 1))


def uneven_step(world, name, options):
    """Weights after two steps, and loss as trained and as tested."""
    images, labels = (one.tensor_split(world.size)[world.rank] for one in pixels())
    config = TrainConfig(plan="none", lr=1.0, optimizer="sgd:momentum=0.9", weight_decay=0.0, **options)
    with Trainer(pixel_net(), loss=UNEVEN[name], config=config, world=world, example=images[:1]) as trainer:
        loss, _ = (trainer.step((images, labels)).loss for _ in range(2))
        tested = trainer.evaluate([(images, labels)]).loss
        trainer.wait()
        model = trainer.model
    return torch.cat([one.detach().flatten() for one in model.parameters()]), loss, tested


@pytest.mark.parametrize("name", UNEVEN)
def test_a_loss_that_is_no_mean_over_samples_is_the_same_in_all_parts(name):
    net, (images, labels) = pixel_net(), pixels()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    losses = []
    for _ in range(3):
        losses.append(UNEVEN[name](net(images), labels) / (UNEVEN[name].count(labels) if name == "own" else 1))
        if len(losses) < 3:
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
    right = torch.cat([one.detach().flatten() for one in net.parameters()]), float(losses[0]), float(losses[2])
    alone = [
        uneven_step(World(), name, options) for options in ({}, {"micro_batches": 8}, {"stages": 2, "micro_batches": 4})
    ]
    shared = run_ranks(uneven_step, 2, name, {"micro_batches": 2})
    for mine in (*alone, *shared):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "label", "parts", "times"),
    [
        (None, -100, 2, 1),
        (nn.CrossEntropyLoss(), -100, 2, 1),
        (nn.CrossEntropyLoss(), -100, 1, 0),
        (nn.CrossEntropyLoss(), 1, 2, 0),
        (UNEVEN["ignored"], 255, 2, 0),
    ],
)
def test_targets_that_the_default_index_leaves_out_of_parts_are_told_once(caplog, loss, label, parts, times):
    images, labels = pixels()
    with Trainer(pixel_net(), loss=loss, config=TrainConfig(plan="none", micro_batches=parts)) as trainer:
        for _ in range(2):
            trainer.step((images, labels.where(labels != 255, label)))
    assert [record.args[0] for record in caplog.records] == [-100] * times


def test_parameters_of_another_model_are_refused():
    with pytest.raises(UsageError, match="the optimizer holds parameters that the model does not"):
        Trainer(make_model(), lambda model: torch.optim.SGD(make_model().parameters(), lr=0.1))


def test_what_is_no_batch_is_one_error_and_training_goes_on():
    images, labels = make_batch()
    with Trainer(make_model()) as trainer:
        for batch in (((images, images), labels), {"x": images}, "text", images.numpy(), (images, 3), (images,) * 3):
            for use in (trainer.step, lambda batch: trainer.evaluate([batch])):
                with pytest.raises(UsageError, match=r"a batch is an? \w+"):
                    use(batch)
        trainer.step((images, labels))
        with pytest.raises(UsageError, match="the test set is empty"):
            trainer.evaluate([])
    with pytest.raises(UsageError, match="--lr abc: rate=abc"):
        Trainer(make_model(), config=TrainConfig(lr="abc"))


class Centred(nn.Module):
    """Subtracts a moving mean of what it sees, a buffer that its forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 2, 3)).view(8, 1, 1), 0.5)
        return x - self.mean


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("wait", [True, False])
def test_a_step_that_an_error_ends_has_not_been(stages, wait):
    images, labels = make_batch(9)
    weights = []
    for bad in (False, True):
        config = TrainConfig(lr=0.1, plan="none", stages=stages, micro_batches=2)
        model = make_model()
        model.body.append(Centred())
        with Trainer(model, config=config, example=images[:6], total_steps=9) as trainer:
            trainer.step(make_batch(0))
            if bad:
                with pytest.raises(UsageError, match="out of bounds"):  # noqa: PT012 - it may be late
                    trainer.step((images, labels + 10))
                    trainer.wait() if wait else trainer.step(make_batch(7)).loss
                if wait:
                    trainer.evaluate([make_batch(8)])
            results = [trainer.step(make_batch(step)) for step in range(1, 4)]
            assert [result.step for result in results] == [2, 3, 4]
        weights.append(training.weights(trainer.model))
    assert training.same(*weights)


def test_evaluation_counts_every_sample_once():
    model = make_model().eval()
    batches = [make_batch(0, 12), make_batch(1, 5)]
    with Trainer(model) as trainer:
        evaluation = trainer.evaluate(batches)
        assert not trainer.model.training
        trainer.model.eval()
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        outputs = trainer.model(images)
    assert evaluation.samples == 17
    assert evaluation.accuracy == pytest.approx(float((outputs.argmax(1) == labels).double().mean()))
    assert evaluation.loss == pytest.approx(nn.functional.cross_entropy(outputs, labels).item(), rel=1e-5)


def evaluate_share(world, shares):
    with Trainer(make_model(), world=world) as trainer:
        mine = [torch.split(one, shares)[world.rank] for one in make_batch(0, sum(shares))]
        return trainer.evaluate([mine] if shares[world.rank] else [])


def test_uneven_and_empty_shares_of_a_test_set_add_up():
    ((alone,), answers) = (run_ranks(evaluate_share, len(shares), shares) for shares in ([11], [8, 0, 3]))
    assert answers[0] == answers[1] == answers[2]
    assert (answers[0].accuracy, answers[0].samples) == (alone.accuracy, 11)
    assert answers[0].loss == pytest.approx(alone.loss, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 3}, {"batch_norm": "local", "optimizer": "adamw"}])
def test_one_bad_step_is_skipped_and_three_running_stop_the_training(options):
    images, labels = make_batch()
    bad = (images * math.nan, labels)
    with Trainer(make_model(), config=TrainConfig(**options)) as trainer:
        before = copy.deepcopy(trainer.model.state_dict())
        assert trainer.step(bad).skipped
        assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
        assert not trainer.step((images, labels)).skipped
        trainer.step(bad)
        trainer.step(bad)
        with pytest.raises(TrainingError) as caught:
            trainer.step(bad)
        assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())
    assert "steps 3 to 5" in caught.value.what
    assert "first bad parameter: body.0.weight" in caught.value.what
    assert "--lr" in caught.value.fix


def test_without_the_guard_three_bad_losses_still_stop():
    images, labels = make_batch()
    with Trainer(make_model(), config=TrainConfig(guard=False)) as trainer:
        assert not trainer.step((images * math.inf, labels)).skipped
        trainer.step((images, labels))
        with pytest.raises(TrainingError, match="steps 1 to 3"):
            trainer.step((images, labels))


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    with Trainer(make_model()) as trainer:
        path = trainer.save(tmp_path)
    for other in (make_model(width=12), nn.Linear(2, 2), make_model().double()):
        before = copy.deepcopy(other.state_dict())
        with Trainer(other) as trainer, pytest.raises(CheckpointError, match="is of another model"):
            trainer.load(path)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("training", {}),
        ("training", {"optimizer": {"kind": "SGD", "state": {"head.weight": 3}}, "extra": {}}),
        ("local", {"random": {"torch": torch.zeros(3)}, "sync": {}}),
        ("model", {"head.weight": torch.zeros(3)}),
    ],
)
def test_a_checkpoint_that_holds_something_else_is_one_error(part, value, tmp_path):
    with Trainer(make_model()) as trainer:
        data = load_checkpoint(trainer.save(tmp_path))
        path = save_checkpoint(tmp_path / "other", dataclasses.replace(data, **{part: value}), World())
        with pytest.raises(CheckpointError, match="does not hold what is needed here") as caught:
            trainer.load(path)
    assert len(str(caught.value)) < 1_000


def test_a_trained_model_is_a_plain_model_again(tmp_path):
    with Trainer(make_model(), config=TrainConfig(micro_batches=2)) as trainer:
        trainer.step(make_batch())
        path = trainer.save(tmp_path)
    trainer.close()  # once more
    assert type(trainer.model.body[1]) is nn.BatchNorm2d
    fresh = make_model(seed=3)
    fresh.load_state_dict(load_file(path / "model.safetensors"))
    assert_equal(fresh, trainer.model)


def test_closing_goes_to_its_end_whatever_failed():
    trainer = Trainer(make_model(), config=TrainConfig(micro_batches=2))
    trainer.lanes.open("other", threads=1).submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.close()
    assert type(trainer.model.body[1]) is nn.BatchNorm2d


def empty_on_some(world, options, cuts):
    with Trainer(
        training.make_net(), config=training.config(**options), world=world, classes=5, total_steps=20
    ) as trainer:
        results = [trainer.step(training.share(world, step, cut)) for step, cut in enumerate(cuts)]
        trainer.wait()
        return training.weights(trainer.model), [(result.outcome.samples, result.loss) for result in results]


@pytest.mark.parametrize(
    ("options", "shared_memory"),
    [
        ({"micro_batches": 1, "clip_grad": 0.5}, True),
        ({"micro_batches": 2, "clip_grad": 0.5}, False),
        ({"compress": "onebit"}, False),
        ({"compress": "powersgd:rank=2"}, False),
        ({"sync": "onebit-sgd"}, False),
        ({"sync": "allreduce:late=half"}, False),
        ({"mix": "mixup=0.5,cutmix=0.5", "amp": "fp16"}, False),
    ],
)
def test_a_worker_without_samples_takes_part(options, shared_memory):
    cuts = [(0, 12), (12, 0), (4, 8), (0, 12)]
    first, second = run_ranks(empty_on_some, 2, options, cuts, shared_memory=shared_memory)
    assert training.same(first[0], second[0])
    assert first[1] == second[1]
    assert all(samples == 12 for samples, _ in first[1])
    if "clip_grad" in options:
        (alone,) = run_ranks(empty_on_some, 1, options, [(12,)] * 4)
        training.close(first[0], alone[0])
        assert first[1] == [(12, pytest.approx(loss)) for _, loss in alone[1]]


def test_bf16_computes_in_bf16_and_keeps_float32_weights():
    seen = []
    with Trainer(make_model(), config=TrainConfig(amp="bf16")) as trainer:
        trainer.model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        losses = [trainer.step(make_batch()).loss for _ in range(8)]
        trainer.evaluate([make_batch()])
    assert set(seen) == {torch.bfloat16}
    assert losses[-1] < losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
