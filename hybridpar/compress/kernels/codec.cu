// Kernels of the codecs on a GPU: in torch a codec is ten passes over memory, here as few as its arithmetic allows.
//
// The same functions as quantised_source.py, to the byte: what is decoded from given bytes
// is equal bit for bit on all devices, which needs a compiler that does not make one operation of a product and a
// sum (--fmad=false). Sums are made in another order than on a CPU, but always in the same one: the number of threads
// and blocks follows from the number of values alone, and no float is added atomically.
//
// A thread has four values that lie side by side, at a multiple of four. What is at such a place is read and written by
// 16 bytes where the tensor begins at a multiple of them, else value by value. Tensors have fewer than 2**31 values.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// These are known to hybridpar/compress/kernels/cuda.py.
constexpr u32 THREADS = 256;
constexpr u32 MOST_PARTS = 512;
constexpr u32 MOST_PLACES = 896;

constexpr u32 LANES = 32;
constexpr u32 WARPS = THREADS / LANES;
constexpr u32 ALL = 0xFFFFFFFFu;
// Read as integers, magnitudes are in the same order, with infinity and NaN above all numbers.
constexpr u32 INFINITE = 0x7F800000u;

__device__ inline bool fits_16(const void* place) { return (reinterpret_cast<u64>(place) & 15) == 0; }

__device__ inline u32 magnitude_bits(float value) { return __float_as_uint(value) & 0x7FFFFFFFu; }

// Four values, zero behind the end.
struct Four {
    float at[4];
};

__device__ inline Four load_four(const float* from, bool wide, u32 first, u32 count) {
    Four four = {};
    if (wide && first + 4 <= count) {
        const float4 all = *reinterpret_cast<const float4*>(from + first);
        four = {{all.x, all.y, all.z, all.w}};
    } else {
        for (u32 i = 0; i < 4; ++i)
            if (first + i < count) four.at[i] = from[first + i];
    }
    return four;
}

// Store those that lie in [start, stop).
__device__ inline void store_four(float* to, bool wide, u32 first, u32 start, u32 stop, const Four& four) {
    if (wide && first >= start && first + 4 <= stop) {
        *reinterpret_cast<float4*>(to + first) = make_float4(four.at[0], four.at[1], four.at[2], four.at[3]);
    } else {
        for (u32 i = 0; i < 4; ++i)
            if (first + i >= start && first + i < stop) to[first + i] = four.at[i];
    }
}

// v = values + factor * kept; without kept, the values.
struct Source {
    const float* values;
    const float* kept;
    float factor;
    u32 count;
    bool wide;

    __device__ Source(const float* values, const float* kept, float factor, u32 count)
        : values(values), kept(kept), factor(factor), count(count), wide(fits_16(values) && fits_16(kept)) {}

    __device__ Four four(u32 first) const {
        Four v = load_four(values, wide, first, count);
        if (kept) {
            const Four r = load_four(kept, wide, first, count);
            for (u32 i = 0; i < 4; ++i) v.at[i] = fmaf(factor, r.at[i], v.at[i]);
        }
        return v;
    }
};

// ---------------------------------------------------------------------------------------------------- sums of a block

// Combine a part of each thread, by a tree in each warp and then warp by warp; all threads get the result. A type of
// parts has `with(other)`, which is the same both ways round, and `from(lane mask)`, which reads another lane's.
template <typename Part>
__device__ inline Part over_warp(Part part) {
    for (u32 mask = LANES / 2; mask; mask /= 2) part = part.with(part.from(mask));
    return part;
}

template <typename Part>
__device__ inline Part over_block(Part part) {
    __shared__ Part parts[WARPS];
    part = over_warp(part);
    __syncthreads();  // a sum before this one may still be read
    if (threadIdx.x % LANES == 0) parts[threadIdx.x / LANES] = part;
    __syncthreads();
    part = parts[0];
    for (u32 warp = 1; warp < WARPS; ++warp) part = part.with(parts[warp]);
    return part;
}

// ------------------------------------------------------------------------------------------------------------- onebit

struct Sides {
    float below, above;
    u32 ones;

    __device__ Sides with(const Sides& other) const {
        return {below + other.below, above + other.above, ones + other.ones};
    }
    __device__ Sides from(u32 mask) const {
        return {__shfl_xor_sync(ALL, below, mask), __shfl_xor_sync(ALL, above, mask), __shfl_xor_sync(ALL, ones, mask)};
    }
};

