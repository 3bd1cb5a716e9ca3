"""Reads files that may be damaged or hostile, in bounded time and memory.

JSON, TOML and files of `torch.save`. Whatever is wrong with a file is told as one short error of the class that the
caller names; nothing in a file is ever run. Limits are far above what this package writes: bytes of a file, depth of
what is nested in it, digits of an integer.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import stat
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hybridpar.errors import HybridparError, shortened

if TYPE_CHECKING:
    from pydantic import ValidationError
    from torch import Tensor

#: Keys that lead to a tensor in dictionaries, lists and tuples.
TensorPath = tuple[Any, ...]

#: Bytes of a file that is read as a whole, unless a reader says otherwise.
MOST_BYTES = 64 << 20

#: How deep lists and tables may lie in each other.
MOST_DEPTH = 100

#: Integers are below this in size: those of 64 bits, signed or not, are.
_INTEGERS = 10**20

#: Mistakes in a file of which the first is named.
_MOST_PROBLEMS = 10_000

#: Characters of a line of TOML: the parser's time grows with the square of a key's parts.
_MOST_LINE = 4_000


class Unreadable(ValueError):
    """What is wrong with a text or a file, in a few words."""


# ------------------------------------------------------------------------------------------------------- whole files


def read_text(
    path: Path,
    kind: str,
    error: type[HybridparError],
    fix: str = "",
    *,
    why: str = "",
    most: int = MOST_BYTES,
    errors: str = "strict",
) -> str:
    """The text of a file in UTF-8.

    Args:
        path: The file.
        kind: What it is, for the message: "the plan".
        error: The class of what is raised.
        fix: What to do where it cannot be read.
        why: What the file should be.
        most: Bytes that it may have.
        errors: What becomes of bytes that are not UTF-8, as of `bytes.decode`.

    Raises:
        HybridparError: Of the class `error`: there is no such file, or it is too large or no text.
    """
    text: str = _read(path, kind, error, why, fix, most, lambda data: data.decode("utf-8", errors))
    return text


def read_json(
    path: Path, kind: str, error: type[HybridparError], fix: str = "", *, why: str = "", most: int = MOST_BYTES
) -> Any:
    """What a JSON file holds. Errors are those of `read_text`.

    Args:
        path: The file.
        kind: What it is called in messages.
        error: Class of the error that is raised.
        fix: What the user can do.
        why: The rule that is broken.
        most: Bytes that it may have.
    """
    return _read(path, kind, error, why, fix, most, lambda data: parse_json(data.decode()))


def read_toml(path: Path, kind: str, error: type[HybridparError], fix: str = "", *, why: str = "") -> dict[str, Any]:
    """What a TOML file holds. Errors are those of `read_text`.

    Args:
        path: The file.
        kind: What it is called in messages.
        error: Class of the error that is raised.
        fix: What the user can do.
        why: The rule that is broken.
    """
    found: dict[str, Any] = _read(path, kind, error, why, fix, 1 << 20, lambda data: parse_toml(data.decode()))
    return found


def _read(
    path: Path,
    kind: str,
    error: type[HybridparError],
    why: str,
    fix: str,
    most: int,
    parse: Callable[[bytes], Any],
) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise Unreadable(f"it has more than {most:,} bytes")
        return parse(data)
    except (OSError, ValueError) as cause:  # Unreadable among them, and a path with a NUL
        reason = cause.strerror if isinstance(cause, OSError) else None
        if isinstance(cause, UnicodeDecodeError):
            reason = "it is not text in UTF-8"
        raise error(f"cannot read {kind} {shortened(path)}: {reason or cause}", why, fix) from cause


# ------------------------------------------------------------------------------------------------------------- texts


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says.

    Args:
        text: The text, or its bytes in UTF-8.

    Raises:
        Unreadable: It is not JSON, or above the limits.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON: {error.msg}, line {error.lineno}") from error
    except UnicodeDecodeError as error:
        raise Unreadable("it is not text in UTF-8") from error
    except ValueError as error:  # of int()
        raise Unreadable("an integer in it has too many digits") from error
    except RecursionError as error:
        raise Unreadable(_TOO_DEEP) from error
    _check_plain(found)
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text says.

    Args:
        text: The text.

    Raises:
        Unreadable: It is not TOML, or above the limits.
    """
    if max(map(len, text.splitlines()), default=0) > _MOST_LINE:
        raise Unreadable(f"a line has more than {_MOST_LINE:,} characters")
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Unreadable(f"it is not TOML: {shortened(error)}") from error
    except ValueError as error:
        raise Unreadable("a number or a date in it cannot be") from error
    except RecursionError as error:
        raise Unreadable(_TOO_DEEP) from error
    _check_plain(found)
    return found


_TOO_DEEP = f"it is nested more than {MOST_DEPTH} deep"


