"""Models of timm, by name: `timm/NAME` or `timm/NAME.TAG`, where a tag says which weights are meant."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import UsageError, nearest, not_installed, shortened
from hybridpar.models.arguments import not_built, not_taken, refused_argument
from hybridpar.models.weight_files import HUB

if TYPE_CHECKING:
    from torch import nn

#: What names of timm's models begin with.
PREFIX = "timm/"

_REGISTERED = re.compile(r"^@register_model\s+def (\w+)\(", re.MULTILINE)


def timm_names() -> list[str]:
    """Names of timm's models without tags, read from its source files: importing timm takes seconds."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise not_installed("models of timm need timm", "timm")
    folder = Path(spec.origin).parent / "models"
    return sorted({name for path in folder.glob("*.py") for name in _REGISTERED.findall(path.read_text("utf-8"))})


def check_timm_name(name: str) -> None:
    """Refuse a name that timm has no model of; timm is imported only where its source does not name the model."""
    names = timm_names()
    own = name.removeprefix(PREFIX)
    architecture = own.partition(".")[0]
    if own.startswith(HUB) or architecture in names:
        return
    import timm

    if not timm.is_model(architecture):  # former names are in no decorator
        raise UsageError(
            f"timm has no model {shortened(repr(own))}",
            nearest(PREFIX + architecture, [PREFIX + one for one in names]),
            "timm.list_models('*vit*') lists the names that match a pattern.",
        )


def build_timm_model(name: str, classes: int, args: Mapping[str, object]) -> nn.Module:
    """Build a model of timm with fresh weights."""
    return create_timm_model(name, {"num_classes": classes, **args}, pretrained=False)


def create_timm_model(name: str, args: Mapping[str, Any], *, pretrained: bool) -> nn.Module:
    """`timm.create_model`, with what is wrong in the request said as a `UsageError`."""
    check_timm_name(name)
    import timm
    from torch import nn

    own = name.removeprefix(PREFIX)
    if not own.startswith(HUB):
        check_tag(own)
    try:
        model = timm.create_model(own, pretrained=pretrained, **args)
    except Exception as error:
        if (key := refused_argument(error, args)) is not None:
            raise not_taken(name, key) from error
        if pretrained or own.startswith(HUB):
            raise
        raise not_built(name, args, error) from error
    assert isinstance(model, nn.Module)
    return model


def check_tag(name: str) -> None:
    """Refuse a tag that timm does not know."""
    from timm.models import get_arch_pretrained_cfgs

    architecture, _, tag = name.partition(".")
    tags = [one.partition(".")[2] for one in get_arch_pretrained_cfgs(architecture)]
    if tag and tag not in tags:
        known = [one for one in tags if one]
        raise UsageError(
            f"timm's {architecture} has no weights {shortened(repr(tag))}",
            nearest(tag, known) if known else "There are none for this model.",
            f"Name the model alone, {PREFIX}{architecture}, or with a tag that there is.",
        )
