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
from tests.small_nets import plain


def saved(directory: Path, model: nn.Module) -> Path:
    data = CheckpointData(3, model_fingerprint(model), model.state_dict(), {}, None)
    return save_checkpoint(directory, data, World())


def loaded(source: Path, *, channels_last: bool = False) -> nn.Module:
    options = TrainedOptions(model="tests.small_nets:plain", data="synthetic")
    return load_trained(find_trained(str(source), options), 10, channels_last=channels_last)


def written(tmp_path: Path, form: str, state: dict[str, Tensor]) -> Path:
    """A file of weights."""
    file = tmp_path / f"weights.{form}"
    torch.save(state, file) if form == "pt" else save_file(state, file)
    return file


@pytest.mark.parametrize("form", ["checkpoint", "pt", "safetensors"])
def test_a_trained_model_computes_what_it_computed_and_its_file_stays_as_it_is(tmp_path, form):
    trained, images = plain(), torch.ones(2, 3, 8, 8)
    is_file = form != "checkpoint"
    source = written(tmp_path, form, trained.state_dict()) if is_file else saved(tmp_path, trained)
    file = source if is_file else source / "model.safetensors"
    before, model = file.read_bytes(), loaded(source)
    assert not model.training
    assert torch.equal(model(images), trained.eval()(images))
    model.load_state_dict(plain().state_dict())  # written to memory of this process
    assert file.read_bytes() == before


def test_the_layout_is_that_which_is_wanted_and_the_dtype_that_of_the_model(tmp_path):
    model = plain()
    for number, (layout, wanted) in enumerate(((False, False), (False, True), (True, False), (True, True))):
        model.to(memory_format=torch.channels_last if layout else torch.contiguous_format)
        reopened = loaded(saved(tmp_path / str(number), model), channels_last=wanted)
        expected = plain().to(memory_format=torch.channels_last if wanted else torch.contiguous_format)
        assert reopened.body[0].weight.stride() == expected.body[0].weight.stride()
        assert torch.equal(reopened.body[0].weight, model.body[0].weight)
    reopened = loaded(written(tmp_path, "pt", model.half().state_dict()))
    assert torch.equal(reopened.head.weight, model.head.weight.float())


def test_files_that_do_not_fit_are_one_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not of .* Missing key.* Unexpected key"):
        loaded(saved(tmp_path / "other", nn.Sequential(nn.Linear(3, 3))))
    state = plain().state_dict()
    del state["head.bias"]
    with pytest.raises(UsageError, match="must have all of its weights"):
        loaded(written(tmp_path, "pt", state))
    step = saved(tmp_path / "cut", plain())
    with (step / "model.safetensors").open("r+b") as stream:
        stream.truncate(2_000)
    with pytest.raises(CheckpointError, match="is damaged"):
        loaded(step)
