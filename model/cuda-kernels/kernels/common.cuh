// Shared code of all kernels. It includes nothing else, so that NVRTC needs no headers of a toolkit.
//
// With BATON_EMULATED, g++ compiles the same text. The emulator then provides these names, with threads that take
// turns (model/cuda-emulator/cpp/emulator.h). Tests compare the kernels with their references on machines without a
// GPU.
#pragma once

#ifdef BATON_EMULATED
#include "emulator.h"
#else

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef int i32;

// Waits until the kernels before this one have ended and their writes are visible, and lets the kernel after this one
// start as far as its own wait. Without a programmatic launch both have happened already (driver/loaded.rs).
__device__ __forceinline__ void begin_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Defines a kernel. Its only parameter is a struct by value, `p`, with the layout of the Rust struct (#[repr(C)]). The
// bounds are the threads of a block, then, if registers are to be limited, the blocks of a multiprocessor.
#define KERNEL(name, Params, ...)                                                                                      \
    __device__ __forceinline__ void name##_body(const Params& p);                                                      \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Params p) {                 \
        begin_kernel();                                                                                                \
        name##_body(p);                                                                                                \
    }                                                                                                                  \
    __device__ __forceinline__ void name##_body(const Params& p)

// Defines a kernel that calls begin_kernel() itself, in every thread, before it uses what the kernel ahead of it has
// written, and before it writes.
#define EARLY_KERNEL(name, Params, ...)                                                                                \
    __device__ __forceinline__ void name##_body(const Params& p);                                                      \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Params p) {                 \
        name##_body(p);                                                                                                \
    }                                                                                                                  \
    __device__ __forceinline__ void name##_body(const Params& p)

// Shared memory whose size the launch sets, aligned to a power of two.
#define DYNAMIC_SHARED_ALIGNED(name, alignment) extern __shared__ __align__(alignment) u8 name[]

__device__ __forceinline__ float shuffle_xor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ u32 shuffle_xor(u32 value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

__device__ __forceinline__ u64 shuffle_xor(u64 value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

__device__ __forceinline__ float shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

__device__ __forceinline__ u32 shuffle(u32 value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

__device__ __forceinline__ u32 ballot(bool value) { return __ballot_sync(0xffffffffu, value); }

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }

// 2^x, within two units in the last place.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, within one unit in the last place. 0 for infinity.
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Selects bytes of `low` (0 to 3) and `high` (4 to 7). The four digits of `selector` name them, from the last byte to
// the first. A digit of 8 + n is the sign of byte n, eight times.
__device__ __forceinline__ u32 pick_bytes(u32 low, u32 high, u32 selector) {
    u32 picked;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(low), "r"(high), "r"(selector));
    return picked;
}

// (x & mask) | bits in one instruction: the compiler makes two of two constants.
__device__ __forceinline__ u32 and_or(u32 x, u32 mask, u32 bits) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
    return result;
}

// a * b + c for both bf16 numbers of a pair, rounded once. Keeps denormal numbers.
__device__ __forceinline__ u32 multiply_add_bf16(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Two floats as bf16, `low` in the lower half. Rounds to nearest, ties to even.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// d += a b. a is 16 x 16, row by row, b is 16 x 8, column by column, both bf16; d is 16 x 8 in f32. A warp shares the
// elements as PTX defines for `mma.m16n8k16`. With group = lane / 4 and in = lane % 4:
//   a: [0] row group, columns 2 in and 2 in + 1; [1] row group + 8; [2], [3] the same, columns + 8
//   b: [0] rows 2 in and 2 in + 1 of column group; [1] rows + 8
//   d: [0], [1] row group, columns 2 in and 2 in + 1; [2], [3] row group + 8
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8 i + j passes the address of row j of matrix
// i. A lane receives in m[i] the elements 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4 of matrix i.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], const void* row) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}

// Like load_matrices, with each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], const void* row) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}

// Starts a copy of 16 bytes from global to shared memory. Writes zeros if `is_wanted` is false.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool is_wanted) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    int num_bytes = is_wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(num_bytes) : "memory");
}

