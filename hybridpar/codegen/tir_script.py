"""TVMScript for kernels of CPUs: TIR written as Python text, which TVM reads and compiles and nobody runs.

A kernel is a function under `@T.jit`. What is of `T.constexpr` in its signature is given by `specialize`, and what
follows from it is decided while TVM reads: branches, and loops over `T.unroll`. `x: T.let = ...` gives a value a name,
`x = ...` makes a variable, of a vector too, and `T.alloc_local` an array; all of them end in registers. A function
under `@T.inline` is written out where it is called, and any other is called while TVM reads, for what it returns.

Addresses and numbers are what kernels take, as of a `Writer` (`hybridpar.codegen.tir_writer`), whose words `w` are used
here as well. This module imports TVM, so only files that `hybridpar.codegen.build` compiles import it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import tvm
from tvm.script import tirx as T

from hybridpar.codegen import LANES
from hybridpar.codegen.tir_writer import HELPERS, Writer

#: Words that kernels have in common.
w = Writer(tvm)

#: From so many values on, what is written is not read again before it would have left the caches.
_STREAM = 1 << 16


def kernels(**functions: Any) -> dict[str, Any]:
    """Functions that were read, by the names that they are called by, with `HELPERS` at hand."""
    for name, function in functions.items():
        body = tvm.tirx.AttrStmt(w.t.int32(0), "pragma_import_llvm", tvm.ir.StringImm(HELPERS), function.body)
        functions[name] = function.with_body(body).with_attr("global_symbol", name)
    return functions


def floats(*addresses: Any) -> list[Any]:
    """The memory at addresses, as float32."""
    return [w.view(address, "float32") for address in addresses]


def muladd(*factors_and_term: Any) -> Any:
    """The vector x y + z of vectors or numbers, rounded once where the CPU can."""
    vectors = [value if value.ty.dtype.lanes > 1 else w.lanes(value) for value in factors_and_term]
    return T.call_llvm_pure_intrin(f"float32x{LANES}", "llvm.fmuladd", *vectors)


def total(vector: Any, combine: Callable[[Any, Any], Any] = operator.add) -> Any:
    """All elements of a vector combined into a number, by a tree."""
    parts = [T.Shuffle([vector], [lane]) for lane in range(LANES)]
    while len(parts) > 1:
        parts = [combine(left, right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def cast(value: Any, dtype: str) -> Any:
    """A value, or a vector of them, as another type."""
    return T.cast(value, like(value, dtype))


def like(value: Any, dtype: str) -> str:
    """A type, of vectors where a value is a vector."""
    return f"{dtype}x{LANES}" if value.ty.dtype.lanes > 1 else dtype


def magnitude_bits(value: Any) -> Any:
    """Magnitudes of float32 as integers, which are in the same order, with infinity and NaN above all numbers."""
    return T.reinterpret(like(value, "int32"), value) & 0x7FFFFFFF


def past_caches(count: Any, address: Any) -> Any:
    """Whether vectors that are stored from an address on should go past the caches: many values, and aligned."""
    return T.And(count >= _STREAM, (address & 63) == 0)


def put(buffer: Any, start: Any, values: Any, past: Any) -> None:
    """Store a vector, past the caches where `past` says so."""
    w.either(past, lambda: w.put(buffer, start, values, past=True), lambda: w.put(buffer, start, values, past=False))


def fence(count: Any) -> None:
    """Have what was stored past the caches seen by all that is stored later."""
    w.when(count >= _STREAM, lambda: w.t.evaluate(w.call("int32", "hp_fence")))


def in_groups(count: Any, size: int, some: Callable[[Any, int], None]) -> None:
    """Call some(first, size) for as many groups of a size as there are, and some(first, 1) for what is left over."""
    with T.serial(0, count // size) as group:
        some(group * size, size)
    with T.serial(count // size * size, count) as first:
        some(first, 1)
