"""`Writer` writes kernels of TIR for CPUs, statement by statement.

A `Writer` writes functions of TIR that take addresses and numbers, so that calling one costs less than a microsecond
and nothing is assumed of strides or alignment; the caller has checked both. What TIR has no statement for, such as
turning a mask into bits, is a few lines of portable LLVM IR (`HELPERS`) that LLVM inlines and lowers to what the CPU
has.

This module imports no TVM: it is handed to it by `hybridpar.codegen.build`, in the process that compiles.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from hybridpar.codegen import LANES

#: Infinity as an integer. So read, magnitudes are in the same order, with infinity and NaN above all numbers.
INFINITE = 0x7F800000

_ORDER = ", ".join(f"i32 {lane}" for lane in reversed(range(LANES)))
_POWERS = ", ".join(f"i32 {1 << lane}" for lane in reversed(range(LANES)))


def _all(value: float | int) -> str:
    """A constant in all lanes, in LLVM's words: a float32 is given by the bits of the double that it is."""
    if isinstance(value, int):
        return "<" + ", ".join([f"i32 {value}"] * LANES) + ">"
    (bits,) = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<f", value))[0]))
    return "<" + ", ".join([f"float 0x{bits:016X}"] * LANES) + ">"


def _sigmoid() -> str:
    """1 / (1 + e^-z) in all lanes, good to 3 units in the last place.

    e^-z = 2^n e^-h with n = round(-z / ln 2) and h = z + n ln 2, with Cody and Waite's ln 2 in two parts. Adding 1.5 *
    2^23 rounds, and leaves n in the low bits. The polynomial is the minimax one of degree 5 for the relative error
    (9e-8) where |h| <= ln 2 / 2, with p(0) = 1. z is cut off so that n is in [-127, 128], where the exponent's bits
    give exactly 0 and infinity; NaN passes.
    """
    steps = [
        f"%over = fcmp ogt <16 x float> %z, {_all(88.0)}",
        f"%low = select <16 x i1> %over, <16 x float> {_all(88.0)}, <16 x float> %z",
        f"%under = fcmp olt <16 x float> %low, {_all(-89.0)}",
        f"%cut = select <16 x i1> %under, <16 x float> {_all(-89.0)}, <16 x float> %low",
        _muladd("m", "%cut", _all(-1.44269504088896341), _all(12582912.0)),
        f"%n = fsub <16 x float> %m, {_all(12582912.0)}",
        _muladd("rest", "%n", _all(0.693359375), "%cut"),
        _muladd("h", "%n", _all(-2.12194440e-4), "%rest"),
        _muladd("p4", "%h", _all(-8.2903062276e-3), _all(4.1897975562e-2)),
        _muladd("p3", "%p4", "%h", _all(-1.6667636582e-1)),
        _muladd("p2", "%p3", "%h", _all(4.9999149191e-1)),
        _muladd("p1", "%p2", "%h", _all(-9.9999970701e-1)),
        _muladd("p", "%p1", "%h", _all(1.0)),
        "%raw = bitcast <16 x float> %m to <16 x i32>",
        f"%moved = shl <16 x i32> %raw, {_all(23)}",
        f"%exponent = add <16 x i32> %moved, {_all(127 << 23)}",
        "%power = bitcast <16 x i32> %exponent to <16 x float>",
        _muladd("sum", "%p", "%power", _all(1.0)),
        f"%sigmoid = fdiv <16 x float> {_all(1.0)}, %sum",
        "ret <16 x float> %sigmoid",
    ]
    return "\n  ".join(steps)


def _muladd(name: str, x: str, y: str, z: str) -> str:
    operands = ", ".join(f"<16 x float> {operand}" for operand in (x, y, z))
    return f"%{name} = call <16 x float> @llvm.fmuladd.v16f32({operands})"


#: Functions in LLVM IR that kernels may call. A mask's first lane is the most significant bit, and what lies in memory
#: is big-endian, as numpy packs bits; addresses need no alignment except where values are streamed.
HELPERS = f"""
declare i16 @llvm.bswap.i16(i16)
declare i32 @llvm.bswap.i32(i32)
define linkonce_odr i32 @hp_bits(<16 x i1> %mask) alwaysinline nounwind {{
  %reversed = shufflevector <16 x i1> %mask, <16 x i1> poison, <16 x i32> <{_ORDER}>
  %bits = bitcast <16 x i1> %reversed to i16
  %wide = zext i16 %bits to i32
  ret i32 %wide
}}
define linkonce_odr <16 x i1> @hp_mask(i32 %bits) alwaysinline nounwind {{
  %first = insertelement <16 x i32> poison, i32 %bits, i64 0
  %all = shufflevector <16 x i32> %first, <16 x i32> poison, <16 x i32> zeroinitializer
  %single = and <16 x i32> %all, <{_POWERS}>
  %mask = icmp ne <16 x i32> %single, zeroinitializer
  ret <16 x i1> %mask
}}
define linkonce_odr i32 @hp_load32(ptr %address) alwaysinline nounwind {{
  %raw = load i32, ptr %address, align 1
  %bits = call i32 @llvm.bswap.i32(i32 %raw)
  ret i32 %bits
}}
define linkonce_odr i32 @hp_load16(ptr %address) alwaysinline nounwind {{
  %raw = load i16, ptr %address, align 1
  %low = call i16 @llvm.bswap.i16(i16 %raw)
  %bits = zext i16 %low to i32
  ret i32 %bits
}}
define linkonce_odr void @hp_store32(ptr %address, i32 %bits) alwaysinline nounwind {{
  %raw = call i32 @llvm.bswap.i32(i32 %bits)
  store i32 %raw, ptr %address, align 1
  ret void
}}
define linkonce_odr void @hp_store16(ptr %address, i32 %bits) alwaysinline nounwind {{
  %low = trunc i32 %bits to i16
  %raw = call i16 @llvm.bswap.i16(i16 %low)
  store i16 %raw, ptr %address, align 1
  ret void
}}
define linkonce_odr i32 @hp_pairs(<16 x i1> %high, <16 x i1> %low) alwaysinline nounwind {{
  %both = shufflevector <16 x i1> %low, <16 x i1> %high, <32 x i32> <{
    ", ".join(f"i32 {lane + half}" for lane in reversed(range(LANES)) for half in (0, LANES))
}>
  %bits = bitcast <32 x i1> %both to i32
  ret i32 %bits
}}
define linkonce_odr <16 x float> @hp_load(ptr %address) alwaysinline nounwind {{
  %values = load volatile <16 x float>, ptr %address, align 4
  ret <16 x float> %values
}}
define linkonce_odr void @hp_stream(ptr %address, <16 x float> %values) alwaysinline nounwind {{
  store <16 x float> %values, ptr %address, align 64, !nontemporal !0
  ret void
}}
declare <16 x float> @llvm.fmuladd.v16f32(<16 x float>, <16 x float>, <16 x float>)
define linkonce_odr <16 x float> @hp_sigmoid(<16 x float> %z) alwaysinline nounwind {{
  {_sigmoid()}
}}
define linkonce_odr i32 @hp_fence() alwaysinline nounwind {{
  fence seq_cst
  ret i32 0
}}
!0 = !{{i32 1}}
"""