// Like copy_async, of a row of weights that other copies go on with: the L2 cache fetches 256 bytes of it at once.
__device__ __forceinline__ void copy_weights_async(void* to, const void* from, bool is_wanted) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    int num_bytes = is_wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(num_bytes) : "memory");
}

// Ends a group of copies: all copies that were started since the last call.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the newest `num_groups` groups of this thread are in flight.
template <int num_groups> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(num_groups) : "memory");
}

// Loads 16 bytes that are read once. They bypass the L1 cache.
__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

#endif

#define DYNAMIC_SHARED(name) DYNAMIC_SHARED_ALIGNED(name, 128)

#define WARP 32
#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY float_of(0xff800000u)

__device__ __forceinline__ float min_of(float a, float b) { return a < b ? a : b; }
__device__ __forceinline__ float max_of(float a, float b) { return a > b ? a : b; }

// A bf16 number is the upper half of a float.
__device__ __forceinline__ float widen_bf16(u16 x) { return float_of(u32(x) << 16); }
__device__ __forceinline__ float low_bf16(u32 pair) { return float_of(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return float_of(pair & 0xffff0000u); }
__device__ __forceinline__ u16 round_bf16(float x) { return u16(pack_bf16(x, 0.0f)); }

// The eight numbers of a 16-byte load.
__device__ __forceinline__ void widen_bf16(uint4 from, float (&to)[8]) {
    to[0] = low_bf16(from.x), to[1] = high_bf16(from.x);
    to[2] = low_bf16(from.y), to[3] = high_bf16(from.y);
    to[4] = low_bf16(from.z), to[5] = high_bf16(from.z);
    to[6] = low_bf16(from.w), to[7] = high_bf16(from.w);
}

__device__ __forceinline__ uint4 pack_bf16(const float (&from)[8]) {
    uint4 to;
    to.x = pack_bf16(from[0], from[1]), to.y = pack_bf16(from[2], from[3]);
    to.z = pack_bf16(from[4], from[5]), to.w = pack_bf16(from[6], from[7]);
    return to;
}

// The reduction over all lanes of a warp. Every lane receives the result.
__device__ __forceinline__ float warp_sum(float value) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) value = max_of(value, shuffle_xor(value, mask));
    return value;
}

// The reduction over all threads of a block. Every thread receives the result. `scratch` is shared memory with a
// float per warp; it is free again when all threads have passed the next barrier.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    u32 lane = threadIdx.x % WARP;
    value = lane < (blockDim.x + WARP - 1) / WARP ? scratch[lane] : 0.0f;
    return warp_sum(value);
}

// Whether this block is the last of `num_parts` blocks to write its part of a result. The last block then sees the parts of
// all. `num_done` is zero before the first and after the last.
__device__ __forceinline__ bool is_last_part(u32* num_done, u32 num_parts, u32* shared) {
    __syncthreads();
    if (threadIdx.x == 0) {
        // What the block wrote is visible before it is counted, what others counted is visible after it.
        __threadfence();
        bool is_last = atomicAdd(num_done, 1u) == num_parts - 1;
        __threadfence();
        if (is_last) *num_done = 0;
        *shared = is_last;
    }
    __syncthreads();
    return *shared != 0;
}

// Converts four E4M3 codes to bf16 exactly: bytes 0 and 2, and bytes 1 and 3. The bits of a code, read as exponent
// and mantissa of a bf16, are too small by the ratio of the exponent biases, also for denormal codes. NaN becomes
// 480: a vector with a NaN has a NaN scale.
__device__ __forceinline__ void widen_e4m3(u32 codes, u32& even, u32& odd) {
    const u32 factor = 0x7b807b80, zero = 0x80008000;
    u32 low = codes << 8;
    even = multiply_add_bf16((low & 0x80008000) | (low >> 4 & 0x07f007f0), factor, zero);
    odd = multiply_add_bf16((codes & 0x80008000) | (codes >> 4 & 0x07f007f0), factor, zero);
}

