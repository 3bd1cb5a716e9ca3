"""A trained model is opened again from a checkpoint or a file of weights, and computes what it computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config.train import TrainedOptions
from hybridpar.errors import CheckpointError, UsageError
from hybridpar.models import model_fingerprint
from hybridpar.run.trained import find_trained, load_trained
from hybridpar.train.checkpoint import CheckpointData, save_checkpoint


class Mixed(nn.Module):
    """Large and small tensors: tied, not saved, plain attributes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(100, 100), persistent=False)
        self.conv = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.register_buffer("order", torch.randperm(5000) % 64, persistent=False)
        self.scale = torch.rand(64)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.conv(images)).mean(dim=(2, 3)) * self.scale
        features = self.second(self.first(features)) + self.noise.mean() * features[:, self.order[:64]]
        scores: Tensor = self.head(features)
        return scores


def saved(directory: Path, model: nn.Module) -> Path:
    data = CheckpointData(3, model_fingerprint(model), model.state_dict(), {}, None)
    return save_checkpoint(directory, data, World())


def loaded(source: Path, factory: str, *, channels_last: bool = False) -> nn.Module:
    torch.manual_seed(5)
    options = TrainedOptions(model=f"tests.run.test_trained:{factory}", data="synthetic")
    return load_trained(find_trained(str(source), options), 10, channels_last=channels_last)


def built(factory, state: dict[str, Tensor]) -> nn.Module:
    torch.manual_seed(5)
    model = factory(10).eval()
    model.load_state_dict(state)
    return model


def written(tmp_path: Path, form: str, model: nn.Module) -> tuple[Path, Path]:
    """What is named, and the file that the weights are in."""
    if form == "checkpoint":
        step = saved(tmp_path, model)
        return step, step / "model.safetensors"
    file = tmp_path / f"weights.{form}"
    if form == "pt":
        torch.save(model.state_dict(), file)
    else:
        save_file({name: value.clone() for name, value in model.state_dict().items()}, file)
    return file, file


@pytest.mark.parametrize("form", ["checkpoint", "pt", "safetensors"])
def test_a_trained_model_computes_what_one_computes_that_was_given_the_weights(tmp_path, form):
    trained = Mixed()
    source, file = written(tmp_path, form, trained)
    model, expected = loaded(source, "Mixed"), built(Mixed, trained.state_dict())
    assert model.second.weight is model.first.weight
    assert not model.training
    assert torch.equal(model(torch.ones(2, 3, 8, 8)), expected(torch.ones(2, 3, 8, 8)))
    assert all(torch.equal(getattr(model, name), getattr(expected, name)) for name in ("noise", "order", "scale"))
    before = file.read_bytes()
    model.load_state_dict(Mixed().state_dict())  # written to memory of this process
    assert file.read_bytes() == before


def test_the_layout_is_that_which_is_wanted_and_the_dtype_that_of_the_model(tmp_path):
    model = Mixed()
    for number, (layout, wanted) in enumerate(((False, False), (False, True), (True, False), (True, True))):
        model.to(memory_format=torch.channels_last if layout else torch.contiguous_format)
        reopened = loaded(saved(tmp_path / str(number), model), "Mixed", channels_last=wanted)
        expected = Mixed().to(memory_format=torch.channels_last if wanted else torch.contiguous_format)
        assert reopened.conv.weight.stride() == expected.conv.weight.stride()
        assert torch.equal(reopened.conv.weight, model.conv.weight)
    torch.save(model.half().state_dict(), tmp_path / "half.pt")
    reopened = loaded(tmp_path / "half.pt", "Mixed")
    assert reopened.head.weight.dtype == torch.float32
    assert torch.equal(reopened.head.weight, model.head.weight.float())


def test_files_that_do_not_fit_are_one_error(tmp_path):
    state = Mixed().state_dict()
    del state["head.bias"]
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match=r"is not of .* Missing key.* Unexpected key"):
        loaded(saved(tmp_path / "other", model), "Mixed")
    torch.save(state, tmp_path / "lacking.pt")
    with pytest.raises(UsageError, match="must have all of its weights"):
        loaded(tmp_path / "lacking.pt", "Mixed")
    step = saved(tmp_path / "cut", Mixed())
    with (step / "model.safetensors").open("r+b") as stream:
        stream.truncate(20_000)
    with pytest.raises(CheckpointError, match="is damaged"):
        loaded(step, "Mixed")
