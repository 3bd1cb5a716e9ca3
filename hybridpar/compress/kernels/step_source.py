"""CPU kernels of gradients that are added by the optimizer: handing one over, and a step of SGD on the sum of all
workers', as they are, as signs, or as two factors.

Each takes one pass over memory. The arithmetic of a step is that of torch's fused SGD, operation by operation, products
and sums rounded once where torch's are, so that the result is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridpar.codegen.tir_writer import LANES, Writer

#: Rows of factors that there are kernels for.
RANKS = (1, 2, 3, 4)

#: Values whose squares are added in float32; these sums are added in float64.
BLOCK = 64 * LANES

#: `slots` is where the first worker's gradient begins, `apart` the distance from one worker's to the next in elements.
STEP = ("parameter", "momentum", "slots", "squares", "count", "workers", "apart")
#: `first` and `second` are messages of the codec `onebit`: lower levels, upper levels, and bits of all groups.
SIGNS = ("parameter", "momentum", "first", "second", "squares", "groups", "length")
#: `p` and `q` are factors of the matrix `scale` * p^T q, of a few rows each.
PRODUCT = ("parameter", "momentum", "p", "q", "squares", "rows", "columns")
#: `rate` is minus the learning rate, and `mass` the momentum. `one` is 1: a compiler that knew it would not round the
#: product of momentum, as torch does.
RATES = ("factor", "rate", "decay", "mass", "one")


def define(w: Writer) -> dict[str, Any]:
    """The functions of this file by name."""
    functions = {"hand_over": w.function("hand_over", ("source", "target", "squares", "count", "stream"), (), _hand(w))}
    for kind in ("plain", "momentum", "nesterov"):
        for decays in (False, True):
            name = f"{kind}_decay" if decays else kind
            functions[f"sgd_{name}"] = w.function(f"sgd_{name}", STEP, RATES, _sgd(w, kind, decays))
            for rank in RANKS:
                own = f"product{rank}_{name}"
                functions[own] = w.function(own, PRODUCT, ("scale", *RATES), _product(w, kind, decays, rank))
            for workers in (1, 2):
                own = f"signs{workers}_{name}"
                functions[own] = w.function(own, SIGNS, RATES, _signs(w, kind, decays, workers))
    return functions


def _blocks(w: Writer, squares: Any, count: Any, each: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Go through values in vectors and add up squares. `each` is called with a place and with what takes the vector
    whose squares count.
    """
    t = w.t
    zero = t.int64(0)
    total = w.view(squares, "float64")
    sums = w.local(LANES, "float32")
    lanes = w.at(zero)
    w.store(total, zero, t.float64(0))

    def add(value: Any) -> None:
        w.store(sums, lanes, w.call("float32x16", "hp_muladd", value, value, sums[lanes]))

    with t.serial(0, (count + (BLOCK - 1)) // BLOCK) as block:
        start = w.keep(block * BLOCK)
        w.store(sums, lanes, w.zeros())
        with t.serial(0, t.min(count - start, t.int64(BLOCK)) // LANES) as step:
            each(w.keep(start + step * LANES), add)
        w.store(total, zero, total[zero] + t.cast(w.folded(sums, lambda x, y: x + y), "float64"))


def _hand(w: Writer) -> Callable[..., None]:
    t = w.t

    def body(source: Any, target: Any, squares: Any, count: Any, stream: Any) -> None:
        """Copy values, of which `count` is a multiple of `LANES`."""
        values, copy = w.view(source, "float32"), w.view(target, "float32")

        def whole(past: bool) -> None:
            def each(place: Any, add: Callable[[Any], None]) -> None:
                value = w.keep(values[w.at(place)])
                add(value)
                if past:
                    w.stream(copy, place, value)
                else:
                    w.store(copy, w.at(place), value)

            _blocks(w, squares, count, each)

        w.either(t.And(stream != 0, (target & 63) == 0), lambda: whole(True), lambda: whole(False))
        w.when(stream != 0, lambda: t.evaluate(w.call("int32", "hp_fence")))

    return body


def _sgd(w: Writer, kind: str, decays: bool) -> Callable[..., None]:
    t = w.t

    def body(
        parameter: Any, momentum: Any, slots: Any, squares: Any, count: Any, workers: Any, apart: Any, **rates: Any
    ) -> None:
        """A step of values, of which `count` is a multiple of `LANES`, on `factor` times the sum of the gradients."""
        given = w.view(slots, "float32")
        sums = w.local(LANES, "float32")
        lanes = w.at(t.int64(0))
        step = _vector_step(w, kind, decays, parameter, momentum, **rates)

        def each(place: Any, add: Callable[[Any], None]) -> None:
            w.store(sums, lanes, given[w.at(place)])
            with t.serial(1, workers) as worker:
                w.store(sums, lanes, sums[lanes] + given[w.at(worker * apart + place)])
            add(step(place, sums[lanes]))

        _blocks(w, squares, count, each)

    return body


def _signs(w: Writer, kind: str, decays: bool, workers: int) -> Callable[..., None]:
    t = w.t
    zero = t.int64(0)

    def body(
        parameter: Any, momentum: Any, first: Any, second: Any, squares: Any, groups: Any, length: Any, **rates: Any
    ) -> None:
        """A step of groups, whose `length` is a multiple of `LANES`, on `factor` times the sum of decoded messages."""
        total = w.view(squares, "float64")
        sums = w.local(LANES, "float32")
        lanes = w.at(zero)
        step = _vector_step(w, kind, decays, parameter, momentum, **rates)
        messages = [(w.view(one, "float32"), w.view(one, "uint8")) for one in (first, second)[:workers]]
        w.store(total, zero, t.float64(0))
        with t.serial(0, groups) as group:
            levels = [(w.keep(values[group]), w.keep(values[groups + group])) for values, _ in messages]
            start = w.keep(group * length)
            w.store(sums, lanes, w.zeros())
            with t.serial(0, length // LANES) as block:
                place = w.keep(start + block * LANES)
                decoded = []
                for (_, packed), (lower, upper) in zip(messages, levels, strict=True):
                    bits = w.keep(w.call("int32", "hp_load16", t.address_of(packed[groups * 8 + place // 8])))
                    mask = w.call("boolx16", "hp_mask", bits)
                    decoded.append(w.keep(t.Select(mask, w.lanes(upper), w.lanes(lower))))
                gradient = step(place, decoded[0] if workers == 1 else decoded[0] + decoded[1])
                w.store(sums, lanes, w.call("float32x16", "hp_muladd", gradient, gradient, sums[lanes]))
            w.store(total, zero, total[zero] + t.cast(w.folded(sums, lambda x, y: x + y), "float64"))

    return body


def _product(w: Writer, kind: str, decays: bool, rank: int) -> Callable[..., None]:
    t = w.t

    def body(
        parameter: Any, momentum: Any, p: Any, q: Any, squares: Any, rows: Any, columns: Any, scale: Any, **rates: Any
    ) -> None:
        """A step of a matrix, whose `columns` are a multiple of `LANES`, on `factor` * `scale` times a product."""
        zero = t.int64(0)
        total, lanes = w.view(squares, "float64"), w.at(zero)
        left, right = w.view(p, "float32"), w.view(q, "float32")
        sums = w.local(LANES, "float32")
        step = _vector_step(w, kind, decays, parameter, momentum, **rates)
        w.store(total, zero, t.float64(0))

        def some(first: Any, count: int) -> None:
            """Step some rows, for all of which numbers of q are read once."""
            numbers = [[w.keep(left[index * rows + first + n]) for n in range(count)] for index in range(rank)]
            w.store(sums, lanes, w.zeros())
            with t.serial(0, columns // LANES) as block:
                place = w.keep(block * LANES)
                wide = [w.keep(right[w.at(index * columns + place)]) for index in range(rank)]
                for n in range(count):
                    value = w.keep(wide[0] * w.lanes(numbers[0][n]))
                    for index in range(1, rank):
                        number = w.lanes(numbers[index][n])
                        value = w.keep(w.call("float32x16", "hp_muladd", number, wide[index], value))
                    gradient = step(w.keep((first + n) * columns + place), w.keep(value * w.lanes(scale)))
                    w.store(sums, lanes, w.call("float32x16", "hp_muladd", gradient, gradient, sums[lanes]))
            w.store(total, zero, total[zero] + t.cast(w.folded(sums, lambda x, y: x + y), "float64"))

        # More rows at a time save reading q, and read and write more places of memory at a time, which is slower.
        with t.serial(0, rows // rank) as block:
            some(w.keep(block * rank), rank)
        with t.serial(rows // rank * rank, rows) as row:
            some(row, 1)

    return body


def _vector_step(
    w: Writer,
    kind: str,
    decays: bool,
    parameter: Any,
    momentum: Any,
    factor: Any,
    rate: Any,
    decay: Any,
    mass: Any,
    one: Any,
) -> Callable[[Any, Any], Any]:
    """What writes a step of a vector, given its place and its gradient, and returns `factor` times that."""
    weights, moments = w.view(parameter, "float32"), w.view(momentum, "float32")

    def fma(x: Any, y: Any, z: Any) -> Any:
        return w.call("float32x16", "hp_muladd", x, y, z)

    def step(place: Any, given: Any) -> Any:
        whole = gradient = w.keep(given * w.lanes(factor))
        weight = w.keep(weights[w.at(place)])
        if decays:
            gradient = w.keep(fma(weight, w.lanes(decay), gradient))
        if kind != "plain":
            moment = w.keep(fma(gradient, w.lanes(one), moments[w.at(place)] * w.lanes(mass)))
            w.store(moments, w.at(place), moment)
            gradient = w.keep(fma(moment, w.lanes(mass), gradient)) if kind == "nesterov" else moment
        w.store(weights, w.at(place), fma(gradient, w.lanes(rate), weight))
        return whole

    return step