class Writer:
    """Writes the statements of functions for CPUs into TIR."""

    def __init__(self, tvm: Any) -> None:
        #: The module, for what the writer has no method for.
        self.tvm = tvm
        #: TIR's own statements, of TVM's IR builder.
        self.t = tvm.tirx.script.builder.ir

    def keep(self, value: Any) -> Any:
        """Give a value that is used more than once a name. TIR cannot name masks."""
        return self.t.Bind(value)

    def store(self, buffer: Any, index: Any, value: Any) -> None:
        """Set buffer[index] = value."""
        self.t.buffer_store(buffer, value, [index])

    def local(self, count: int, dtype: str = "float32") -> Any:
        """Allocate an array of one thread; compilers keep it in registers where all indices are constants."""
        return self.t.alloc_buffer((count,), dtype, scope="local")

    def call(self, dtype: str, name: str, *arguments: Any) -> Any:
        """Call a function of `HELPERS`, or one that the schedule imports."""
        return self.t.call_extern(dtype, name, *arguments)

    def when(self, condition: Any, then: Callable[[], None]) -> None:
        """Write a branch."""
        with self.t.If(condition), self.t.Then():
            then()

    def either(self, condition: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """Write two branches."""
        with self.t.If(condition):
            with self.t.Then():
                then()
            with self.t.Else():
                otherwise()

    def function(self, name: str, arguments: Sequence[str], body: Callable[..., None]) -> Any:
        """Write a function of 64-bit integers, addresses among them."""
        t = self.t
        with self.tvm.script.ir_builder.IRBuilder() as builder:
            with t.prim_func():
                t.func_name(name)
                t.func_attr({"global_symbol": name})
                body(**{argument: t.arg(argument, t.int64()) for argument in arguments})
        return builder.get()

    def view(self, address: Any, dtype: str) -> Any:
        """The memory at an address, as elements of a type."""
        ir = self.tvm.ir
        pointer = self.t.Bind(self.t.reinterpret(ir.PointerType(ir.PrimType(dtype)), address))
        return self.t.decl_buffer((1 << 40,), dtype, data=pointer)

    def lanes(self, value: Any) -> Any:
        """A vector of `LANES` equal values."""
        return self.t.broadcast(value, LANES)

    def zeros(self) -> Any:
        """Float zeros."""
        return self.lanes(self.t.float32(0))

    def at(self, start: Any) -> Any:
        """Indices of `LANES` values that lie side by side."""
        return self.t.ramp(start, 1, LANES)

    def load(self, buffer: Any, start: Any) -> Any:
        """A vector of `LANES` float32, read at once and whole even where a mask takes only some of it.

        LLVM would read under the mask, and then not before the mask is known.
        """
        return self.keep(self.call(f"float32x{LANES}", "hp_load", self.t.address_of(buffer[start])))

    def prefetch(self, buffer: Any, index: Any) -> None:
        """Fetch a cache line that will be read soon; it need not be there."""
        address, int32 = self.t.address_of(buffer[index]), self.t.int32
        # To read it, into the nearest cache, as data.
        self.t.evaluate(self.tvm.tirx.call_llvm_intrin("void", "llvm.prefetch", address, int32(0), int32(3), int32(1)))

    def put(self, buffer: Any, start: Any, values: Any, *, past: bool) -> None:
        """Store a vector of `LANES` float32 side by side, past the caches or to them."""
        if past:
            self.t.evaluate(self.call("void", "hp_stream", self.t.address_of(buffer[start]), values))
        else:
            self.store(buffer, self.at(start), values)

    def past_caches(self, where: Any, write: Callable[[bool], None]) -> None:
        """Write past the caches where a condition holds, else to them."""

        def past() -> None:
            write(True)
            self.t.evaluate(self.call("int32", "hp_fence"))

        self.either(where, past, lambda: write(False))
