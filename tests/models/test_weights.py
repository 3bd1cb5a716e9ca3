"""Weights from files, checkpoints and caches: what is taken, what stays new, and what is refused."""

from __future__ import annotations

import argparse
import pickle
import urllib.error

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hybridpar.comm.world import World
from hybridpar.errors import CheckpointError, UsageError
from hybridpar.models import build_model
from hybridpar.models.deferred import DeferredModel, is_deferred
from hybridpar.models.weights import load_weights
from hybridpar.train.checkpoint import CheckpointData, save_checkpoint
from tests.small_nets import plain, wide


def equal(model: nn.Module, state: dict[str, torch.Tensor], *, but: tuple[str, ...] = ()) -> bool:
    own = model.state_dict()
    return all(torch.equal(own[name], state[name]) for name in own if not name.startswith(but or "-"))


@pytest.fixture
def source():
    torch.manual_seed(3)
    return plain().state_dict()


FORMS = {
    "state.pt": lambda state: state,
    "nested.pth": lambda state: {"state_dict": state, "epoch": 3, "args": argparse.Namespace(lr=0.1)},
    "averaged.pt": lambda state: {"model": {key: value + 1 for key, value in state.items()}, "model_ema": state},
    "wrapped.pt": lambda state: {f"module.{key}": value for key, value in state.items()},
    "lightning.ckpt": lambda state: {"state_dict": {f"model.{key}": value for key, value in state.items()}},
    "state.safetensors": None,
}


def write(file, state):
    form = FORMS[file.name]
    if form is None:
        save_file({key: value.contiguous() for key, value in state.items()}, file)
    else:
        torch.save(form(state), file)


@pytest.mark.parametrize("name", FORMS)
def test_files_of_all_forms_are_read(tmp_path, source, name):
    write(tmp_path / name, source)
    torch.manual_seed(4)
    model = plain()
    before = torch.get_rng_state()
    report = load_weights(model, tmp_path / name)
    assert equal(model, source)
    assert report.taken == report.total == len(source)
    assert (report.new, report.left_out) == ((), ())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_model_may_have_a_part_that_is_called_as_wrappers_call_it(tmp_path, source, wrapper):
    model = nn.ModuleDict({"module": plain()})
    torch.save({f"{wrapper}module.{key}": value for key, value in source.items()}, tmp_path / "w.pt")
    assert load_weights(model, tmp_path / "w.pt").taken == len(source)
    assert equal(model["module"], source)


def test_names_of_several_wrappers_are_taken_off_one_by_one(tmp_path, source):
    averaged = {f"module._orig_mod.{key}": value for key, value in source.items()}  # AveragedModel of a compiled one
    torch.save({"n_averaged": torch.tensor(3), **averaged}, tmp_path / "w.pt")
    model = plain()
    report = load_weights(model, tmp_path / "w.pt")
    assert equal(model, source)
    assert (report.taken, report.left_out) == (len(source), ("n_averaged",))


@pytest.mark.parametrize("prefix", ["model.", "module.", ""])
def test_positions_of_another_image_size_are_converted_whatever_is_in_front_of_the_names(tmp_path, prefix):
    small = {"embed_dim": 12, "depth": 1, "num_heads": 1, "patch_size": 8}
    there, here = (build_model("timm/vit_tiny_patch16_224", 4, args={"img_size": size, **small}) for size in (32, 48))
    state = there.state_dict()
    torch.save({f"{prefix}{key}": value for key, value in state.items()}, tmp_path / "w.pt")
    assert load_weights(here, tmp_path / "w.pt").taken == len(state)
    assert equal(here, state, but=("pos_embed",))


def test_a_model_without_memory_takes_what_it_is_filled_with(tmp_path, source):
    write(tmp_path / "state.pt", source)
    model = DeferredModel(plain)
    assert str(load_weights(model, tmp_path / "state.pt")) == str(load_weights(plain(), tmp_path / "state.pt"))
    assert is_deferred(model.module)
    own = list(source)[:3]
    model.fill(own)
    held = {key: value for key, value in model.module.state_dict().items() if not value.is_meta}
    (tmp_path / "state.pt").write_bytes(b"")  # nothing of it is mapped any more
    assert list(held) == own
    assert all(torch.equal(held[key], source[key]) for key in own)


