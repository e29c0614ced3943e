// The CUDA constructs that kernels use, on a processor, one block at a time. Every thread is a fiber; fibers take
// turns at barriers, shuffles and matrix instructions. Slow, but exact about synchronisation:
//
//   - a barrier that some threads never reach is reported as an error;
//   - the order of blocks, and of threads between barriers, comes from a seed, and some warps are held back while others
//     run ahead, so that a missing barrier shows;
//   - shared memory is poisoned before each block; it and all buffers have guards of the address sanitizer around them;
//   - asynchronous copies happen as late as possible, and an access to their targets before that is an error (copies.h);
//   - dynamic shared memory has the alignment that the kernel declares and no larger one;
//   - if results are compared, stores are visible to other blocks as late as fences allow (visibility.h);
//   - warpgroup products run as early as their start or as late as their wait, and see only those writes to shared memory
//     that were shown to them.
//
// kernels/common.cuh includes this file. The program ends in a `main` (run.h) that reads buffers and launches from its input.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

#include "shared_memory.h"
#include "visibility.h"

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef int8_t i8;
typedef int32_t i32;

struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
struct dim3 {
    u32 x = 1, y = 1, z = 1;
};

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __restrict__
// One block runs at a time.
#define __shared__ static

namespace emulator {

constexpr size_t STACK_BYTES = 256 << 10;

// Runs the body of kernels again and again: a thread of this block, then of the next one.
struct Fiber {
    // The context at its start, then the point at which it stopped.
    ucontext_t context;
    void* stopped[5];
    bool has_begun = false;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
};

struct Thread {
    Fiber* fiber;
    dim3 idx;
    // Equals idx.x: blocks have one dimension.
    u32 linear = 0;
    bool is_done = false;
    // Whether it has waited for the kernel ahead.
    bool has_begun = false;
    // The phase of the barrier at which it waits, and its number when the thread came. Null: it does not wait.
    const u64* phase = nullptr;
    u64 came_in = 0;
};

// A copy of 16 bytes, or of zeros, and its place in the kernel.
struct Copy {
    void* to;
    const void* from;
    bool is_wanted;
    u32 thread;
    const char* file;
    int line;
};

// One thread's part of a warpgroup product: two rows of 16.
struct WarpgroupProduct {
    float (*sums)[4];
    u32 num_columns;
    bool is_added;
    // The left side: the descriptor of its matrix, or the two rows.
    u64 left;
    float rows[2][16];
    bool has_rows;
    u64 right;
    // Rows of the right side are columns of the product.
    bool is_right_transposed;
};

// Threads that wait for each other.
struct Barrier {
    u32 arrived = 0;
    u64 generation = 0;
};

// A numbered barrier, for some of the warps of a block.
struct NumberedBarrier {
    // Of this phase: how many threads it is for, and those that have come.
    u32 expected = 0;
    std::set<u32> come;
    u64 generation = 0;
};

struct Block {
    std::string kernel;
    dim3 grid, dim, idx;
    std::vector<Thread> threads;
    u32 num_alive = 0;
    Barrier all;
    std::vector<Barrier> warps;
    // The values that lanes exchange.
    std::vector<std::array<u64, 16>> shown;
    std::unique_ptr<SharedMemory> shared;
    // The copies of each thread, by group. The open group is last.
    std::vector<std::vector<std::vector<Copy>>> copies;
    // The copies that have not happened, by the address of their target in units of 16 bytes.
    std::unordered_map<uintptr_t, Copy> pending_copies;
    std::vector<Barrier> warpgroups;
    std::array<NumberedBarrier, 16> numbered;
    // The products of each thread, by group, like copies, and when they are computed.
    std::vector<std::vector<std::vector<WarpgroupProduct>>> products;
    bool are_products_late = false;
    // The threads whose registers are ready for products.
    std::vector<bool> may_multiply;
    // Shared memory as products see it, and what each thread wrote for them and has not shown to them.
    std::vector<u8> shown_to_products;
    std::vector<std::vector<void*>> unshown;
    u64 num_events = 0;
};

// What kernels have done since the start.
struct Work {
    // Bytes of `load_once` and `copy_weights_async`: those of weights.
    u64 loaded_bytes = 0;
    // Instructions of a warp: `mma_bf16`.
    u64 num_products = 0;
};
inline Work work;

inline Block* block = nullptr;
inline Thread* current = nullptr;
inline void* scheduler[5];
inline std::function<void()> body;
// By the number of the thread. They outlive launches: a new stack costs more than most kernels.
inline std::deque<Fiber> fibers;

// "decode_attention, block 1,0,0: ". Empty while no kernel runs.
inline std::string running_kernel() {
    if (!block) return "";
    auto& idx = block->idx;
    return block->kernel + ", block " + std::to_string(idx.x) + "," + std::to_string(idx.y) + "," + std::to_string(idx.z) + ": ";
}

[[noreturn]] inline void fail(const std::string& what) {
    fprintf(stderr, "emulator: %s%s\n", running_kernel().c_str(), what.c_str());
    exit(3);
}

// Fibers switch with the compiler's own jumps. swapcontext would call the kernel for signal masks, and would make the
// sanitizer clear its state of the whole stack each time.
#define BATON_SWITCH __attribute__((noipa, no_sanitize("address", "undefined")))

// The compiler does not allow this call in the function that stops.
[[noreturn]] BATON_SWITCH inline void go_on(void** at) { __builtin_longjmp(at, 1); }

BATON_SWITCH inline void yield() {
    if (__builtin_setjmp(current->fiber->stopped) == 0) go_on(scheduler);
}

// Runs a thread until it yields.
BATON_SWITCH inline void resume(Thread& thread) {
    current = &thread;
    if (__builtin_setjmp(scheduler) == 0) {
        Fiber& fiber = *thread.fiber;
        if (fiber.has_begun) go_on(fiber.stopped);
        fiber.has_begun = true;
        setcontext(&fiber.context);
    }
}

// Waits until the phase of a barrier is no longer that in which the thread came.
inline void wait_for_end_of(const u64& phase, u64 came_in) {
    current->phase = &phase;
    current->came_in = came_in;
    while (phase == came_in) yield();
    current->phase = nullptr;
}

inline void arrive(Barrier& barrier, u32 expected) {
    u64 generation = barrier.generation;
    block->num_events += 1;
    if (++barrier.arrived >= expected) {
        barrier.arrived = 0;
        barrier.generation += 1;
        return;
    }
    wait_for_end_of(barrier.generation, generation);
}

// The existing threads of the running thread's warp.
inline u32 warp_size() {
    u32 first = current->linear / 32 * 32;
    return std::min<u32>(32, u32(block->threads.size()) - first);
}

inline void sync_warp() { arrive(block->warps[current->linear / 32], warp_size()); }

template <class T> inline T of_lane(T mine, u32 lane) {
    static_assert(sizeof(T) <= 8);
    memcpy(&block->shown[current->linear][0], &mine, sizeof(T));
    sync_warp();
    T theirs;
    memcpy(&theirs, &block->shown[current->linear / 32 * 32 + lane][0], sizeof(T));
    sync_warp();
    return theirs;
}

inline void enter() {
    for (;;) {
        body();
        current->is_done = true;
        block->num_alive -= 1;
        block->num_events += 1;
        // Barriers do not wait for a thread that has returned.
        if (block->all.arrived > 0 && block->all.arrived >= block->num_alive) {
            block->all.arrived = 0;
            block->all.generation += 1;
        }
        yield();
    }
}

inline Fiber& fiber_of(u32 thread) {
    while (fibers.size() <= thread) {
        Fiber& fiber = fibers.emplace_back();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    return fibers[thread];
}

struct LaunchShape {
    u32 grid[3];
    u32 threads;
    u32 shared_bytes;
};

void finish_all_copies();

// These two run for each instruction at which threads meet, and take most of the time if the sanitizers look at them.
#define BATON_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

// A random order (Fisher and Yates), by numbers of xorshift64 (Marsaglia 2003).
BATON_UNCHECKED inline void shuffle(u32* order, u32 num, u64& state) {
    for (u32 left = num; left > 1; --left) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        u32 other = u32((state >> 32) * left >> 32), last = order[left - 1];
        order[left - 1] = order[other];
        order[other] = last;
    }
}

// Resumes each thread once that can go on, but for those of held warps.
BATON_UNCHECKED inline void run_round(Thread* threads, const u32* order, u32 num, u32 held) {
    for (u32 place = 0; place < num; ++place) {
        Thread& thread = threads[order[place]];
        bool waits = thread.phase && *thread.phase == thread.came_in;
        if (thread.is_done || waits || held >> order[place] / 32 & 1) continue;
        resume(thread);
    }
}

// Runs `body` in every thread of one block.
inline void run_block(Block& here, dim3 idx, const LaunchShape& shape, u32 seed, std::mt19937& random) {
    here.idx = idx;
    here.num_alive = shape.threads;
    here.all = {};
    here.warps.assign((shape.threads + 31) / 32, {});
    here.shown.assign(shape.threads, {});
    here.copies.assign(shape.threads, {});
    here.shared->clear();
    here.warpgroups.assign((shape.threads + 127) / 128, {});
    here.numbered = {};
    here.products.assign(shape.threads, {});
    here.may_multiply.assign(shape.threads, false);
    here.are_products_late = seed && (idx.x + idx.y + idx.z) % 2 == 0;
    here.shown_to_products.assign(here.shared->num_addresses(), 0xff);
    here.unshown.assign(shape.threads, {});
    for (auto& thread : here.threads) thread.is_done = false;
    std::vector<u32> order(shape.threads);
    for (u32 i = 0; i < shape.threads; ++i) order[i] = i;
    // One bit of each warp.
    u32 held = 0;
    u64 state = u64(random()) << 32 | 1;
    for (u32 round = 0, num_idle = 0; here.num_alive > 0; ++round) {
        if (seed) shuffle(order.data(), shape.threads, state);
        // Lets warps that do not wait for each other drift far apart.
        if (seed && round % 128 == 0 && num_idle == 0) held = random();
        u64 before = here.num_events;
        run_round(here.threads.data(), order.data(), shape.threads, held);
        num_idle = here.num_events == before ? num_idle + 1 : 0;
        if (num_idle == 1) {
            // The other threads run while these wait.
            held = ~held;
        } else if (num_idle == 2) {
            fail("threads wait for others that do not come");
        }
    }
    finish_all_copies();
    for (auto& barrier : here.numbered)
        if (!barrier.come.empty()) fail("the block ends in the middle of a phase of a barrier");
}

// Runs `work` in every thread of every block. A seed shuffles blocks and threads.
inline void launch(const std::string& kernel, const LaunchShape& shape, u32 seed, const std::function<void()>& work) {
    body = work;
    std::mt19937 random(seed);
    Block here;
    block = &here;
    here.kernel = kernel;
    here.grid = {shape.grid[0], shape.grid[1], shape.grid[2]};
    here.dim = {shape.threads, 1, 1};
    here.threads.resize(shape.threads);
    for (u32 i = 0; i < shape.threads; ++i) here.threads[i] = {&fiber_of(i), {i, 0, 0}, i};
    here.shared.reset(new SharedMemory(shape.shared_bytes));
    std::vector<dim3> blocks;
    for (u32 z = 0; z < shape.grid[2]; ++z)
        for (u32 y = 0; y < shape.grid[1]; ++y)
            for (u32 x = 0; x < shape.grid[0]; ++x) blocks.push_back({x, y, z});
    if (seed) std::shuffle(blocks.begin(), blocks.end(), random);
    for (dim3 idx : blocks) {
        run_block(here, idx, shape, seed, random);
        if (visibility) visibility->end_block();
    }
    block = nullptr;
}

struct Kernel {
    std::string name;
    size_t params_bytes;
    u32 max_threads;
    std::function<void(const void*)> call;
};

inline std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

template <class Params> struct Register {
    Register(const char* name, u32 max_threads, void (*call)(const Params&)) {
        kernels()[name] = {name, sizeof(Params), max_threads,
                           [call](const void* params) { call(*static_cast<const Params*>(params)); }};
    }
};

// The first of a kernel's bounds.
constexpr u32 max_threads(u32 threads, u32 = 0) { return threads; }

inline float bf16(u32 bits) {
    float x;
    bits <<= 16;
    memcpy(&x, &bits, 4);
    return x;
}

} // namespace emulator

