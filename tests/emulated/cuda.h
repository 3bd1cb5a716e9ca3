// Why: kernels for a GPU can run, slowly, where there is none, so that what they compute is tested everywhere.
//
// CUDA C, as far as hybridpar's kernels use it, on a CPU: the threads of a block are fibers that take turns at barriers
// and at exchanges between lanes, and blocks run one after the other. Where threads wait for others that have left, as
// a GPU would for ever, the launch fails. Every other launch lets threads take turns from the last to the first, so that
// a missing barrier does not stay hidden behind their order.
//
// Functions of the CUDA driver start kernels, so a library that is made from a kernel's source and this file can stand
// for libcuda. REGISTER(kernel) names what it holds.

#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static

struct dim3 {
    unsigned x, y, z;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct alignas(8) float2 {
    float x, y;
};
struct alignas(4) ushort2 {
    unsigned short x, y;
};
struct alignas(8) ushort4 {
    unsigned short x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
    return {x, y, z, w};
}

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

constexpr unsigned LANES = 32;
constexpr std::size_t STACK = 64 << 10;

struct Barrier {
    unsigned arrived = 0, generation = 0;
};

struct Warp {
    Barrier barrier;
    std::uint64_t slots[LANES];
};

// A thread of a block, and of the same place in all blocks after it: to make one costs more than most threads do.
struct Fiber {
    ucontext_t first;  // where it begins
    jmp_buf here;      // where it goes on; unlike a context that takes no call of the system
    std::unique_ptr<char[]> stack{new char[STACK]};
    dim3 index;
    bool begun = false, done = false;
};

struct Block {
    std::vector<std::unique_ptr<Fiber>>& fibers;
    const std::function<void()>& body;
    std::vector<Warp> warps;
    Barrier barrier;
    jmp_buf scheduler;
    unsigned running = 0;
    bool moved = false;  // whether a thread ended or a barrier opened
    std::string failure;

    Fiber& fiber() { return *fibers[running]; }
};

inline Block* block;

inline void yield() {
    if (!_setjmp(block->fiber().here)) _longjmp(block->scheduler, 1);
}

__attribute__((noinline)) inline void resume(Fiber& fiber) {
    if (_setjmp(block->scheduler)) return;
    if (fiber.begun) _longjmp(fiber.here, 1);
    fiber.begun = true;
    setcontext(&fiber.first);
}

inline void fail(const char* reason) {
    block->failure = reason;
    for (;;) yield();
}

inline void wait(Barrier& barrier, std::size_t needed) {
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == needed) {
        barrier.arrived = 0;
        barrier.generation += 1;
        block->moved = true;
    }
    while (barrier.generation == generation) yield();
}

inline void enter() {
    for (;;) {
        block->body();
        block->fiber().done = block->moved = true;
        yield();
    }
}

inline unsigned threads() { return blockDim.x * blockDim.y * blockDim.z; }

// Run all threads of a block; false where they cannot all end.
inline bool run(const std::function<void()>& body, bool backwards) {
    static std::vector<std::unique_ptr<Fiber>> fibers;
    const unsigned count = threads();
    while (fibers.size() < count) {
        Fiber& fiber = *fibers.emplace_back(new Fiber);
        getcontext(&fiber.first);
        fiber.first.uc_stack.ss_sp = fiber.stack.get();
        fiber.first.uc_stack.ss_size = STACK;
        makecontext(&fiber.first, enter, 0);
    }
    Block own{fibers, body, std::vector<Warp>((count + LANES - 1) / LANES)};
    block = &own;
    for (unsigned i = 0; i < count; ++i) {
        fibers[i]->index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        fibers[i]->done = false;
    }
    for (unsigned left = count; left && own.failure.empty();) {
        own.moved = false;
        left = 0;
        for (unsigned turn = 0; turn < count && own.failure.empty(); ++turn) {
            own.running = backwards ? count - 1 - turn : turn;
            if (own.fiber().done) continue;
            threadIdx = own.fiber().index;
            resume(own.fiber());
            left += !own.fiber().done;
        }
        if (left && !own.moved) own.failure = "threads wait for others that do not come";
    }
    if (own.failure.empty()) return true;
    std::fprintf(stderr, "emulated CUDA: %s\n", own.failure.c_str());
    fibers.clear();  // some are in the middle of something
    return false;
}

template <typename Value>
Value exchange(unsigned mask, Value value, unsigned (*source)(unsigned, unsigned), unsigned argument) {
    if (mask != 0xFFFFFFFFu) fail("only whole warps exchange values");
    const unsigned lane = block->running % LANES;
    Warp& warp = block->warps[block->running / LANES];
    std::memcpy(&warp.slots[lane], &value, sizeof(Value));
    wait(warp.barrier, LANES);
    std::memcpy(&value, &warp.slots[source(lane, argument)], sizeof(Value));
    wait(warp.barrier, LANES);
    return value;
}

// Kernels by name; each is given a buffer of arguments and its size, and makes of them what a thread runs.
using Maker = std::function<std::function<void()>(const char*, std::size_t)>;
inline std::map<std::string, Maker> kernels;

template <typename Value>
Value take(const char* buffer, std::size_t size, std::size_t& at) {
    Value value{};
    at = (at + alignof(Value) - 1) / alignof(Value) * alignof(Value);
    if (at + sizeof(Value) <= size) std::memcpy(&value, buffer + at, sizeof(Value));
    at += sizeof(Value);
    return value;
}

