"""BatchNorm with its activation, forward and backward: one pass over memory for sums, one to write the result.

Forward sums up the moments of the batch, then normalises and activates. Backward, with z = (x - mean) scale + shift,
g = f'(z) dy, n rows and 1 / sqrt(var + eps) = inverse (Ioffe and Szegedy 2015, "Batch Normalization", section 3), sums
up dbias = sum(g) and dweight = inverse sum(g (x - mean)), then writes
dx = scale (g - dbias / n - (x - mean) inverse dweight / n). What the activation took, z, is made again from x.

Rows are walked in the order in which they lie in memory, as CPUs fetch ahead what is read in order. The first pass goes
through the segments of the tensor from the last one on, which is still in the caches from when the tensor was written;
the second pass begins where the first one ended. All phases run in one call, or those over rows for ranges of segments,
each by a thread of its own, and in between the one that joins them (`norm_rows`).

Moments lose nothing where the mean is large. Values are taken relative to the first of up to `CHUNK` rows and summed in
float32; chunks are merged in float64 (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance",
equation 2.1). As (first - mean)^2 <= CHUNK * variance of the chunk, that much at most can cancel. The mean is kept as
the sum of two float32, so that x - mean is as good as x.

Of addresses those of parameters and running statistics may be 0 for none. There are rows * channels float32; `repeat`
rows are one wide row, whose width is a multiple of LANES; `length` wide rows are a segment; a call is for the segments
from `begin` up to `end`; `stream` is 1 where the result, which then begins at a multiple of 64, is to be written past
the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hybridpar.codegen import LANES
from hybridpar.codegen.tir_script import T, floats, kernels, magnitude_bits, w
from hybridpar.codegen.tir_writer import INFINITE
from hybridpar.tvm_kernels.schedules import norm_rows
from hybridpar.tvm_kernels.schedules.norm_rows import CHUNK, FIXED, MEAN, ROWS, SCALE, SEGMENT, SHIFT


def define(_: Any) -> dict[str, Any]:
    """Two functions for each activation."""
    return kernels(
        **{f"norm_forward_{act}": forward.specialize(act=act) for act in norm_rows.ACTIVATIONS},
        **{f"norm_backward_{act}": backward.specialize(act=act) for act in norm_rows.ACTIVATIONS},
    )


# -------------------------------------------------------------------------------------------------------- rows and sums


def finite(value: Any) -> Any:
    """A vector to measure from: infinity and NaN, which would hide what the others are, as 0."""
    value = w.keep(value)
    return T.Select(magnitude_bits(value) < INFINITE, value, w.zeros())


def tree_sum(values: Any, factors: Any, count: int) -> Any:
    """The sum of some products, by a tree: the sum so far, which memory holds, then waits for one addition only."""
    terms = [values[n] if factors is None else values[n] * factors[n] for n in range(count)]
    while len(terms) > 1:
        terms = [left + right for left, right in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def fetch(memory: Any, index: Any, column: Any, width: Any, count: int) -> None:
    """Fetch a part of what is read after some rows, in the order in which it lies in memory."""
    ahead = w.keep(index + count * width + (count - 1) * column)
    for step in range(count):
        w.prefetch(memory, ahead + LANES * step)


class Rows:
    """The rows of a tensor as they are walked: the sizes that follow from their number, as values of TIR."""

    def __init__(self, rows: Any, channels: Any, repeat: Any, length: Any) -> None:
        self.rows, self.channels, self.length = rows, channels, length
        self.width = w.keep(channels * repeat)
        self.wide = w.keep(rows // repeat)
        self.segments = w.keep((self.wide + length - 1) // length)
        #: The first of the rows that are left over.
        self.tail = w.keep(self.wide * repeat)

    def walk(self, start: Any, stop: Any, body: Callable[..., None], *further: Any) -> None:
        """Write loops over the vectors of wide rows, `ROWS` rows at a time: body(column, index in the first, rows)."""
        groups = w.keep((stop - start) // ROWS)
        for first, last, count in ((0, groups, ROWS), (groups * ROWS, stop - start, 1)):
            with T.serial(first, last) as step:
                row = w.keep((start + step * count) * self.width)
                with T.serial(0, self.width // LANES) as block:
                    column = w.keep(block * LANES)
                    body(column, w.keep(row + column), count, *further)

    def each(self, begin: Any, end: Any, body: Callable[..., None], past: bool) -> None:
        """Write loops over all values of some segments: body(index, column, whether it is a vector, past).

        They are the vectors of wide rows and, behind the last segment, the values of the rows left over.
        """
        start, stop = begin * self.length, T.min(end * self.length, self.wide)
        with T.serial(start, stop) as row, T.serial(0, self.width // LANES) as block:
            column = w.keep(block * LANES)
            body(row * self.width + column, column, True, past)
        left_over = (self.rows - self.tail) * self.channels
        with w.t.If(end == self.segments), w.t.Then(), T.serial(0, left_over) as column:
            body(self.tail * self.channels + column, column, False, past)


def clear(memory: Any, index: Any, count: Any, zeros: Any) -> None:
    """Set so many values to zero."""
    with T.serial(0, count // LANES) as block:
        w.store(memory, w.at(index + block * LANES), zeros)


def sigmoid(z: Any) -> Any:
    """1 / (1 + e^-z)."""
    wide = z.ty.dtype.lanes > 1
    vector = w.keep(w.call(f"float32x{LANES}", "hp_sigmoid", z if wide else w.lanes(z)))
    return vector if wide else w.keep(T.Shuffle([vector], [0]))


def constant(like: Any, value: float) -> Any:
    """A number, as a vector where another value is one."""
    return w.lanes(T.float32(value)) if like.ty.dtype.lanes > 1 else T.float32(value)


def activated(z: Any, act: str) -> Any:
    """The activation of a value; NaN stays NaN."""
    z = w.keep(z)
    zero, six = constant(z, 0), constant(z, 6)
    if act == "relu":
        return T.Select(z <= zero, zero, z)
    if act == "relu6":
        return T.Select(z <= zero, zero, T.Select(z >= six, six, z))
    return z * sigmoid(z) if act == "silu" else z


def slope(z: Any, gradient: Any, act: str) -> Any:
    """The derivative of the activation at z, times a gradient; at NaN, relu passes it on and relu6 does not."""
    if act == "none":
        return gradient
    z = w.keep(z)
    zero, six = constant(z, 0), constant(z, 6)
    if act == "relu":
        return T.Select(z <= zero, zero, gradient)
    if act == "relu6":
        return T.Select(z > zero, T.Select(z < six, gradient, zero), zero)
    s, unit = sigmoid(z), constant(z, 1)
    return gradient * (s * (unit + z * (unit - s)))


def centred(values: Any, terms: Any, index: Any, column: Any, width: Any, vector: bool) -> tuple[Any, Any, Any]:
    """A value less its mean, what that is scaled by, and what the activation takes."""
    at = w.at if vector else lambda index: index
    deviation = w.keep(values[at(index)] - terms[at(MEAN * width + column)])
    scale = w.keep(terms[at(SCALE * width + column)])
    return deviation, scale, deviation * scale + terms[at(SHIFT * width + column)]


def put_column(table: Any, column: Any, width: Any, values: tuple[Any, ...]) -> None:
    """Fill a column of the table, whose rows are in the order of their numbers (`norm_rows`)."""
    for row, value in enumerate(values):
        w.store(table, row * width + column, T.cast(value, "float32"))


def wide_double(value: Any) -> Any:
    """A vector in float64; a number in all lanes."""
    return T.cast(value, f"float64x{LANES}") if value.ty.dtype.lanes > 1 else w.lanes(T.cast(value, "float64"))


# -------------------------------------------------------------------------------------------------------------- forward


@T.jit
def forward(
    x: T.int64, weight: T.int64, bias: T.int64, running_mean: T.int64, running_var: T.int64, y: T.int64,
    table: T.int64, scratch: T.int64, rows: T.int64, channels: T.int64, repeat: T.int64, length: T.int64,
    begin: T.int64, end: T.int64, phases: T.int64, stream: T.int64, eps: T.float32, momentum: T.float32,
    act: T.constexpr,
):  # fmt: skip
    """Sum up moments, join them into the table, and write the result."""
    values, result, terms, scales, shifts, means, variances = floats(
        x, y, table, weight, bias, running_mean, running_var
    )
    sums, work = w.view(scratch, "float64"), w.view(scratch, "float32")
    sizes = T.meta_var(Rows(rows, channels, repeat, length))
    width = T.meta_var(sizes.width)
    joined: T.let = sizes.segments * SEGMENT * width
    of_chunk: T.let = (begin * SEGMENT + 2) * width * 2
    mean: T.let = joined + width

    @T.inline
    def moments(first, last, of_segment):
        """The mean of a segment's columns, and the sum of squared deviations from it."""
        clear(sums, of_segment, 2 * width, wide_double(T.float32(0)))
        for chunk in range((last - first + CHUNK - 1) // CHUNK):
            start: T.let = first + chunk * CHUNK
            stop: T.let = T.min(start + CHUNK, last)
            for block in range(width // LANES):
                work[w.at(of_chunk + block * LANES)] = finite(values[w.at(start * width + block * LANES)])
            clear(work, of_chunk + width, 2 * width, w.zeros())
            sizes.walk(start, stop, add_moments)
            count: T.let = wide_double(stop - start)
            for block in range(width // LANES):
                column: T.let = block * LANES
                total: T.let = wide_double(work[w.at(of_chunk + width + column)])
                deviation: T.let = total / count
                within: T.let = wide_double(work[w.at(of_chunk + 2 * width + column)]) - total * deviation
                # Chunks are merged relative to the first row of the segment.
                base: T.let = wide_double(finite(values[w.at(first * width + column)]))
                apart: T.let = wide_double(work[w.at(of_chunk + column)]) + deviation - base
                sums[w.at(of_segment + column)] += count * apart
                sums[w.at(of_segment + width + column)] += within + count * apart * apart
        for block in range(width // LANES):
            column: T.let = block * LANES
            total: T.let = sums[w.at(of_segment + column)]
            deviation: T.let = total / wide_double(last - first)
            sums[w.at(of_segment + width + column)] -= total * deviation
            sums[w.at(of_segment + column)] = wide_double(finite(values[w.at(first * width + column)])) + deviation

    @T.inline
    def add_moments(column, index, count):
        base: T.let = work[w.at(of_chunk + column)]
        deviations = T.alloc_local((count,), "float32x16")
        fetch(values, index, column, width, count)
        for n in T.unroll(count):
            deviations[n] = values[w.at(index + n * width)] - base
        work[w.at(of_chunk + width + column)] += tree_sum(deviations, None, count)
        work[w.at(of_chunk + 2 * width + column)] += tree_sum(deviations, deviations, count)

    @T.inline
    def fill_table(channel, its_mean, variance):
        """Fill a channel's columns of the table, and move the running statistics."""
        unbiased: T.let = variance * (T.cast(rows, "float64") / (T.cast(rows, "float64") - 1.0))
        inverse: T.let = T.float64(1) / T.sqrt(variance + T.cast(eps, "float64"))
        rest: T.let = its_mean - T.cast(T.cast(its_mean, "float32"), "float64")
        scale = inverse
        if weight != 0:
            scale = T.cast(scales[channel], "float64") * inverse
        shift = -rest * scale
        if bias != 0:
            shift = T.cast(shifts[channel], "float64") - rest * scale
        for copy in range(repeat):
            column: T.let = copy * channels + channel
            put_column(terms, column, width, (its_mean, scale, shift, inverse, rest, unbiased))
        if (phases & norm_rows.TRACK) != 0:
            part: T.let = T.cast(momentum, "float64")
            old: T.let = T.float64(1) - part
            means[channel] = T.cast(part * its_mean + old * T.cast(means[channel], "float64"), "float32")
            variances[channel] = T.cast(part * unbiased + old * T.cast(variances[channel], "float64"), "float32")

    @T.inline
    def join(around):
        """Merge the means of segments and of the rows left over, channel by channel, then what lies around them."""
        for block in range(width // LANES):
            column: T.let = block * LANES
            total = wide_double(T.float32(0))
            for segment in range(sizes.segments):
                size: T.let = wide_double(T.min(segment * length + length, sizes.wide) - segment * length)
                index: T.let = segment * SEGMENT * width + column
                if around:
                    deviation: T.let = sums[w.at(index)] - sums[w.at(mean + column)]
                    total += sums[w.at(index + width)] + size * deviation * deviation
                else:
                    total += sums[w.at(index)] * size
            sums[w.at(joined + column)] = total
        for channel in range(channels):
            total = T.float64(0)
            for copy in range(repeat):
                total += sums[joined + copy * channels + channel]
            for row in range(sizes.tail, rows):
                value: T.let = T.cast(values[row * channels + channel], "float64")
                if around:
                    total += (value - sums[mean + channel]) * (value - sums[mean + channel])
                else:
                    total += value
            average: T.let = total / T.cast(rows, "float64")
            if around:
                fill_table(channel, sums[mean + channel], average)
            else:
                for copy in range(repeat):
                    sums[mean + copy * channels + channel] = average

    @T.inline
    def element(index, column, vector, past):
        z: T.let = centred(values, terms, index, column, width, vector)[2]
        if vector:
            w.put(result, index, activated(z, act), past=past)
        else:
            result[index] = activated(z, act)

    if (phases & norm_rows.REDUCE) != 0:
        for back in range(end - begin):
            segment: T.let = end - 1 - back
            first: T.let = segment * length
            moments(first, T.min(first + length, sizes.wide), segment * SEGMENT * width)
    if (phases & norm_rows.JOIN) != 0:
        if (phases & FIXED) != 0:
            for channel in range(channels):
                fill_table(channel, T.cast(means[channel], "float64"), T.cast(variances[channel], "float64"))
        else:
            join(False)
            join(True)
    if (phases & norm_rows.APPLY) != 0:
        w.past_caches(stream != 0, partial(sizes.each, begin, end, element))


# ------------------------------------------------------------------------------------------------------------- backward


@T.jit
def backward(
    x: T.int64, grad_y: T.int64, table: T.int64, grad_x: T.int64, grad_weight: T.int64, grad_bias: T.int64,
    scratch: T.int64, rows: T.int64, channels: T.int64, repeat: T.int64, length: T.int64, begin: T.int64,
    end: T.int64, phases: T.int64, stream: T.int64, act: T.constexpr,
):  # fmt: skip
    """Sum up g and g (x - mean), join them into the gradients of weight and bias, and write the input's."""
    values, grads, terms, result, of_weight, of_bias = floats(x, grad_y, table, grad_x, grad_weight, grad_bias)
    sums, work = w.view(scratch, "float64"), w.view(scratch, "float32")
    sizes = T.meta_var(Rows(rows, channels, repeat, length))
    width = T.meta_var(sizes.width)
    joined: T.let = sizes.segments * SEGMENT * width
    of_chunk: T.let = (begin * SEGMENT + 2) * width * 2
    # What x - mean is multiplied by, and what is added, for each column.
    factors: T.let = (joined + 2 * width) * 2
    # Where the slope costs more than memory, g is computed once, and stored in the memory of the result meanwhile.
    costly = T.meta_var(act == "silu")

    @T.inline
    def total_of(column, index, count, past):
        gradients = T.alloc_local((count,), "float32x16")
        deviations = T.alloc_local((count,), "float32x16")
        mean: T.let = terms[w.at(MEAN * width + column)]
        scale: T.let = terms[w.at(SCALE * width + column)]
        shift: T.let = terms[w.at(SHIFT * width + column)]
        fetch(values, index, column, width, count)
        fetch(grads, index, column, width, count)
        for n in T.unroll(count):
            deviations[n] = values[w.at(index + n * width)] - mean
            gradients[n] = slope(deviations[n] * scale + shift, w.load(grads, index + n * width), act)
        if costly:
            for n in T.unroll(count):
                w.put(result, index + n * width, gradients[n], past=past)
        work[w.at(of_chunk + column)] += tree_sum(gradients, None, count)
        work[w.at(of_chunk + width + column)] += tree_sum(gradients, deviations, count)

    @T.inline
    def total(past):
        for back in range(end - begin):
            segment: T.let = end - 1 - back
            first: T.let = segment * length
            last: T.let = T.min(first + length, sizes.wide)
            index: T.let = segment * SEGMENT * width
            clear(sums, index, 2 * width, wide_double(T.float32(0)))
            for chunk in range((last - first + CHUNK - 1) // CHUNK):
                start: T.let = first + chunk * CHUNK
                clear(work, of_chunk, 2 * width, w.zeros())
                sizes.walk(start, T.min(start + CHUNK, last), total_of, past)
                for block in range(2 * width // LANES):
                    sums[w.at(index + block * LANES)] += wide_double(work[w.at(of_chunk + block * LANES)])

    @T.inline
    def join():
        for which in T.unroll(2):
            for block in range(width // LANES):
                column: T.let = block * LANES
                both = wide_double(T.float32(0))
                for segment in range(sizes.segments):
                    both += sums[w.at((segment * SEGMENT + which) * width + column)]
                sums[w.at(joined + which * width + column)] = both
        for channel in range(channels):
            sum_g = T.float64(0)
            sum_gx = T.float64(0)
            for copy in range(repeat):
                sum_g += sums[joined + copy * channels + channel]
                sum_gx += sums[joined + width + copy * channels + channel]
            for row in range(sizes.tail, rows):
                index: T.let = row * channels + channel
                parts = T.meta_var(centred(values, terms, index, channel, width, False))
                g: T.let = T.cast(slope(parts[2], grads[index], act), "float64")
                sum_g += g
                sum_gx += g * T.cast(parts[0], "float64")
            inverse: T.let = T.cast(terms[norm_rows.INVERSE * width + channel], "float64")
            rest: T.let = T.cast(terms[norm_rows.REST * width + channel], "float64")
            share: T.let = T.cast(terms[SCALE * width + channel], "float64") / T.cast(rows, "float64")
            of_scale: T.let = (sum_gx - rest * sum_g) * inverse
            of_weight[channel] = T.cast(of_scale, "float32")
            of_bias[channel] = T.cast(sum_g, "float32")
            slope_x: T.let = -share * inverse * of_scale
            # x - mean misses the mean's second part.
            offset: T.let = -share * sum_g - slope_x * rest
            for copy in range(repeat):
                work[factors + copy * channels + channel] = T.cast(slope_x, "float32")
                work[factors + width + copy * channels + channel] = T.cast(offset, "float32")

    @T.inline
    def element(index, column, vector, past):
        parts = T.meta_var(centred(values, terms, index, column, width, vector))
        at = T.meta_var(w.at if vector else lambda index: index)
        through: T.let = work[at(factors + column)] * parts[0] + work[at(factors + width + column)]
        # Where statistics are constants x has no part in it, not even as NaN.
        if vector:
            g: T.let = result[w.at(index)] if costly else slope(parts[2], w.load(grads, index), act)
            part: T.let = T.Select(w.lanes((phases & FIXED) != 0), w.zeros(), through)
            w.put(result, index, parts[1] * g + part, past=past)
        else:
            g: T.let = slope(parts[2], grads[index], act)
            result[index] = parts[1] * g + T.Select((phases & FIXED) != 0, T.float32(0), through)

    if (phases & norm_rows.REDUCE) != 0:
        if costly:
            w.past_caches(stream != 0, total)
        else:
            total(False)
    if (phases & norm_rows.JOIN) != 0:
        join()
    if (phases & norm_rows.APPLY) != 0:
        if costly:  # the memory has just been read
            sizes.each(begin, end, element, False)
        else:
            w.past_caches(stream != 0, partial(sizes.each, begin, end, element))
