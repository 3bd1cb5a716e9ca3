"""A loop of multiply-adds without memory, by which the peak of a CPU is measured."""

from __future__ import annotations

from typing import Any

from hybridpar.codegen.tir_writer import Writer

#: No pass that turns schedules into loops is needed.
WRITTEN_OUT = True


def define(w: Writer, lanes: int, chains: int) -> dict[str, Any]:
    """The function `peak(out, count)`: `count` times one multiply-add in each of some independent chains of vectors.

    Args:
        w: Writes it.
        lanes: Values of a vector.
        chains: Number of chains.

    Returns:
        The function of TIR by name.
    """
    t = w.t

    def body(out: Any, count: Any) -> None:
        memory, sums = w.view(out, "float32"), w.local(lanes * chains, "float32")
        places = [t.ramp(t.int64(chain * lanes), 1, lanes) for chain in range(chains)]
        for place in places:
            w.store(sums, place, memory[place])
        factor = w.keep(memory[t.ramp(t.int64(0), 1, lanes)])
        with t.serial(t.int64(0), count):
            for place in places:
                w.store(sums, place, sums[place] * factor + factor)
        for place in places:
            w.store(memory, place, sums[place])

    return {"peak": w.function("peak", ("out", "count"), (), body, helpers=False)}
