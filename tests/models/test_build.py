import sys

import pytest
import torch
from torch import nn

from hybridpar.errors import UsageError
from hybridpar.models import build_model, model_fingerprint, parameter_count, parse_arguments


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module of the user's in the current directory."""
    source = """
import torch

def with_classes(num_classes):
    return torch.nn.Linear(4, num_classes)

def without():
    return torch.nn.Linear(4, 2)

def needs_width(width, num_classes=2):
    return torch.nn.Linear(width, num_classes)

def no_module():
    return "model"

class Net(torch.nn.Linear):
    def __init__(self, num_classes=5):
        super().__init__(4, num_classes)

def fails():
    return torch.nn.Linear(4, 1 // 0)

def through_kwargs(pretrained=False, **kwargs):
    return with_classes(**kwargs)

def lazy():
    return torch.nn.LazyLinear(3)

def leaves():
    raise SystemExit(3)
"""
    (tmp_path / "user_nets.py").write_text(source)
    (tmp_path / "broken_nets.py").write_text("import a_module_that_is_not_installed\n")
    (tmp_path / "typing_nets.py").write_text("def net(:\n")
    (tmp_path / "script_nets.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("user_nets", "broken_nets", "typing_nets", "script_nets"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "name", ["squeezenet1_1", "googlenet", "densenet121", "inception_v3", "vit_b_16", "timm/test_vit"]
)
def test_a_model_has_the_classes_asked_for(name):
    side = {"timm/test_vit": 160, "inception_v3": 299}.get(name, 224)
    with torch.device("meta"):
        assert build_model(name, 7)(torch.zeros(2, 3, side, side)).shape == (2, 7)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize(
    ("name", "side", "args"),
    [
        ("resnet18", 64, {}),
        ("resnet18", 32, {"stem": "cifar"}),
        ("mobilenet_v2", 64, {}),
        ("vit_b_16", 224, {}),
        ("timm/resnet10t", 64, {}),
    ],
)
def test_models_take_images_of_other_channels(name, side, args, channels):
    with torch.device("meta"):
        model = build_model(name, 5, args=args, channels=channels).eval()
        assert model(torch.zeros(2, channels, side, side)).shape == (2, 5)


def test_cifar_stem_keeps_the_resolution_of_small_images():
    shapes = {}
    for stem in ("imagenet", "cifar"):
        model = build_model("resnet18", 10, args={"stem": stem})
        model.layer1.register_forward_hook(
            lambda module, inputs, output, stem=stem: shapes.__setitem__(stem, output.shape[-2:])
        )
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert shapes == {"imagenet": (8, 8), "cifar": (32, 32)}