#define threadIdx (emulator::current->idx)
#define blockIdx (emulator::block->idx)
#define blockDim (emulator::block->dim)
#define gridDim (emulator::block->grid)

#define KERNEL(name, Params, ...)                                                                                      \
    static void name(const Params& p);                                                                                 \
    static emulator::Register<Params> name##_registered(#name, emulator::max_threads(__VA_ARGS__), name);              \
    static void name(const Params& p)
#define EARLY_KERNEL(name, Params, ...)                                                                                \
    static void name##_early(const Params& p);                                                                         \
    KERNEL(name, Params, __VA_ARGS__) {                                                                                \
        emulator::current->has_begun = false;                                                                          \
        name##_early(p);                                                                                               \
        if (!emulator::current->has_begun) emulator::fail("a thread ends without a wait for the kernel ahead");        \
    }                                                                                                                  \
    static void name##_early(const Params& p)
#define DYNAMIC_SHARED_ALIGNED(name, alignment) u8* name = emulator::block->shared->aligned(alignment)

inline void begin_kernel() { emulator::current->has_begun = true; }
inline void __syncthreads() { emulator::arrive(emulator::block->all, emulator::block->num_alive); }
inline void __syncwarp() { emulator::sync_warp(); }
inline void __threadfence() { emulator::note_fence(); }
inline void __threadfence_block() {}

