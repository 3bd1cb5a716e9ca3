"""CPU kernels of gradients that are added by the optimizer: handing one over, and a step of SGD on the sum of all
workers', as they are, as signs, or as two factors.

Each takes one pass over memory. The arithmetic of a step is that of torch's fused SGD, operation by operation, products
and sums rounded once where torch's are, so that the result is the same bit for bit. Steps are on `factor` times the
sum; `rate` is minus the learning rate, and `mass` the momentum. `unit` is 1: a compiler that knew it would not round
the product of momentum, as torch does.
"""

from __future__ import annotations

import itertools
from typing import Any

from hybridpar.codegen import LANES
from hybridpar.codegen.tir_script import T, fence, floats, in_groups, kernels, muladd, past_caches, put, total, w

#: Rows of factors that there are kernels for.
RANKS = (1, 2, 3, 4)

#: Values whose squares are added in float32; these sums are added in float64.
BLOCK = 64 * LANES


def define(_: Any, coded: bool) -> dict[str, Any]:
    """The functions of this file by name: of gradients that a codec wrote, or of those that lie as they are."""
    functions = {} if coded else {"hand_over": hand_over.specialize()}
    for kind, decays in itertools.product(("plain", "momentum", "nesterov"), (False, True)):
        name, rule = f"{kind}_decay" if decays else kind, {"kind": kind, "decays": decays}
        if not coded:
            functions[f"sgd_{name}"] = sgd.specialize(**rule)
            continue
        for workers in (1, 2):
            functions[f"signs{workers}_{name}"] = signs.specialize(workers=workers, **rule)
        for rank in RANKS:
            functions[f"product{rank}_{name}"] = product.specialize(rank=rank, **rule)
    return kernels(**functions)


@T.jit
def hand_over(source: T.int64, target: T.int64, squares: T.int64, count: T.int64):
    """Copy values, of which `count` is a multiple of `LANES`."""
    given, copy = floats(source, target)
    norm = w.view(squares, "float64")
    past: T.let = past_caches(count, target)
    norm[0] = T.float64(0)
    for block in range((count + BLOCK - 1) // BLOCK):
        start: T.let = block * BLOCK
        sums = w.zeros()
        for step in range(T.min(count - start, BLOCK) // LANES):
            i: T.let = start + step * LANES
            value: T.let = given[w.at(i)]
            sums = muladd(value, value, sums)
            put(copy, i, value, past)
        norm[0] += T.cast(total(sums), "float64")
    fence(count)


@T.inline
def update(weights, moments, i, gradient, kind, decays, rate, decay, mass, unit):
    """Step a vector of weights."""
    weight: T.let = weights[w.at(i)]
    decayed: T.let = muladd(weight, decay, gradient) if decays else gradient
    if kind == "plain":
        weights[w.at(i)] = muladd(decayed, rate, weight)
    else:
        moment: T.let = muladd(decayed, unit, moments[w.at(i)] * mass)
        moments[w.at(i)] = moment
        ahead: T.let = muladd(moment, mass, decayed) if kind == "nesterov" else moment
        weights[w.at(i)] = muladd(ahead, rate, weight)


@T.jit
def sgd(
    parameter: T.int64, momentum: T.int64, slots: T.int64, squares: T.int64, count: T.int64, workers: T.int64,
    apart: T.int64, factor: T.float32, rate: T.float32, decay: T.float32, mass: T.float32, unit: T.float32,
    kind: T.constexpr, decays: T.constexpr,
):  # fmt: skip
    """A step of values, of which `count` is a multiple of `LANES`, on gradients that lie `apart` elements."""
    weights, moments, given = floats(parameter, momentum, slots)
    norm = w.view(squares, "float64")
    norm[0] = T.float64(0)
    for block in range((count + BLOCK - 1) // BLOCK):
        start: T.let = block * BLOCK
        sums = w.zeros()
        for step in range(T.min(count - start, BLOCK) // LANES):
            i: T.let = start + step * LANES
            gradient = given[w.at(i)]
            for worker in range(1, workers):
                gradient += given[w.at(worker * apart + i)]
            gradient *= factor
            update(weights, moments, i, gradient, kind, decays, rate, decay, mass, unit)
            sums = muladd(gradient, gradient, sums)
        norm[0] += T.cast(total(sums), "float64")


def decoded(levels: Any, packed: Any, groups: Any, group: Any, i: Any) -> Any:
    """A vector of a group, as a message has it."""
    bits = w.call("int32", "hp_load16", T.address_of(packed[groups * 8 + i // 8]))
    return T.Select(w.call("boolx16", "hp_mask", bits), w.lanes(levels[groups + group]), w.lanes(levels[group]))


@T.jit
def signs(
    parameter: T.int64, momentum: T.int64, first: T.int64, second: T.int64, squares: T.int64, groups: T.int64,
    length: T.int64, factor: T.float32, rate: T.float32, decay: T.float32, mass: T.float32, unit: T.float32,
    workers: T.constexpr, kind: T.constexpr, decays: T.constexpr,
):  # fmt: skip
    """A step of groups, whose `length` is a multiple of `LANES`, on messages of `onebit`: [lower][upper][bits]."""
    weights, moments, levels, levels2 = floats(parameter, momentum, first, second)
    packed, packed2, norm = w.view(first, "uint8"), w.view(second, "uint8"), w.view(squares, "float64")
    norm[0] = T.float64(0)
    for group in range(groups):
        sums = w.zeros()
        for block in range(length // LANES):
            i: T.let = group * length + block * LANES
            gradient = decoded(levels, packed, groups, group, i)
            if workers == 2:
                gradient += decoded(levels2, packed2, groups, group, i)
            gradient *= factor
            update(weights, moments, i, gradient, kind, decays, rate, decay, mass, unit)
            sums = muladd(gradient, gradient, sums)
        norm[0] += T.cast(total(sums), "float64")


@T.jit
def product(
    parameter: T.int64, momentum: T.int64, p: T.int64, q: T.int64, squares: T.int64, rows: T.int64, columns: T.int64,
    scale: T.float32, factor: T.float32, rate: T.float32, decay: T.float32, mass: T.float32, unit: T.float32,
    rank: T.constexpr, kind: T.constexpr, decays: T.constexpr,
):  # fmt: skip
    """A step of a matrix, whose `columns` are a multiple of `LANES`, on `scale` p^T q of factors of a few rows each."""
    weights, moments, ps, qs = floats(parameter, momentum, p, q)
    norm = w.view(squares, "float64")
    norm[0] = T.float64(0)

    @T.inline
    def some(first, count):
        """Step some rows, for all of which numbers of q are read once."""
        numbers = T.alloc_local((rank, count), "float32")
        wide = T.alloc_local((rank,), "float32x16")
        sums = w.zeros()
        for k in T.unroll(rank):
            for n in T.unroll(count):
                numbers[k, n] = ps[k * rows + first + n]
        for block in range(columns // LANES):
            column: T.let = block * LANES
            for k in T.unroll(rank):
                wide[k] = qs[w.at(k * columns + column)]
            for n in T.unroll(count):
                gradient = wide[0] * numbers[0, n]
                for k in T.unroll(1, rank):
                    gradient = muladd(numbers[k, n], wide[k], gradient)
                gradient = gradient * scale * factor
                i: T.let = (first + n) * columns + column
                update(weights, moments, i, gradient, kind, decays, rate, decay, mass, unit)
                sums = muladd(gradient, gradient, sums)
        norm[0] += T.cast(total(sums), "float64")

    # More rows at a time save reading q, and read and write more of memory at a time, which is slower.
    in_groups(rows, rank, some)
