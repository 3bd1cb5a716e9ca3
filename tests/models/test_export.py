"""Exported files compute what the model computes, for batches of any size, without hybridpar; else there is no file."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch import nn

from hybridpar.errors import ExportError, UsageError
from hybridpar.models import export
from hybridpar.models.export import export_model
from tests.small_nets import plain

WITHOUT_ONNX = any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime"))
NAMES = {"torch-export": "net.pt2", "onnx": "net.onnx"}
FORMATS = [
    "torch-export",
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
    assert [file.name for file in tmp_path.iterdir()] == [NAMES[form]]
    assert (tmp_path / NAMES[form]).stat().st_size > 8000


@pytest.mark.parametrize("form", FORMATS)
def test_scores_among_other_outputs_are_what_is_exported(tmp_path, form):
    export_model(Named().eval(), torch.randn(3, 3, 8, 8), form, tmp_path / NAMES[form])


def test_files_run_in_a_process_without_hybridpar(tmp_path):
    net, images = trained_net(), torch.randn(3, 3, 8, 8)
    export_model(net, images, "torch-export", tmp_path / "net.pt2", facts={"classes": ["a", "b"]})
    torch.save({"images": images, "scores": net(images).detach()}, tmp_path / "expected.pt")
    program = """
import json, sys
sys.modules["hybridpar"] = None  # whatever imports it fails
import torch
expected = torch.load("expected.pt")
told = {"hybridpar.json": ""}
program = torch.export.load("net.pt2", extra_files=told).module()
with torch.no_grad():
    torch.testing.assert_close(program(expected["images"]), expected["scores"], rtol=1e-4, atol=1e-5)
    assert program(expected["images"][:1]).shape == (1, 10)
assert json.loads(told["hybridpar.json"]) == {"classes": ["a", "b"]}
assert [name for name in sys.modules if name.startswith("hybridpar.")] == []
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def test_a_model_for_one_size_of_batch_is_refused(tmp_path):
    with pytest.raises(ExportError, match="cannot be written as"):
        export_model(OneSize(), torch.rand(4, 3, 8, 8), "torch-export", tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bias", [1.0, float("nan")])
def test_a_file_that_computes_something_else_is_not_kept(tmp_path, monkeypatch, bias):
    other = trained_net()
    nn.init.constant_(other.head.bias, bias)
    write = export._write_program
    monkeypatch.setattr(export, "_write_program", lambda model, *rest: write(other, *rest))
    (tmp_path / "net.pt2").write_text("the former file")
    with pytest.raises(ExportError, match="differs from the model") as caught:
        export_model(trained_net(), torch.randn(3, 3, 8, 8), "torch-export", tmp_path / "net.pt2")
    assert caught.value.exit_code == 1
    assert [file.read_text() for file in tmp_path.iterdir()] == ["the former file"]


def test_a_format_whose_packages_are_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"hybridpar\[onnx\]"):
        export_model(trained_net(), torch.rand(4, 3, 8, 8), "onnx", tmp_path / "net.onnx")