@pytest.mark.parametrize(
    ("name", "options", "kind", "rates"),
    [
        ("squeezenet1_1", {"drop_rate": 0.3}, "Dropout", ("p", 0.3)),
        ("efficientnet_b0", {"drop_path_rate": 0.32}, "StochasticDepth", ("p", 0.3)),  # of 16 blocks the last is 15/16
        ("resnet18", {"args": {"norm_layer": nn.InstanceNorm2d}}, "InstanceNorm2d", ("eps", 1e-5)),
        ("timm/test_vit", {"drop_path_rate": 0.2}, "DropPath", ("drop_prob", 0.2)),
    ],
)
def test_arguments_reach_a_model_of_a_library(name, options, kind, rates):
    with torch.device("meta"):
        model = build_model(name, 7, **options)
    values = [getattr(one, rates[0]) for one in model.modules() if type(one).__name__ == kind]
    assert max(values) == pytest.approx(rates[1])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet18", {"drop_rate": 0.1}, "resnet18 takes no argument 'drop_rate'"),
        ("convnext_tiny", {"args": {"zero": 1}}, "convnext_tiny takes no argument 'zero'"),
        ("mobilenet_v2", {"args": {"width_mult": "a"}}, "building mobilenet_v2 with width_mult='a' failed: TypeError"),
        ("swin_t", {"drop_path_rate": 0.1}, "stochastic_depth_prob"),
        ("resnet18", {"args": {"drop_rate": 0.2}, "drop_rate": 0.1}, "--drop with --model-arg drop_rate"),
        ("user_nets:needs_width", {"args": {"width": 3}, "drop_rate": 0.1}, "argument 'drop_rate'"),
        ("timm/resnet10", {}, "timm has no model 'resnet10'\nDid you mean timm/resnet10t"),
        ("timm/test_resnet.r161_in1k", {}, "timm's test_resnet has no weights 'r161_in1k'\nDid you mean r160_in1k?"),
        ("timm/vgg11", {"drop_path_rate": 0.1}, "argument 'drop_path_rate'"),
        ("timm/test_vit", {"args": {"patch": 8}}, "argument 'patch'"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(user_module, name, options, said):
    with torch.device("meta"), pytest.raises(UsageError) as caught:
        build_model(name, 7, **options)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_model_of_the_users_own(user_module):
    for name, classes in (("with_classes", 3), ("without", 2), ("Net", 3), ("through_kwargs", 3)):
        assert build_model(f"user_nets:{name}", 3).out_features == classes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken_nets:net", "importing 'broken_nets' for the model 'broken_nets:net' failed: ModuleNotFoundError"),
        ("user_nets.deeper:net", "cannot import 'user_nets.deeper'"),
        ("user_nets:lazy", "user_nets:lazy has parameters whose shape is not known yet, such as weight"),
        (":net", "cannot import ''"),
        ("user_nets:", "has no factory ''"),
        ("user_nets:no_module", "returned a str"),
        ("user_nets:needs_width", "missing 1 required positional argument: 'width'"),
        ("broken_nets:net", 'broken_nets.py", line 1'),
        ("script_nets:net", 'script_nets.py", line 2'),
        ("user_nets:fails", 'user_nets.py", line 21, in fails'),
        ("user_nets:leaves", "SystemExit: 3"),
        ("typing_nets:net", 'typing_nets.py", line 1'),
    ],
)
def test_a_model_that_cannot_be_made_says_why_without_a_traceback(user_module, name, said):
    with pytest.raises(UsageError) as caught:
        build_model(name, 3)
    assert said in str(caught.value)
    assert "importlib" not in caught.value.why
    assert caught.value.fix or caught.value.why


def small_net(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width, 2))


def test_fingerprint_ignores_values():
    model = small_net()
    before = model_fingerprint(model)
    model(torch.randn(2, 3, 3, 3)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert model_fingerprint(model) == before == model_fingerprint(small_net())


def test_fingerprint_never_changes():
    # Plans, profiles and checkpoints on disk are keyed by it.
    assert model_fingerprint(nn.Linear(2, 3)) == "b155ff578f8f7883"


def test_fingerprint_tells_architectures_apart():
    models = [
        small_net(),
        small_net(width=5),
        small_net().half(),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(4, 2)),
        nn.ModuleDict({"renamed": small_net()}),
        build_model("resnet18", 10),
        build_model("resnet18", 10, args={"stem": "cifar"}),
        build_model("resnet18", 11),
    ]
    assert len({model_fingerprint(model) for model in models}) == len(models)


def test_parameter_count_counts_a_shared_parameter_once():
    one, two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    two.weight = one.weight
    assert parameter_count(nn.Sequential(one, two)) == 16 + 4
    assert parameter_count(build_model("resnet18", 1000)) == 11_689_512


def test_without_timm_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # importing it fails
    with pytest.raises(UsageError, match=r"pip install 'hybridpar\[timm\]'"):
        build_model("timm/resnet18", 7)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("true", True),
        ("True", True),
        ("None", None),
        ("(1, 2)", (1, 2)),
        ("[1, None]", [1, None]),
        ('"avg"', "avg"),
        ("a=b", "a=b"),
        ("1\nx = 2", "1\nx = 2"),
        ("", ""),
    ],
)
def test_values_are_toml_or_python_or_text(text, value):
    parsed = parse_arguments([f"key={text}"])["key"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("texts", [["drop"], ["=1"], ["a b=1"], ["key=1", "key=2"]])
def test_what_is_no_argument_is_refused(texts):
    with pytest.raises(UsageError, match="--model-arg"):
        parse_arguments(texts)