// Converts four signed 8-bit integers to bf16, in the same order: 128 + x % 128, minus 128, or minus 256 for negative
// x.
__device__ __forceinline__ void widen_i8(u32 codes, u32& even, u32& odd) {
    const u32 base = 0x43004300, minus_one = 0xbf80bf80;
    u32 high = codes >> 8;
    even = multiply_add_bf16(and_or(codes, 0x00800080, base), minus_one, and_or(codes, 0x007f007f, base));
    odd = multiply_add_bf16(and_or(high, 0x00800080, base), minus_one, and_or(high, 0x007f007f, base));
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp2_fast(-LOG2_E * x)); }

// Activations of an MLP: 0 is x sigmoid(x), 1 is GELU with the error function, 2 is GELU with its tanh approximation.
template <int activation> __device__ __forceinline__ float activated(float x) {
    if constexpr (activation == 0) {
        return x * sigmoid(x);
    } else if constexpr (activation == 1) {
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    } else {
        // 0.5 x (1 + tanh(y)) = x sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3)
        return x * sigmoid(1.5957691f * (x + 0.044715f * x * x * x));
    }
}

// Elements of KV, with the bits of kv-cache/src/quantise. No multiplication here is fused with an addition, and no
// fast inexact division is compiled.
namespace kv {

// The order of `KvDtype::ALL`.
constexpr int F32 = 0, F16 = 1, BF16 = 2, FP8 = 3, INT8 = 4;
// In the transfer only.
constexpr int INT4 = 5;

__device__ constexpr int size_bytes(int dtype) { return dtype == F32 ? 4 : dtype <= BF16 ? 2 : 1; }
__device__ constexpr int scale_bytes(int dtype) { return dtype >= FP8 ? 2 : 0; }

constexpr u32 INFINITE = 0x7f800000u;

// The bits of NaN may differ.
__device__ __forceinline__ u32 round_f16(float x) {
    u32 sign = bits_of(x) >> 16 & 0x8000u, bits = bits_of(x) & 0x7fffffffu;
    // Steps of 2^-24, which is the precision of f32 at 1/2: the addition rounds.
    u32 denormal = bits_of(__fadd_rn(float_of(bits), 0.5f)) - bits_of(0.5f);
    u32 normal = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1)) >> 13;
    u32 magnitude = bits < 113u << 23 ? denormal : normal;
    if (bits >= 143u << 23) magnitude = bits > INFINITE ? 0x7e00u : 0x7c00u;
    return sign | magnitude;
}

__device__ __forceinline__ float widen_f16(u32 x) {
    u32 sign = (x & 0x8000u) << 16, magnitude = x & 0x7fffu;
    // Too small by the ratio of the exponent biases, also for denormal numbers.
    u32 bits = bits_of(float_of(magnitude << 13) * float_of((127u + 112u) << 23));
    if (magnitude >= 0x7c00u) bits = INFINITE | magnitude << 13;
    return float_of(sign | bits);
}

__device__ __forceinline__ u32 quantise_e4m3(float x) {
    u32 sign = bits_of(x) >> 24 & 0x80u;
    float magnitude = float_of(bits_of(x) & 0x7fffffffu);
    u32 denormal = bits_of(__fadd_rn(magnitude, 16384.0f)) - bits_of(16384.0f);
    u32 bits = bits_of(magnitude < 448.0f ? magnitude : 448.0f);
    u32 normal = ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
    u32 code = magnitude < 1.0f / 64.0f ? denormal : normal;
    return sign | (magnitude != magnitude ? 0x7fu : code);
}

__device__ __forceinline__ float widen_e4m3(u32 code) {
    u32 magnitude = code & 0x7fu;
    u32 bits = bits_of(float_of(magnitude << 20) * float_of((127u + 120u) << 23));
    if (magnitude == 0x7fu) bits = INFINITE | 0x400000u;
    return float_of(bits | (code & 0x80u) << 24);
}

// Rounds to the nearest integer, in the lowest byte.
__device__ __forceinline__ u32 quantise_int8(float x) { return bits_of(__fadd_rn(x, 12582912.0f)) & 0xffu; }

