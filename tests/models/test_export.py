"""Exported files compute what the model computes, for batches of any size, without hybridpar; else there is no file."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from hybridpar.errors import ExportError, UsageError
from hybridpar.models import export
from hybridpar.models.export import check_format, export_model
from tests.small_nets import plain

WITHOUT_ONNX = any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime"))
NAMES = {"torch-export": "net.pt2", "onnx": "net.onnx", "safetensors": "net.safetensors"}
FORMATS = [
    *("torch-export", "safetensors"),
    pytest.param("onnx", marks=pytest.mark.skipif(WITHOUT_ONNX, reason="needs onnx, onnxscript and onnxruntime")),
]


def trained_net():
    """A small net whose BatchNorm layers have seen something."""
    net = plain()
    with torch.no_grad():
        for _ in range(3):
            net(2 * torch.randn(16, 3, 8, 8) + 1)
    return net.eval()


class Named(nn.Module):
    """Returns its scores among other outputs."""

    def __init__(self):
        super().__init__()
        self.net = trained_net()

    def forward(self, images):
        return {"features": images, "logits": self.net(images)}


class OneSize(nn.Module):
    """A model for batches of as many images as it is traced with."""

    def forward(self, images):
        return images.reshape(len(images), -1)[:, :4] + torch.arange(float(int(images.shape[0]))).sum()


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_computes_what_the_model_computes(tmp_path, form):
    net, images = trained_net(), torch.randn(5, 3, 8, 8)
    done = export_model(net, images, form, tmp_path / NAMES[form])
    assert done.batches == (5, 4, 1)
    assert done.relative <= 1e-5
    assert done.scale == pytest.approx(net(images).abs().max().item())
    assert [file.name for file in tmp_path.iterdir()] == [NAMES[form]]
    assert done.bytes == done.file.stat().st_size > 8000


@pytest.mark.parametrize("form", FORMATS)
def test_scores_among_other_outputs_are_what_is_exported(tmp_path, form):
    export_model(Named().eval(), torch.randn(3, 3, 8, 8), form, tmp_path / NAMES[form])


def test_files_run_in_a_process_without_hybridpar(tmp_path):
    net, images = trained_net(), torch.randn(3, 3, 8, 8)
    for form in ("torch-export", "safetensors"):
        export_model(net, images, form, tmp_path / NAMES[form], facts={"classes": ["a", "b"]})
    torch.save({"images": images, "scores": net(images).detach()}, tmp_path / "expected.pt")
    program = """
import json, sys
sys.modules["hybridpar"] = None  # whatever imports it fails
import torch
from safetensors import safe_open
expected = torch.load("expected.pt")
told = {"hybridpar.json": ""}
program = torch.export.load("net.pt2", extra_files=told).module()
with torch.no_grad():
    torch.testing.assert_close(program(expected["images"]), expected["scores"], rtol=1e-4, atol=1e-5)
    assert program(expected["images"][:1]).shape == (1, 10)
weights = safe_open("net.safetensors", "pt")
assert json.loads(weights.metadata()["hybridpar"]) == json.loads(told["hybridpar.json"]) == {"classes": ["a", "b"]}
assert [name for name in sys.modules if name.startswith("hybridpar.")] == []
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def test_a_file_that_computes_something_else_is_not_kept(tmp_path, monkeypatch):
    other = trained_net()
    nn.init.normal_(other.head.bias)
    write = export._WRITERS["torch-export"]
    monkeypatch.setitem(export._WRITERS, "torch-export", lambda model, *rest: write(other, *rest))
    (tmp_path / "net.pt2").write_text("the former file")
    with pytest.raises(ExportError, match="differs from the model") as caught:
        export_model(trained_net(), torch.randn(3, 3, 8, 8), "torch-export", tmp_path / "net.pt2")
    assert caught.value.exit_code == 1
    assert [file.read_text() for file in tmp_path.iterdir()] == ["the former file"]


def test_scores_that_are_no_numbers_are_no_match(tmp_path):
    net = trained_net()
    nn.init.constant_(net.head.bias, float("nan"))
    with pytest.raises(ExportError, match="differs from the model by nan"):
        export_model(net, torch.randn(3, 3, 8, 8), "torch-export", tmp_path / "net.pt2")


def test_a_model_for_one_size_of_batch_is_refused(tmp_path):
    with pytest.raises(ExportError, match="cannot be written as"):
        export_model(OneSize(), torch.rand(4, 3, 8, 8), "torch-export", tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


def test_a_format_whose_packages_are_missing_names_the_extra(monkeypatch):
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"hybridpar\[onnx\]") as caught:
        check_format("onnx")
    assert "onnx, onnxscript, onnxruntime, which are not installed" in caught.value.what
    check_format("torch-export")


def test_weights_alone_are_those_of_the_model(tmp_path):
    from safetensors.torch import load_file

    net = trained_net()
    net.tied = net.head  # the same tensors under another name
    export_model(net, torch.rand(2, 3, 8, 8), "safetensors", tmp_path / "net.safetensors", facts={"step": 3})
    state = load_file(tmp_path / "net.safetensors")
    assert state.keys() == net.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    header = (tmp_path / "net.safetensors").read_bytes()[8:]
    assert json.loads(json.JSONDecoder().raw_decode(header.decode("latin-1"))[0]["__metadata__"]["hybridpar"]) == {
        "step": 3
    }


def test_buffers_that_are_not_saved_are_those_of_the_models_code(tmp_path):
    net = trained_net()
    net.register_buffer("gain", torch.tensor(3.0), persistent=False)
    net.register_forward_hook(lambda module, _, outputs: outputs * module.gain)
    export_model(net, torch.rand(2, 3, 8, 8), "safetensors", tmp_path / "net.safetensors")