def _check_plain(found: object) -> None:
    """Check the depth, integers and texts of what a parser returned, in which nothing is in two places."""
    level: list[Any] = [found]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for item in level:
            kind = type(item)  # parsers make no subclasses, and files of metrics have millions of values
            if kind is str:
                if not item.isascii():
                    _check_text(item)
            elif kind is dict:
                inner += item.keys()
                inner += item.values()
            elif kind is list:
                inner += item
            elif kind is int and not -_INTEGERS < item < _INTEGERS:
                raise Unreadable("an integer in it has too many digits")
        if not inner:
            return
        level = inner
    raise Unreadable(_TOO_DEEP)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a pair of surrogates, which can be neither printed nor written
        raise Unreadable("a text in it is no Unicode") from error


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Where and what is the first thing that pydantic found wrong, both short.

    Args:
        error: What pydantic raised.
    """
    count = error.error_count()
    if count > _MOST_PROBLEMS:  # listing them takes long, too
        return "", f"{count:,} values in it are not what they should be"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return shortened(where), shortened(first["msg"].removeprefix("Value error, "))


# --------------------------------------------------------------------------------------------------- files of torch


def read_torch(
    path: Path, keep: Callable[[TensorPath], bool | Tensor] | None = None, *, mapped: bool = False
) -> dict[str, Any]:
    """The dictionary in a file of `torch.save`, read with `weights_only`, tensors on the CPU.

    Before torch reads it, the file is looked through for what would take long or much memory: compressed parts, calls
    of anything but what makes tensors and plain values, tensors larger than the file, and containers that contain
    themselves, or each other very often.

    Args:
        path: The file.
        keep: Whether a tensor is wanted, by the keys under which it is in the dictionary, or a tensor that it is read
            into. Others are not read, and come on the meta device. With it no more than one tensor is held twice.
        mapped: Map the file into memory, instead of reading it, where `keep` is None. Pages come as they are used, and
            the system may drop them again; what is written to a tensor does not go into the file.

    Raises:
        Unreadable: It is none, or damaged.
    """
    import torch

    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unreadable("it is no regular file")
        _survey(path)
        if keep is None:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        else:
            loaded = _read_some(path, keep)
    except Unreadable:
        raise
    except Exception as error:  # torch and its pickle raise nearly anything for a damaged file
        told = str(error).strip().partition("\n")[0]
        raise Unreadable(shortened(told) if told else type(error).__name__) from error
    if not isinstance(loaded, dict):
        raise Unreadable(f"it holds a {type(loaded).__name__} where a dictionary was written")
    return loaded


def tensor_paths(value: Any, path: TensorPath = ()) -> Iterator[tuple[TensorPath, Tensor]]:
    """The tensors in dictionaries, lists and tuples, with the keys that lead to them.

    Args:
        value: What may hold them.
        path: The keys that lead to it.
    """
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensor_paths(item, (*path, key))


def tensor_places(path: Path) -> tuple[dict[str, Any], dict[TensorPath, int]]:
    """What is in a file of `torch.save`, without its tensors' values, and where in the file these are.

    Args:
        path: The file.

    Returns:
        The dictionary, its tensors without memory; and by their keys the byte at which their storages begin.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        storages = [(keys, tensor.untyped_storage()) for keys, tensor in tensor_paths(loaded)]
    return loaded, {keys: int(storage._checkpoint_offset or 0) for keys, storage in storages}