// Encode one group, by a warp or a block. A group need not begin at a whole byte: its threads write each byte whose
// first bit is the group's, and for that look at up to seven values behind its end, and at none of what others write.
// The first STEPS values of a thread times four stay in registers; a group that has more of them is read again.
template <u32 TEAM>
__device__ inline void onebit_group(
    const Source& source, float* pending, float* lower, float* upper, u8* packed, u32 row, u32 length, u32 thread) {
    constexpr u32 STEPS = 6;  // more would take more registers than four blocks of a multiprocessor have
    constexpr u32 STRIDE = 4 * TEAM;
    const u32 start = row * length, stop = start + length;
    const u32 lane = thread % LANES, end = (stop + 7) / 8 * 8;
    // Where the warp begins; its lanes take all steps together, as they exchange bits.
    const u32 begin = start / 8 * 8 + (thread - lane) * 4;
    Sides sides = {};

    auto take = [&](u32 first) {
        const Four v = source.four(first);
        u32 bits = 0;
        for (u32 i = 0; i < 4; ++i) {
            const bool positive = v.at[i] >= 0;  // NaN is not, so it reaches the lower level
            bits = bits << 1 | u32(positive && first + i < source.count);
            if (first + i < start || first + i >= stop) continue;
            if (positive) {
                sides.above += v.at[i];
                sides.ones += 1;
            } else {
                sides.below += v.at[i];
            }
        }
        const u32 next = __shfl_xor_sync(ALL, bits, 1);
        if (lane % 2 == 0 && first >= start && first < stop) packed[first / 8] = u8(bits << 4 | next);
        return v;
    };

    Four held[STEPS];
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step)
        if (begin + step * STRIDE < end) held[step] = take(begin + step * STRIDE + 4 * lane);
    for (u32 base = begin + STEPS * STRIDE; base < end; base += STRIDE) take(base + 4 * lane);

    sides = TEAM == LANES ? over_warp(sides) : over_block(sides);
    const u32 zeros = length - sides.ones;
    const float a0 = sides.below / float(zeros ? zeros : 1);
    const float mean = sides.above / float(sides.ones ? sides.ones : 1);
    // A NaN was added to the lower level; both are NaN then. Infinity is of one side only.
    const float a1 = a0 != a0 ? a0 : mean;
    if (thread == 0) {
        lower[row] = a0;
        upper[row] = a1;
    }
    if (!pending) return;
    const bool wide = fits_16(pending);
    auto leave = [&](u32 first, Four v) {
        for (u32 i = 0; i < 4; ++i) v.at[i] -= v.at[i] >= 0 ? a1 : a0;
        store_four(pending, wide, first, start, stop, v);
    };
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step)
        if (begin + step * STRIDE < end) leave(begin + step * STRIDE + 4 * lane, held[step]);
    for (u32 base = begin + STEPS * STRIDE; base < end; base += STRIDE) leave(base + 4 * lane, source.four(base + 4 * lane));
}

// A warp for each group.
extern "C" __global__ void __launch_bounds__(THREADS) onebit_encode_warp(
    const float* values, const float* kept, float* pending, float* lower, float* upper, u8* packed, u32 groups,
    u32 length, float factor) {
    const u32 row = blockIdx.x * WARPS + threadIdx.x / LANES;
    if (row >= groups) return;
    const Source source(values, kept, factor, groups * length);
    onebit_group<LANES>(source, pending, lower, upper, packed, row, length, threadIdx.x % LANES);
}

// A block for each group.
extern "C" __global__ void __launch_bounds__(THREADS) onebit_encode_block(
    const float* values, const float* kept, float* pending, float* lower, float* upper, u8* packed, u32 groups,
    u32 length, float factor) {
    const Source source(values, kept, factor, groups * length);
    onebit_group<THREADS>(source, pending, lower, upper, packed, blockIdx.x, length, threadIdx.x);
}