template <typename... Values>
Maker maker(void (*kernel)(Values...)) {
    return [kernel](const char* buffer, std::size_t size) -> std::function<void()> {
        std::size_t at = 0;
        std::tuple<Values...> values{take<Values>(buffer, size, at)...};
        if (at != size) return nullptr;
        return [kernel, values] { std::apply(kernel, values); };
    };
}

struct Registration {
    Registration(const char* name, Maker maker) { kernels[name] = std::move(maker); }
};

}  // namespace emulated

#define REGISTER(kernel) static emulated::Registration registration_of_##kernel(#kernel, emulated::maker(kernel));

// ----------------------------------------------------------------------------------------------- the language's words

inline void __syncthreads() { emulated::wait(emulated::block->barrier, emulated::threads()); }

template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, unsigned other) {
    return emulated::exchange(mask, value, [](unsigned lane, unsigned argument) { return lane ^ argument; }, other);
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// What takes one instruction on a GPU, see hybridpar/codegen/cuda_source.py: half precision, rounded to nearest even.

inline float hp_from_bfloat16(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

inline unsigned short hp_to_bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;  // NaN
    return static_cast<unsigned short>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

inline float hp_from_float16(unsigned short bits) {
    const unsigned sign = unsigned(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3FFu;
    if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float value = std::ldexp(float(fraction), -24);
    return sign ? -value : value;
}

inline unsigned short hp_to_float16(float value) {
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000u;
    const float size = std::fabs(value);
    if (size != size) return 0x7FFF;
    if (size >= 65520) return static_cast<unsigned short>(sign | 0x7C00u);
    if (size == 0) return static_cast<unsigned short>(sign);
    int exponent;
    std::frexp(size, &exponent);
    const int last = std::max(exponent - 11, -24);  // what the last bit of the fraction counts, as a power of two
    const unsigned steps = unsigned(std::nearbyint(std::ldexp(size, -last)));
    // A fraction that rounds up to the next power of two carries into the exponent, as it should.
    return static_cast<unsigned short>(sign | (steps + (unsigned(last + 24) << 10)));
}

inline unsigned atomicMax(unsigned* place, unsigned value) {
    const unsigned before = *place;
    if (value > before) *place = value;
    return before;
}

// ------------------------------------------------------------------------------------------------ the driver's functions

extern "C" {

// What tests look at: the last launch.
struct Seen {
    unsigned grid[3], block[3], shared;
    std::uint64_t stream;
    std::uint64_t context;
    std::uint64_t launches;
} seen;

static thread_local std::vector<std::uint64_t> contexts;

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500, LAUNCH_FAILED = 719 };

int cuGetErrorString(int status, const char** text) {
    *text = status == INVALID_VALUE     ? "invalid argument"
            : status == INVALID_CONTEXT ? "invalid device context"
            : status == NOT_FOUND       ? "named symbol not found"
                                        : "launch failed";
    return SUCCESS;
}

int cuInit(unsigned) { return SUCCESS; }

int cuDeviceGet(int* device, int index) { return *device = index, SUCCESS; }

int cuDevicePrimaryCtxRetain(std::uint64_t* context, int device) { return *context = 100 + device, SUCCESS; }

int cuCtxPushCurrent_v2(std::uint64_t context) { return contexts.push_back(context), SUCCESS; }

int cuCtxPopCurrent_v2(std::uint64_t* context) { return *context = contexts.back(), contexts.pop_back(), SUCCESS; }

// How many contexts of this thread are pushed.
int depth() { return int(contexts.size()); }

int cuModuleLoadData(std::uint64_t* module, const char* image) {
    if (std::strcmp(image, "emulated") != 0) return INVALID_VALUE;
    return *module = 1, SUCCESS;
}

int cuModuleGetFunction(emulated::Maker** function, std::uint64_t, const char* name) {
    const auto found = emulated::kernels.find(name);
    if (found == emulated::kernels.end()) return NOT_FOUND;
    return *function = &found->second, SUCCESS;
}

int cuLaunchKernel(
    emulated::Maker* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
    unsigned shared, std::uint64_t stream, void**, void** extra) {
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    // As in cuda.h: 1 and a buffer, 2 and the address of its size, 0.
    if (std::size_t(extra[0]) != 1 || std::size_t(extra[2]) != 2 || extra[4]) return INVALID_VALUE;
    const std::function<void()> body = (*kernel)(static_cast<char*>(extra[1]), *static_cast<std::size_t*>(extra[3]));
    if (!body || !(gx && gy && gz) || bx * by * bz % emulated::LANES || bx * by * bz > 1024) return INVALID_VALUE;
    if (contexts.empty()) return INVALID_CONTEXT;
    seen = {{gx, gy, gz}, {bx, by, bz}, shared, stream, contexts.back(), seen.launches + 1};
    gridDim = {gx, gy, gz};
    blockDim = {bx, by, bz};
    for (unsigned z = 0; z < gz; ++z)
        for (unsigned y = 0; y < gy; ++y)
            for (unsigned x = 0; x < gx; ++x) {
                blockIdx = {x, y, z};
                if (!emulated::run(body, seen.launches % 2 == 0)) return LAUNCH_FAILED;
            }
    return SUCCESS;
}
}
