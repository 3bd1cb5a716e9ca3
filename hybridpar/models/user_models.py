"""A user's own models, named as `package.module:factory`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hybridpar.errors import UsageError, nearest, shortened, user_error
from hybridpar.models.arguments import not_taken, refused_argument

if TYPE_CHECKING:
    from torch import nn


#: What a module can get names by that do not stand in it.
_DYNAMIC = ("import *", "__getattr__", "globals(", "vars(", "setattr(", "exec(")


def check_user_name(name: str) -> None:
    """Refuse the name of a model whose package or factory is not there; nothing is imported."""
    module_name, _, factory = name.partition(":")
    _search_here()
    package, *inner = module_name.split(".")
    if package in sys.modules:  # it is imported, or a part of this program
        return
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None:
        _user_module(module_name, name)  # raises
        return
    paths = [Path(root, *inner) for root in spec.submodule_search_locations or ()] if inner else []
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    file = next(iter(files), Path() if inner else Path(spec.origin or ""))
    source = file.read_text(encoding="utf-8", errors="replace") if file.suffix == ".py" else ""
    if source and factory not in source and not any(word in source for word in _DYNAMIC):
        raise _no_factory(module_name, factory, re.findall(r"^(?:def|class) ([A-Za-z]\w*)", source, re.MULTILINE))


def build_user_model(name: str, classes: int, args: Mapping[str, object]) -> nn.Module:
    """Call a user's factory."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    module_name, _, factory_name = name.partition(":")
    module = _user_module(module_name, name)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise _no_factory(module_name, factory_name, callables)
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


def _no_factory(module_name: str, factory: str, callables: Sequence[str]) -> UsageError:
    return UsageError(
        f"module {module_name!r} has no factory {factory!r}",
        nearest(factory, callables) if callables else "The module defines nothing that can be called.",
    )


def _user_module(module_name: str, name: str) -> ModuleType:
    """Import the module that the name of a user's model begins with; the current directory is searched, too."""
    _search_here()
    try:
        if not all(part.isidentifier() for part in module_name.split(".")):
            raise ModuleNotFoundError(f"{module_name!r} is no absolute module name", name=module_name)
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that reads its command line when it is imported exits
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise user_error(f"importing {module_name!r} for the model {name!r} failed", error) from error
        raise UsageError(
            f"cannot import {module_name!r} for the model {name!r}: {error}",
            "The part before the colon is a module that Python finds in the current directory or the environment.",
            "Check the spelling, or run from the directory that holds it.",
        ) from error


def _search_here() -> None:
    """Have Python find modules in the current directory, too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


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
