"""A trained model has its weights in pages of their file, and computes what one computes that was built whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.config.trained import TrainedOptions
from hybridpar.errors import CheckpointError, UsageError
from hybridpar.models import model_fingerprint
from hybridpar.models.deferred import saved_tensors
from hybridpar.run.trained import find_trained, load_trained
from hybridpar.train.checkpoint import CheckpointData, save_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


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
        found = self.norm(self.conv(images)).mean(dim=(2, 3)) * self.scale
        found = self.second(self.first(found)) + self.noise.mean() * found[:, self.order[:64]]
        scores: Tensor = self.head(found)
        return scores


class Copies(nn.Linear):
    """Takes its weights in a way of its own."""

    def _load_from_state_dict(self, state_dict, prefix, *_):
        with torch.no_grad():
            self.weight.copy_(state_dict[f"{prefix}weight"])
            self.bias.copy_(state_dict[f"{prefix}bias"])


class Shares(Mixed):
    """Holds a part of a parameter."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.row = self.first.weight.detach()[0]

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * self.row.mean()


def copies(num_classes: int = 10) -> nn.Module:
    model = Mixed(num_classes)
    model.head = Copies(64, num_classes)
    return model


def recurrent(num_classes: int = 10) -> nn.Module:
    model = Mixed(num_classes)
    model.first = nn.LSTM(64, 64)
    return model


def saved(directory: Path, model: nn.Module) -> Path:
    data = CheckpointData(3, model_fingerprint(model), model.state_dict(), {}, None)
    return save_checkpoint(directory, data, World())


def loaded(source: Path, factory: str, *, channels_last: bool = False) -> nn.Module:
    torch.manual_seed(5)
    options = TrainedOptions(model=f"tests.run.test_trained:{factory}", data="synthetic")
    return load_trained(find_trained(str(source), options), 10, channels_last=channels_last)[1]


def built(factory, state: dict[str, Tensor]) -> nn.Module:
    torch.manual_seed(5)
    model = factory(10).eval()
    model.load_state_dict(state)
    return model


def in_file(model: nn.Module, file: Path) -> list[bool]:
    """Whether each saved tensor is in pages of a file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    return [any(begin <= one.data_ptr() < end for begin, end in ranges) for one in saved_tensors(model)]


def written(tmp_path: Path, form: str, model: nn.Module) -> tuple[Path, Path]:
    """What is named, and the file that the weights are in."""
    if form == "checkpoint":
        step = saved(tmp_path, model)
        return step, step / "model.pt"
    file = tmp_path / f"weights.{form}"
    if form == "pt":
        torch.save(model.state_dict(), file)
    else:
        from safetensors.torch import save_file

        save_file({name: value.clone() for name, value in model.state_dict().items()}, file)
    return file, file


@pytest.mark.parametrize("form", ["checkpoint", "pt", "safetensors"])
def test_weights_stay_in_their_file(tmp_path, form):
    source, file = written(tmp_path, form, Mixed())
    state = {name: value.clone() for name, value in torch.load(saved(tmp_path / "other", Mixed()) / "model.pt").items()}
    model = loaded(source, "Mixed")
    assert form == "safetensors" or all(in_file(model, file))  # that aligns tensors otherwise
    assert all(one.data_ptr() % 64 == 0 for one in saved_tensors(model))
    assert model.second.weight is model.first.weight
    assert not model.training
    own = model.state_dict()
    expected = built(Mixed, own)
    assert torch.equal(model(torch.ones(2, 3, 8, 8)), expected(torch.ones(2, 3, 8, 8)))
    assert all(torch.equal(getattr(model, name), getattr(expected, name)) for name in ("noise", "order", "scale"))
    before = file.read_bytes()
    model.load_state_dict(state)  # written to memory of this process
    assert file.read_bytes() == before


@pytest.mark.parametrize(("name", "factory"), [("copies", copies), ("Shares", Shares)])
def test_a_model_that_cannot_be_mapped_is_built_whole(tmp_path, name, factory):
    step = saved(tmp_path, factory())
    model = loaded(step, name)
    assert not any(in_file(model, step / "model.pt"))
    expected = built(factory, torch.load(step / "model.pt"))
    assert torch.equal(model(torch.ones(2, 3, 8, 8)), expected(torch.ones(2, 3, 8, 8)))


def test_weights_of_a_recurrent_layer_are_those_that_it_computes_with(tmp_path):
    step = saved(tmp_path, recurrent())
    model = loaded(step, "recurrent")
    expected = built(recurrent, torch.load(step / "model.pt"))
    assert torch.equal(model.first(torch.ones(2, 64))[0], expected.first(torch.ones(2, 64))[0])


def test_another_layout_and_another_dtype_are_copied(tmp_path):
    model = Mixed()
    for number, (layout, wanted) in enumerate(((False, False), (False, True), (True, False), (True, True))):
        model.to(memory_format=torch.channels_last if layout else torch.contiguous_format)
        step = saved(tmp_path / str(number), model)
        found = loaded(step, "Mixed", channels_last=wanted)
        assert in_file(found, step / "model.pt").count(False) == (layout != wanted)
        expected = Mixed().to(memory_format=torch.channels_last if wanted else torch.contiguous_format)
        assert found.conv.weight.stride() == expected.conv.weight.stride()
        assert torch.equal(found.conv.weight, model.conv.weight)
    torch.save(model.half().state_dict(), tmp_path / "half.pt")
    found = loaded(tmp_path / "half.pt", "Mixed")
    assert found.head.weight.dtype == torch.float32
    assert torch.equal(found.head.weight, model.head.weight.float())


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
    with (step / "model.pt").open("r+b") as stream:
        stream.truncate(20_000)
    with pytest.raises(CheckpointError, match="is damaged"):
        loaded(step, "Mixed")
