import importlib.util
import sys

import pytest
import timm
import torch

from hybridpar.errors import UsageError
from hybridpar.models import build_model, check_model_name
from hybridpar.models.timm_models import timm_names


def test_names_are_read_from_the_source():
    assert timm_names() == sorted(timm.list_models(include_tags=False))


def test_a_name_is_checked_without_an_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # importing it fails
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: timm.__spec__)
    check_model_name("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k")


def test_a_model_has_the_classes_and_arguments_asked_for():
    model = build_model("timm/test_vit", 7, args={"img_size": 32}, drop_path_rate=0.2)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("timm/resnet10", {}, "timm has no model 'resnet10'\nDid you mean timm/resnet10t"),
        ("timm/test_resnet.r161_in1k", {}, "timm's test_resnet has no weights 'r161_in1k'\nDid you mean r160_in1k?"),
        ("timm/vgg11", {"drop_path_rate": 0.1}, "--drop path with timm/vgg11: this model has no rate"),
        ("timm/test_vit", {"args": {"patch": 8}}, "this model has no argument 'patch'"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(name, options, said):
    with pytest.raises(UsageError) as caught:
        build_model(name, 7, **options)
    assert said in str(caught.value)


def test_without_timm_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'hybridpar\[timm\]'"):
        check_model_name("timm/resnet18")