inline float shuffle_xor(float value, int mask) { return emulator::of_lane(value, (emulator::current->linear % 32) ^ mask); }
inline u32 shuffle_xor(u32 value, int mask) { return emulator::of_lane(value, (emulator::current->linear % 32) ^ mask); }
inline u64 shuffle_xor(u64 value, int mask) { return emulator::of_lane(value, (emulator::current->linear % 32) ^ mask); }
inline float shuffle(float value, int lane) { return emulator::of_lane(value, lane); }
inline u32 shuffle(u32 value, int lane) { return emulator::of_lane(value, lane); }

inline u32 ballot(bool value) {
    u32 all = 0;
    emulator::block->shown[emulator::current->linear][0] = value;
    emulator::sync_warp();
    u32 first = emulator::current->linear / 32 * 32;
    for (u32 i = 0; i < emulator::warp_size(); ++i) all |= u32(emulator::block->shown[first + i][0] & 1) << i;
    emulator::sync_warp();
    return all;
}

inline u32 bits_of(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
// Never fused with the operation that follows.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline u64 __umul64hi(u64 a, u64 b) { return u64((unsigned __int128)a * b >> 64); }
inline float exp2_fast(float x) { return exp2f(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

// Fibers share one thread, so nothing can interrupt this.
template <class T> inline T atomicAdd(T* at, T value) {
    T old = *at;
    *at = old + value;
    emulator::note_atomic(at, sizeof *at);
    return old;
}
template <class T> inline T atomicMax(T* at, T value) {
    T old = *at;
    *at = std::max(old, value);
    emulator::note_atomic(at, sizeof *at);
    return old;
}

inline u32 pack_bf16(float low, float high) {
    auto round = [](float x) -> u32 {
        u32 bits = bits_of(x);
        if (x != x) return 0x7fff;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return round(low) | round(high) << 16;
}

inline u32 pick_bytes(u32 low, u32 high, u32 selector) {
    u64 bytes = u64(high) << 32 | low;
    u32 picked = 0;
    for (u32 i = 0; i < 4; ++i) {
        u32 byte = u32(bytes >> (selector >> 4 * i & 7) * 8 & 0xff);
        if (selector >> 4 * i & 8) byte = byte & 0x80 ? 0xff : 0;
        picked |= byte << 8 * i;
    }
    return picked;
}

inline u32 and_or(u32 x, u32 mask, u32 bits) { return (x & mask) | bits; }

inline u32 multiply_add_bf16(u32 a, u32 b, u32 c) {
    auto of_half = [&](u32 shift) -> float {
        using emulator::bf16;
        // Exact except for sums of numbers of very different magnitude.
        return float(double(bf16(a >> shift & 0xffff)) * bf16(b >> shift & 0xffff) + bf16(c >> shift & 0xffff));
    };
    return pack_bf16(of_half(0), of_half(16));
}

inline void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    auto& shown = emulator::block->shown;
    u32 linear = emulator::current->linear, lane = linear % 32, first = linear - lane;
    for (int i = 0; i < 4; ++i) shown[linear][i] = a[i];
    for (int i = 0; i < 2; ++i) shown[linear][4 + i] = b[i];
    emulator::sync_warp();
    emulator::work.num_products += lane == 0;
    u32 group = lane / 4, in = lane % 4;
    for (u32 k = 0; k < 16; ++k) {
        u32 holder = k % 8 / 2, half = k / 8, shift = k % 2 * 16;
        for (u32 i = 0; i < 4; ++i) {
            u32 row = group + i / 2 * 8, column = 2 * in + i % 2;
            u32 left = u32(shown[first + row % 8 * 4 + holder][row / 8 + 2 * half]) >> shift & 0xffff;
            u32 right = u32(shown[first + column * 4 + holder][4 + half]) >> shift & 0xffff;
            d[i] += emulator::bf16(left) * emulator::bf16(right);
        }
    }
    emulator::sync_warp();
}

namespace emulator {
inline void matrices(u32 (&m)[4], const void* row, bool is_transposed) {
    auto& shown = block->shown;
    u32 linear = current->linear, lane = linear % 32, first = linear - lane;
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("a row of a matrix is not aligned to 16 bytes");
    shown[linear][0] = reinterpret_cast<uintptr_t>(row);
    sync_warp();
    for (u32 i = 0; i < 4; ++i) {
        auto element = [&](u32 r, u32 c) -> u32 {
            if (is_transposed) std::swap(r, c);
            return reinterpret_cast<const u16*>(shown[first + 8 * i + r][0])[c];
        };
        m[i] = element(lane / 4, lane % 4 * 2) | element(lane / 4, lane % 4 * 2 + 1) << 16;
    }
    sync_warp();
}
} // namespace emulator

inline void load_matrices(u32 (&m)[4], const void* row) { emulator::matrices(m, row, false); }
inline void load_matrices_transposed(u32 (&m)[4], const void* row) { emulator::matrices(m, row, true); }

inline uint4 load_once(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) emulator::fail("a load of 16 bytes is not aligned");
    emulator::work.loaded_bytes += 16;
    uint4 v;
    memcpy(&v, from, 16);
    return v;
}

#include "copies.h"