// The scale of a vector whose largest magnitude has these bits. It is rounded up to bf16, so that the codes can hold
// the vector. NaN if the magnitude is not finite.
template <int dtype> __device__ __forceinline__ float scale_of(u32 largest) {
    if (largest >= INFINITE) return float_of(0x7fc00000u);
    float scale = max_of(float_of(largest) / (dtype == FP8 ? 448.0f : dtype == INT8 ? 127.0f : 7.0f), float_of(0x00800000u));
    return float_of((bits_of(scale) + 0xffffu) & 0xffff0000u);
}

// `num` elements as words. The last word is padded with zeros.
template <int dtype, int num> struct Elements {
    static constexpr int BYTES = num * size_bytes(dtype);
    u32 words[(BYTES + 3) / 4];
};

// `inverse` is the inverse of the scale. The numbers become zeros if the scale is NaN.
template <int dtype, int num>
__device__ __forceinline__ Elements<dtype, num> quantise(const float (&x)[num], float inverse) {
    Elements<dtype, num> elements;
    for (u32& word : elements.words) word = 0;
#pragma unroll
    for (int i = 0; i < num; ++i) {
        u32 code;
        if constexpr (dtype == F32) code = bits_of(x[i]);
        if constexpr (dtype == F16) code = round_f16(x[i]);
        if constexpr (dtype == BF16) code = round_bf16(x[i]);
        if constexpr (dtype == FP8) code = quantise_e4m3(__fmul_rn(x[i], inverse));
        if constexpr (dtype == INT8) code = quantise_int8(__fmul_rn(x[i], inverse));
        if constexpr (dtype >= FP8) code = inverse == inverse ? code : 0;
        constexpr int size = size_bytes(dtype);
        elements.words[i * size / 4] |= code << i * size % 4 * 8;
    }
    return elements;
}

template <int dtype, int num>
__device__ __forceinline__ void dequantise(const Elements<dtype, num>& elements, float scale, float (&x)[num]) {
#pragma unroll
    for (int i = 0; i < num; ++i) {
        constexpr int size = size_bytes(dtype);
        u32 code = elements.words[i * size / 4] >> i * size % 4 * 8;
        if constexpr (dtype == F32) x[i] = float_of(code);
        if constexpr (dtype == F16) x[i] = widen_f16(code & 0xffffu);
        if constexpr (dtype == BF16) x[i] = float_of(code << 16);
        if constexpr (dtype == FP8) x[i] = __fmul_rn(widen_e4m3(code & 0xffu), scale);
        if constexpr (dtype == INT8) x[i] = __fmul_rn(float(i8(code & 0xffu)), scale);
    }
}

// The longest unit in bytes such that addresses aligned to `align` and `num_bytes` are multiples of it.
__device__ constexpr int unit_of(int num_bytes, int align) {
    int unit = 1;
    while (unit < 16 && unit < align && num_bytes % (unit * 2) == 0) unit *= 2;
    return unit;
}

template <int align, int dtype, int num>
__device__ __forceinline__ void store(u8* to, const Elements<dtype, num>& from) {
    constexpr int bytes = Elements<dtype, num>::BYTES, unit = unit_of(bytes, align);
    const u32* words = from.words;
#pragma unroll
    for (int i = 0; i < bytes; i += unit) {
        if constexpr (unit == 16) {
            const u32* w = words + i / 4;
            *reinterpret_cast<uint4*>(to + i) = make_uint4(w[0], w[1], w[2], w[3]);
        }
        if constexpr (unit == 8) *reinterpret_cast<uint2*>(to + i) = make_uint2(words[i / 4], words[i / 4 + 1]);
        if constexpr (unit == 4) *reinterpret_cast<u32*>(to + i) = words[i / 4];
        if constexpr (unit == 2) *reinterpret_cast<u16*>(to + i) = u16(words[i / 4] >> i % 4 * 8);
        if constexpr (unit == 1) to[i] = u8(words[i / 4] >> i % 4 * 8);
    }
}