def _read_some(path: Path, keep: Callable[[TensorPath], bool | Tensor]) -> Any:
    import torch

    loaded, offsets = tensor_places(path)
    with path.open("rb", buffering=0) as file:

        def read(value: Any, keys: TensorPath) -> Any:
            if isinstance(value, dict):
                return {key: read(item, (*keys, key)) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(read(item, (*keys, index)) for index, item in enumerate(value))
            if not isinstance(value, torch.Tensor):
                return value
            if (kept := keep(keys)) is False:
                return torch.empty(value.shape, dtype=value.dtype, device="meta")
            if kept is not True and kept.shape != value.shape:
                raise Unreadable(f"{shortened(keys)} has shape {tuple(value.shape)}, not {tuple(kept.shape)}")
            extent = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
            form = value.device, value.dtype, value.stride()
            if kept is not True and value.is_contiguous() and (kept.device, kept.dtype, kept.stride()) == form:
                memory = kept.detach().view(-1)
            else:
                memory = torch.empty(extent if value.numel() else 0, dtype=value.dtype)
            file.seek(offsets[keys] + int(value.storage_offset()) * value.element_size())
            view = memory.view(torch.uint8).numpy().data
            while view:
                if not (count := file.readinto(view)):
                    raise Unreadable("it ends in the middle of a tensor")
                view = view[count:]
            if kept is True:
                return memory.as_strided(value.shape, value.stride())
            if memory.data_ptr() != kept.data_ptr():
                kept.detach().copy_(memory.as_strided(value.shape, value.stride()))
            return kept

        return read(loaded, ())


def _survey(path: Path) -> None:
    """Look through a file of `torch.save` without making any of its objects."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise Unreadable("a part of it is compressed, which torch.save does not do")
        if sum(part.file_size for part in parts) > size:
            raise Unreadable("its parts are larger than itself")
        pickles = [part for part in parts if part.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Unreadable("it has no data.pkl")
        data = archive.read(pickles[0])
    survey = _Survey(data)
    _check_nesting(survey.load(), most=1_000 + 10 * len(data))
    if survey.elements > (1 << 20) + 4 * size:
        raise Unreadable("its tensors are larger than itself")


def _check_nesting(found: object, most: int) -> None:
    """Check depth and number of values; an object that is in two places counts twice."""
    level, count = [found], 0
    for _ in range(MOST_DEPTH):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
            if count + len(inner) > most:
                raise Unreadable("its containers hold each other too often")
        if not inner:
            return
        count += len(inner)
        level = inner
    raise Unreadable(_TOO_DEEP)


#: What a file of tensors and plain values calls, and what torch.save hands to it.
_REBUILT = {
    "torch._utils._rebuild_tensor_v2": 2,  # where the size is among the arguments
    "torch._utils._rebuild_tensor_v3": 2,
}
_DICTIONARY = "collections.OrderedDict"
_CALLED = {
    "torch._utils._rebuild_parameter",
    "builtins.set",
    "__builtin__.set",
    "builtins.complex",
    "__builtin__.complex",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
}
_OF_TEXT = {"_codecs.encode", "builtins.bytearray", "__builtin__.bytearray"}

_PLAIN = (str, bytes, int, float, bool, type(None))

#: What torch's own reader knows, but for making objects of classes.
_OPCODES = (
    *("GLOBAL", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MARK", "TUPLE", "TUPLE1", "TUPLE2"),
    *("TUPLE3", "NONE", "NEWFALSE", "NEWTRUE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "BINPERSID"),
    *("BININT", "BININT1", "BININT2", "BINFLOAT", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "BINUNICODE"),
    *("SHORT_BINSTRING", "LONG1", "PROTO", "STOP"),
)


class _Object:
    """Stands for what a call would have made."""


class _Dictionary(dict[Any, Any]):
    """Stands for an ordered dictionary, which may have attributes."""


class _Name:
    """Stands for a function or a class; calling it calls nothing.

    Args:
        name: Its full name.
        survey: What counts elements of tensors.
    """

    def __init__(self, name: str, survey: _Survey) -> None:
        self._name, self._survey = name, survey

    def __call__(self, *args: Any) -> object:
        name = self._name
        if name == _DICTIONARY and not args:
            return _Dictionary()
        if name in _REBUILT:
            self._survey.elements += math.prod(abs(int(one)) for one in args[_REBUILT[name]])
        elif name in _OF_TEXT:
            # A number would be a length, and other encodings may take long.
            if any(isinstance(one, int | float) for one in args) or args[1:] not in ((), ("latin1",), ("latin-1",)):
                raise Unreadable(f"it calls {name} with something else than a text")
        elif name not in _CALLED:
            raise Unreadable(f"it calls {shortened(name)}")
        elif any(not isinstance(one, _PLAIN) for arg in args if isinstance(arg, list | tuple) for one in arg):
            raise Unreadable(f"it calls {name} with nested values")
        return _Object()


def _protocol(survey: Any) -> None:
    if survey.read(1) != b"\x02":
        raise Unreadable("its pickle has another protocol than torch.save gives it")


def _set_item(survey: Any) -> None:
    value, key = survey.stack.pop(), survey.stack.pop()
    _set_items_of(survey.stack[-1], [key, value])


def _set_items(survey: Any) -> None:
    items = survey.pop_mark()
    _set_items_of(survey.stack[-1], items)


def _set_items_of(found: object, items: list[Any]) -> None:
    if not isinstance(found, dict):
        raise Unreadable("it puts items into what is no dictionary")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Tuples that contain each other have a hash that takes for ever.
        if not all(isinstance(one, _PLAIN) for one in (key if isinstance(key, tuple) else (key,))):
            raise Unreadable("a key of a dictionary is not plain")
        found[key] = value


class _Survey(pickle._Unpickler):  # the one in Python: that in C makes room for whatever number a file names
    """Reads a pickle without importing or calling anything that it names.

    Args:
        data: The pickle.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    } | {pickle.PROTO[0]: _protocol, pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        #: Of all tensors.
        self.elements = 0

    def find_class(self, module: str, name: str) -> Any:
        """Nothing is imported."""
        return _Name(f"{module}.{name}", self)

    def persistent_load(self, pid: Any) -> Any:
        """A part of the file with the numbers of tensors, which torch compares in length."""
        return _Object()
