"""CPU kernels of gradients in shared memory: handing one over, and a step of SGD on the sum of all workers'.

Each takes one pass over memory. The arithmetic of a step is that of torch's fused SGD, operation by operation, products
and sums rounded once where torch's are, so that the result is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridpar.codegen.tir_writer import LANES, Writer

#: Values whose squares are added in float32; these sums are added in float64.
BLOCK = 64 * LANES

#: `slots` is where the first worker's gradient begins, `apart` the distance from one worker's to the next in elements.
STEP = ("parameter", "momentum", "slots", "squares", "count", "workers", "apart")
#: `rate` is minus the learning rate, `mass` the momentum, and `share` is 1 - dampening.
RATES = ("factor", "rate", "decay", "mass", "share")


def define(w: Writer) -> dict[str, Any]:
    """The functions of this file by name.

    Args:
        w: What the functions are written with.
    """
    functions = {"hand_over": w.function("hand_over", ("source", "target", "squares", "count", "stream"), (), _hand(w))}
    for kind in ("plain", "momentum", "nesterov"):
        for decays in (False, True):
            name = f"sgd_{kind}_decay" if decays else f"sgd_{kind}"
            functions[name] = w.function(name, STEP, RATES, _sgd(w, kind, decays))
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

    def fma(x: Any, y: Any, z: Any) -> Any:
        return w.call("float32x16", "hp_muladd", x, y, z)

    def body(
        parameter: Any,
        momentum: Any,
        slots: Any,
        squares: Any,
        count: Any,
        workers: Any,
        apart: Any,
        factor: Any,
        rate: Any,
        decay: Any,
        mass: Any,
        share: Any,
    ) -> None:
        """A step of values, of which `count` is a multiple of `LANES`, on `factor` times the sum of the gradients."""
        weights, moments, given = (w.view(one, "float32") for one in (parameter, momentum, slots))
        sums = w.local(LANES, "float32")
        lanes = w.at(t.int64(0))

        def each(place: Any, add: Callable[[Any], None]) -> None:
            w.store(sums, lanes, given[w.at(place)] + given[w.at(apart + place)])
            with t.serial(2, workers) as worker:
                w.store(sums, lanes, sums[lanes] + given[w.at(worker * apart + place)])
            gradient = w.keep(sums[lanes] * w.lanes(factor))
            add(gradient)
            weight = w.keep(weights[w.at(place)])
            if decays:
                gradient = w.keep(fma(weight, w.lanes(decay), gradient))
            if kind != "plain":
                moment = w.keep(fma(gradient, w.lanes(share), moments[w.at(place)] * w.lanes(mass)))
                w.store(moments, w.at(place), moment)
                gradient = w.keep(fma(moment, w.lanes(mass), gradient)) if kind == "nesterov" else moment
            w.store(weights, w.at(place), fma(gradient, w.lanes(rate), weight))

        _blocks(w, squares, count, each)

    return body
