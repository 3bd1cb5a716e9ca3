"""A user's own models, named as `package.module:factory`."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from hybridpar.errors import UsageError, shortened, user_error
from hybridpar.models.arguments import not_taken, refused_argument
from hybridpar.registry import find_factory, no_factory, search_here, user_module

if TYPE_CHECKING:
    from torch import nn


#: What a module can get names by that do not stand in it.
_DYNAMIC = ("import *", "__getattr__", "globals(", "vars(", "setattr(", "exec(")


def check_user_name(name: str) -> None:
    """Refuse the name of a model whose package or factory is not there; nothing is imported."""
    module_name, _, factory = name.partition(":")
    search_here()
    package, *inner = module_name.split(".")
    if package in sys.modules:  # it is imported, or a part of this program
        return
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None:
        user_module(module_name, name, "model")  # raises
        return
    paths = [Path(root, *inner) for root in spec.submodule_search_locations or ()] if inner else []
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    file = next(iter(files), Path() if inner else Path(spec.origin or ""))
    source = file.read_text(encoding="utf-8", errors="replace") if file.suffix == ".py" else ""
    if source and factory not in source and not any(word in source for word in _DYNAMIC):
        raise no_factory(module_name, factory, re.findall(r"^(?:def|class) ([A-Za-z]\w*)", source, re.MULTILINE))


def build_user_model(name: str, classes: int, args: Mapping[str, object]) -> nn.Module:
    """Call a user's factory."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    factory = find_factory(name, "model")
    model = _call_factory(factory, name, classes, args)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{name} returned {article(model)}",
            "A factory returns a torch.nn.Module.",
            "Return the model from it.",
        )
    lazy = [path for path, one in chain(model.named_parameters(), model.named_buffers()) if is_lazy(one)]
    if lazy:
        raise UsageError(
            f"{name} has parameters whose shape is not known yet, such as {lazy[0]}",
            "Lazy modules get their shapes in their first forward pass; training needs them before.",
            "Call the model once in the factory, on an example of its inputs: model(torch.zeros(1, 3, 32, 32)).",
        )
    return model


def _call_factory(factory: Callable[..., object], name: str, classes: int, args: Mapping[str, object]) -> object:
    """Call a factory, with the number of classes where it takes that by name."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some functions written in C have none
        signature = inspect.Signature()
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    for key in args:
        if not takes_any and key not in signature.parameters:
            raise not_taken(name, key, [one for one in signature.parameters if one != "num_classes"])
    counted = takes_any or "num_classes" in signature.parameters
    options: dict[str, object] = {"num_classes": classes, **args} if counted else dict(args)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UsageError(
            f"cannot call {name}{shortened(str(signature), 200)}: {error}",
            "A factory is called with num_classes= where it takes that argument or **kwargs, and with what --model-arg "
            "gives.",
            "Give its other arguments defaults, or values: --model-arg key=value.",
        ) from error
    try:
        return factory(**options)
    except (Exception, SystemExit) as error:
        if isinstance(error, Exception) and (refused := refused_argument(error, args)) is not None:
            raise not_taken(name, refused) from error
        # Handed on through **kwargs to something that does not take it: the outputs are counted before training.
        if takes_any and isinstance(error, TypeError) and "unexpected keyword argument 'num_classes'" in str(error):
            try:
                return factory(**args)
            except (Exception, SystemExit) as second:
                error = second
        raise user_error(f"the factory {name} failed", error) from error


def article(value: object) -> str:
    """The type of a value with its article: `a dict`, `an int`.

    Args:
        value: Any value.

    Returns:
        The text.
    """
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"