template <bool ADD>
__device__ inline void onebit_read(
    const float* lower, const float* upper, const u8* packed, float* out, u32 count, u32 length) {
    const bool wide = fits_16(out);
    for (u32 first = 4 * (blockIdx.x * THREADS + threadIdx.x); first < count; first += 4 * THREADS * gridDim.x) {
        const u32 bits = packed[first / 8] >> (4 - first % 8);
        Four four = ADD ? load_four(out, wide, first, count) : Four{};
        u32 row = first / length, column = first % length;
        float a0 = lower[row], a1 = upper[row];
        for (u32 i = 0; i < 4; ++i) {
            const float value = bits >> (3 - i) & 1 ? a1 : a0;
            four.at[i] = ADD ? four.at[i] + value : value;
            if (++column == length && first + i + 1 < count) {
                column = 0;
                row += 1;
                a0 = lower[row];
                a1 = upper[row];
            }
        }
        store_four(out, wide, first, 0, count, four);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) onebit_decode(
    const float* lower, const float* upper, const u8* packed, float* out, u32 count, u32 length) {
    onebit_read<false>(lower, upper, packed, out, count, length);
}

extern "C" __global__ void __launch_bounds__(THREADS) onebit_add(
    const float* lower, const float* upper, const u8* packed, float* out, u32 count, u32 length) {
    onebit_read<true>(lower, upper, packed, out, count, length);
}

// ------------------------------------------------------------------------------------------------------------- twobit
//
// The threshold depends on all values, so blocks leave parts of the sums in memory, and each block of the launch that
// comes next puts them together for itself: they are few.

// Sum of magnitudes, and bits of the largest.
struct Magnitudes {
    double sum;
    u32 top;

    __device__ Magnitudes with(const Magnitudes& other) const {
        return {sum + other.sum, top > other.top ? top : other.top};
    }
    __device__ Magnitudes from(u32 mask) const {
        return {__shfl_xor_sync(ALL, sum, mask), __shfl_xor_sync(ALL, top, mask)};
    }
};

// The threshold is `fixed`, or where that is 0 min(factor_of_mean * mean, cap * largest).
struct Rule {
    float fixed, factor_of_mean, cap;
};

extern "C" __global__ void __launch_bounds__(THREADS) twobit_magnitudes(
    const float* values, const float* kept, Magnitudes* parts, u32 count, float factor) {
    const Source source(values, kept, factor, count);
    Magnitudes own = {};
    for (u32 first = 4 * (blockIdx.x * THREADS + threadIdx.x); first < count; first += 4 * THREADS * gridDim.x) {
        const Four v = source.four(first);
        float sum = 0;
        for (u32 i = 0; i < 4; ++i) {
            sum += fabsf(v.at[i]);
            own = own.with({0, magnitude_bits(v.at[i])});
        }
        own.sum += sum;
    }
    own = over_block(own);
    if (threadIdx.x == 0) parts[blockIdx.x] = own;
}

extern "C" __global__ void __launch_bounds__(THREADS) twobit_codes(
    const float* values, const float* kept, float* pending, float* level, u8* codes, const Magnitudes* parts, u32 blocks,
    u32 count, Rule rule, float factor) {
    const Source source(values, kept, factor, count);
    Magnitudes all = {};
    for (u32 index = threadIdx.x; index < blocks; index += THREADS) all = all.with(parts[index]);
    all = over_block(all);
    const float mean = float(all.sum / double(count ? count : 1));
    const float adapted = fminf(rule.factor_of_mean * mean, rule.cap * __uint_as_float(all.top));
    const float least = rule.fixed > 0 ? rule.fixed : adapted;
    const float sent_as = all.top < INFINITE ? least : __uint_as_float(0x7FC00000u);
    if (blockIdx.x == 0 && threadIdx.x == 0) *level = sent_as;

    const bool wide = fits_16(pending);
    const u32 end = (count + 15) / 16 * 16;  // codes fill whole words of 32 bits
    for (u32 first = 4 * (blockIdx.x * THREADS + threadIdx.x); first < end; first += 4 * THREADS * gridDim.x) {
        Four v = source.four(first);
        u32 four_codes = 0;
        for (u32 i = 0; i < 4; ++i) {
            const bool plus = v.at[i] >= least, minus = v.at[i] <= -least;
            const u32 code = plus ? 3 : minus ? 2 : 0;
            four_codes = four_codes << 2 | (first + i < count ? code : 0);
            v.at[i] -= (plus ? 1.0f : minus ? -1.0f : 0.0f) * sent_as;
        }
        codes[first / 4] = u8(four_codes);
        if (pending) store_four(pending, wide, first, 0, count, v);
    }
}

template <bool ADD>
__device__ inline void twobit_read(const float* level, const u8* codes, float* out, u32 count) {
    const bool wide = fits_16(out);
    const float unit = *level;
    // Where the level is not finite all that is decoded is NaN, or nothing.
    const float nothing = magnitude_bits(unit) < INFINITE ? 0 : __uint_as_float(0x7FC00000u);
    for (u32 first = 4 * (blockIdx.x * THREADS + threadIdx.x); first < count; first += 4 * THREADS * gridDim.x) {
        const u32 four_codes = codes[first / 4];
        Four four = ADD ? load_four(out, wide, first, count) : Four{};
        for (u32 i = 0; i < 4; ++i) {
            const u32 code = four_codes >> (6 - 2 * i) & 3;
            const float value = code == 3 ? unit : code == 2 ? -unit : nothing;
            four.at[i] = ADD ? four.at[i] + value : value;
        }
        store_four(out, wide, first, 0, count, four);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) twobit_decode(
    const float* level, const u8* codes, float* out, u32 count) {
    twobit_read<false>(level, codes, out, count);
}

extern "C" __global__ void __launch_bounds__(THREADS) twobit_add(
    const float* level, const u8* codes, float* out, u32 count) {
    twobit_read<true>(level, codes, out, count);
}

// --------------------------------------------------------------------------------------------------------------- qsgd

struct Top {
    u32 bits;

    __device__ Top with(const Top& other) const { return {bits > other.bits ? bits : other.bits}; }
    __device__ Top from(u32 mask) const { return {__shfl_xor_sync(ALL, bits, mask)}; }
};

// The largest magnitude, infinite where a value is not finite; `out` must be zero. The order of maxima does not matter.
extern "C" __global__ void __launch_bounds__(THREADS) qsgd_scale(const float* values, float* out, u32 count) {
    const bool wide = fits_16(values);
    Top own = {};
    for (u32 first = 4 * (blockIdx.x * THREADS + threadIdx.x); first < count; first += 4 * THREADS * gridDim.x) {
        const Four v = load_four(values, wide, first, count);
        for (u32 i = 0; i < 4; ++i) own = own.with({magnitude_bits(v.at[i])});
    }
    own = over_block(own);
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<u32*>(out), own.bits < INFINITE ? own.bits : INFINITE);
}

// Of `words` words, word j holds values j, j + words, ...: neighbouring threads have neighbouring words, so what they
// read and write lies side by side.
struct Layout {
    u32 count, words, width, per_word;

    __device__ u32 index(u32 place, u32 word) const { return place * words + word; }
    __device__ bool holds(u32 place, u32 word) const { return place < per_word && index(place, word) < count; }
};

// Places of a word that a thread reads before it uses the first, as a value alone would keep no GPU busy.
constexpr u32 BATCH = 4;

// Where in the ring the noise of each run begins; by value, so that nothing is copied to the device before a launch.
struct Places {
    u32 at[MOST_PLACES];
};

// The arithmetic of a value is that of the torch code, operation by operation.
template <typename Word>
__device__ inline void qsgd_write(
    Word* words, const float* values, const float* scale, const float* ring, const Layout& layout, u32 steps,
    u32 chunk, u32 from, u32 to, const Places& places) {
    const float divisor = *scale > 0 ? *scale : 1, most = float(steps);
    for (u32 word = from + blockIdx.x * THREADS + threadIdx.x; word < to; word += THREADS * gridDim.x) {
        const u32 run = (word - from) / chunk * layout.per_word, offset = word % chunk;
        u64 bits = 0;
        for (u32 first = 0; first < layout.per_word; first += BATCH) {
            float value[BATCH], noise[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; ++i)
                if (layout.holds(first + i, word)) {
                    value[i] = values[layout.index(first + i, word)];
                    noise[i] = ring[places.at[run + first + i] + offset];
                }
#pragma unroll
            for (u32 i = 0; i < BATCH; ++i)
                if (layout.holds(first + i, word)) {
                    const float position = value[i] / divisor * most + noise[i];
                    const int code = int(fminf(floorf(position), most));  // of NaN it makes `most`
                    bits |= u64(u32(code + int(steps))) << ((first + i) * layout.width);
                }
        }
        words[word] = Word(bits);
    }
}

template <bool ADD, typename Word>
__device__ inline void qsgd_read(
    const Word* words, const float* scale, float* out, const Layout& layout, u32 zero, float unit) {
    const float size = *scale, origin = float(zero);
    const u64 mask = (u64(1) << layout.width) - 1;
    for (u32 word = blockIdx.x * THREADS + threadIdx.x; word < layout.words; word += THREADS * gridDim.x) {
        const u64 bits = words[word];
        for (u32 first = 0; first < layout.per_word; first += BATCH) {
            float before[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; ++i)
                if (ADD && layout.holds(first + i, word)) before[i] = out[layout.index(first + i, word)];
#pragma unroll
            for (u32 i = 0; i < BATCH; ++i)
                if (layout.holds(first + i, word)) {
                    const float code = float(int(bits >> ((first + i) * layout.width) & mask));
                    const float value = (code - origin) / unit * size;
                    out[layout.index(first + i, word)] = ADD ? before[i] + value : value;
                }
        }
    }
}

#define QSGD(NAME, WORD)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) qsgd_encode_##NAME(                                          \
        const float* values, const float* scale, WORD* words, const float* ring, Layout layout, u32 steps, u32 chunk,  \
        u32 from, u32 to, const __grid_constant__ Places places) {                                                     \
        qsgd_write(words, values, scale, ring, layout, steps, chunk, from, to, places);                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) qsgd_decode_##NAME(                                          \
        WORD* words, const float* scale, float* out, Layout layout, u32 zero, float unit) {                            \
        qsgd_read<false>(words, scale, out, layout, zero, unit);                                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) qsgd_add_##NAME(                                             \
        WORD* words, const float* scale, float* out, Layout layout, u32 zero, float unit) {                            \
        qsgd_read<true>(words, scale, out, layout, zero, unit);                                                        \
    }

QSGD(8, u8)
QSGD(32, u32)
QSGD(64, u64)