template <int align, int dtype, int num>
__device__ __forceinline__ void load(const u8* from, Elements<dtype, num>& to) {
    constexpr int bytes = Elements<dtype, num>::BYTES, unit = unit_of(bytes, align);
    u32* words = to.words;
    if constexpr (unit < 4) {
        for (u32& word : to.words) word = 0;
    }
#pragma unroll
    for (int i = 0; i < bytes; i += unit) {
        if constexpr (unit == 16) {
            uint4 bits = *reinterpret_cast<const uint4*>(from + i);
            words[i / 4] = bits.x, words[i / 4 + 1] = bits.y, words[i / 4 + 2] = bits.z, words[i / 4 + 3] = bits.w;
        }
        if constexpr (unit == 8) {
            uint2 bits = *reinterpret_cast<const uint2*>(from + i);
            words[i / 4] = bits.x, words[i / 4 + 1] = bits.y;
        }
        if constexpr (unit == 4) words[i / 4] = *reinterpret_cast<const u32*>(from + i);
        if constexpr (unit == 2) words[i / 4] |= u32(*reinterpret_cast<const u16*>(from + i)) << i % 4 * 8;
        if constexpr (unit == 1) words[i / 4] |= u32(from[i]) << i % 4 * 8;
    }
}

} // namespace kv

// Activations in E4M3. The largest number of a row, or of a group of a row, becomes 448.
namespace fp8 {

// The largest magnitude of some numbers; and 0, or NaN if one of them is NaN or infinity. A product with the scale
// then shows it.
struct Range {
    float largest, poison;

    __device__ __forceinline__ void take(const float (&x)[8]) {
        for (u32 i = 0; i < 8; ++i) largest = max_of(largest, fabsf(x[i])), poison += x[i] * 0.0f;
    }

    // The range of the numbers of all of `lanes` adjacent lanes.
    __device__ __forceinline__ void join(int lanes) {
        for (int mask = lanes / 2; mask > 0; mask /= 2) {
            largest = max_of(largest, shuffle_xor(largest, mask));
            poison += shuffle_xor(poison, mask);
        }
    }

    // The range of the numbers of all threads of a block. Each needs a float of scratch per warp.
    __device__ __forceinline__ void join_block(float* all_largest, float* all_poison) {
        join(WARP);
        u32 lane = threadIdx.x % WARP;
        if (lane == 0) all_largest[threadIdx.x / WARP] = largest, all_poison[threadIdx.x / WARP] = poison;
        __syncthreads();
        bool is_there = lane < (blockDim.x + WARP - 1) / WARP;
        largest = is_there ? all_largest[lane] : 0.0f, poison = is_there ? all_poison[lane] : 0.0f;
        join(WARP);
    }

    // The factor that restores the numbers.
    __device__ __forceinline__ float scale() const { return largest / 448.0f + poison; }
};

// The codes of eight numbers. They are zero if all numbers of the scale are zero, or too small to scale.
__device__ __forceinline__ uint2 quantise(const float (&x)[8], float scale) {
    kv::Elements<kv::FP8, 8> codes = kv::quantise<kv::FP8>(x, scale > 1e-37f ? 1.0f / scale : 0.0f);
    return make_uint2(codes.words[0], codes.words[1]);
}

// Quantises a row. `range` is that of the numbers which the thread has taken: every eight from 8 threadIdx.x on, in
// steps of 8 blockDim.x. They may have been written by this thread.
__device__ __forceinline__ void quantise_row(const u16* row, u32 width, Range range, float (&scratch)[2][32], u8* to,
                                             float* scale_to) {
    range.join_block(scratch[0], scratch[1]);
    float scale = range.scale();
    if (threadIdx.x == 0) *scale_to = scale;
    for (u32 i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
        float here[8];
        widen_bf16(*reinterpret_cast<const uint4*>(row + i), here);
        *reinterpret_cast<uint2*>(to + i) = quantise(here, scale);
    }
}

// Quantises a group of 128 numbers, eight of each of 16 adjacent lanes, which all call this.
__device__ __forceinline__ void quantise_group(const float (&x)[8], bool is_there, u8* to, float* scale_to) {
    Range range = {0.0f, 0.0f};
    range.take(x);
    range.join(16);
    if (!is_there) return;
    if (threadIdx.x % 16 == 0) *scale_to = range.scale();
    *reinterpret_cast<uint2*>(to) = quantise(x, range.scale());
}

} // namespace fp8