@pytest.mark.parametrize("change", [{"more": torch.ones(1)}, {}])
def test_tensors_that_are_missing_are_named_as_for_a_whole_model(tmp_path, source, change):
    state = {key: value for key, value in source.items() if "1" not in key} | change
    torch.save(state, tmp_path / "w.pt")
    model, told = DeferredModel(plain), []
    for one in (model, plain()):
        with pytest.raises(UsageError) as caught:
            load_weights(one, tmp_path / "w.pt", name="small")
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "not in them: " in told[0]
    assert all(name in told[0] for name in change)
    model.fill(source)
    assert not is_deferred(model.module)


def test_the_head_is_new_where_the_classes_differ(tmp_path, source):
    torch.save(source | {"more.weight": torch.zeros(2)}, tmp_path / "w.pt")
    model = plain(num_classes=4)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = load_weights(model, tmp_path / "w.pt")
    assert report.classes == (10, 4)
    assert report.new == ("head.weight", "head.bias")
    assert report.left_out == ("more.weight",)
    assert equal(model, source, but=("head.",))
    assert torch.equal(model.state_dict()["head.weight"], fresh["head.weight"])
    assert "new: head.weight, head.bias (10 -> 4 classes); left out: more.weight" in str(report)


def test_weights_of_another_architecture_change_nothing(tmp_path, source):
    torch.save(source, tmp_path / "w.pt")
    model = wide()
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"not of SmallNet: \d+ of the model's 15 tensors fit"):
        load_weights(model, tmp_path / "w.pt")
    assert equal(model, fresh)


class Code:
    def __reduce__(self):
        return print, ("run",)


def test_files_that_cannot_be_used_are_one_error_each(tmp_path, source, capsys):
    torch.save(source, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"weights\.pt"):
        load_weights(plain(), tmp_path / "weigths.pt")
    with pytest.raises(UsageError, match="No file of weights is in"):
        load_weights(plain(), tmp_path / "nowhere" / "weights.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "weights.pt").read_bytes()[:200])
    (tmp_path / "code.pt").write_bytes(pickle.dumps({"state_dict": Code()}))
    (tmp_path / "numbers.pt").write_bytes(b"")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10")
    (tmp_path / "empty").mkdir()
    for name in ("cut.pt", "code.pt", "numbers.pt", "cut.safetensors", "empty"):
        with pytest.raises((UsageError, CheckpointError), match=name):
            load_weights(plain(), tmp_path / name)
    assert "run" not in capsys.readouterr().out


def test_the_newest_checkpoint_of_a_run_is_read_as_its_manifest_says(tmp_path, source):
    def save(step, state):
        return save_checkpoint(tmp_path / "checkpoints", CheckpointData(step, "f" * 16, state, {}, None), World())

    save(2, plain().state_dict())
    newest = save(10, source)
    newest = newest.rename(newest.with_name("step-10.replaced"))  # as a crash between two renames leaves it
    model = plain()
    load_weights(model, tmp_path)
    assert equal(model, source)

    file = newest / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="its content is not what the manifest says"):
        load_weights(plain(), tmp_path)


def test_published_weights_of_torchvision_come_from_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    torch.manual_seed(0)
    state = build_model("squeezenet1_1", 1000).state_dict()
    (tmp_path / "checkpoints").mkdir()
    torch.save(state, tmp_path / "checkpoints" / "squeezenet1_1-b8a52dc0.pth")
    model = build_model("squeezenet1_1", 7)
    report = load_weights(model, "default", name="squeezenet1_1")
    assert report.source == "SqueezeNet1_1_Weights.IMAGENET1K_V1"
    assert report.classes == (1000, 7)
    assert equal(model, state, but=("classifier.",))

    def offline(*arguments: object, **options: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(UsageError, match=r"cannot be had: URLError.*no network"):
        load_weights(build_model("resnet18", 10), "IMAGENET1K_V1", name="resnet18")
    with pytest.raises(UsageError, match="no such weights of resnet18") as caught:
        load_weights(build_model("resnet18", 10), "IMAGENET1K_V7", name="resnet18")
    assert "IMAGENET1K_V1" in str(caught.value)


@pytest.mark.parametrize("weights", ["default", "hf-hub:nobody/nothing"])
def test_weights_that_are_not_in_the_cache_of_the_hub_are_one_error(tmp_path, monkeypatch, weights):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=f"the weights {weights} cannot be had: ") as caught:
        load_weights(build_model("timm/resnet10t", 10), weights, name="timm/resnet10t")
    assert "--weights FILE" in caught.value.fix
