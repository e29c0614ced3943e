// What every kernel is written with. Nothing else is included, so that NVRTC needs no headers of a toolkit.
//
// The same text is compiled by g++ with BATON_EMULATED, which gives these names by threads that take turns
// (../emulator/emulator.h): kernels are checked against their references where there is no GPU.
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

// One kernel: its parameters are one struct by value, `p`, as the Rust side has it (#[repr(C)]).
#define KERNEL(name, Params, max_threads)                                                                              \
    extern "C" __global__ void __launch_bounds__(max_threads) name(const __grid_constant__ Params p)

// Shared memory whose size the launch says.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

__device__ __forceinline__ float shuffle_xor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ u32 shuffle_xor(u32 value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

__device__ __forceinline__ float shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

__device__ __forceinline__ u32 shuffle(u32 value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

__device__ __forceinline__ u32 ballot(bool value) { return __ballot_sync(0xffffffffu, value); }

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }

// 2^x, two units in the last place.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, one unit in the last place; 0 of infinity.
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Bytes of `low` (0 to 3) and `high` (4 to 7), as the four digits of `selector` name them, the last one first.
__device__ __forceinline__ u32 pick_bytes(u32 low, u32 high, u32 selector) {
    return __byte_perm(low, high, selector);
}

// a * b + c of both bf16 of a pair, rounded once; denormals are kept.
__device__ __forceinline__ u32 multiply_add_bf16(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Two floats as bf16, `low` in the lower half; nearest, ties to even.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// d += a b: a is 16 x 16 (rows), b is 16 x 8 (columns), both bf16, d is 16 x 8 in f32; of a warp, as PTX deals out
// `mma.m16n8k16`: with group = lane / 4 and in = lane % 4
//   a: [0] row group, columns 2 in and 2 in + 1; [1] row group + 8; [2], [3] the same, columns + 8
//   b: [0] rows 2 in and 2 in + 1 of column group; [1] rows + 8
//   d: [0], [1] row group, columns 2 in and 2 in + 1; [2], [3] row group + 8
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane 8 i + j gives the address of row j of matrix i; of
// matrix i a lane gets, in m[i], the elements 2 (lane % 4) and the next of row lane / 4.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], const void* row) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}

// The same, each matrix transposed on its way.
__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], const void* row) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}

// Begins to copy 16 bytes from global to shared memory; zeroes instead where `is_wanted` does not hold.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool is_wanted) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    int num_bytes = is_wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(num_bytes) : "memory");
}

// What was begun since the last of these is one group.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the newest `num_groups` groups of this thread are under way.
template <int num_groups> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(num_groups) : "memory");
}

// 16 bytes that are read once: not kept in the first cache.
__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

#endif

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

// Half precision, exactly; infinities and NaN too.
__device__ __forceinline__ float widen_half(u16 x) {
    u32 magnitude = x & 0x7fff, sign = u32(x & 0x8000) << 16;
    // As exponent and mantissa of a float it is too small by the ratio of the biases, denormals included.
    u32 finite = bits_of(float_of(magnitude << 13) * float_of((127 + 112) << 23));
    return float_of(sign | (magnitude >= 0x7c00 ? 0x7f800000 | magnitude << 13 : finite));
}

// Eight numbers of a 16-byte load.
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

// Of all lanes of a warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) value = max_of(value, shuffle_xor(value, mask));
    return value;
}

// Of all threads of a block, in every thread. `scratch` is shared memory of a float for each warp, free again when
// all threads have passed the next barrier.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    u32 lane = threadIdx.x % WARP;
    value = lane < (blockDim.x + WARP - 1) / WARP ? scratch[lane] : 0.0f;
    return warp_sum(value);
}

// Four E4M3 codes as bf16, exactly: bytes 0 and 2, and bytes 1 and 3. As exponent and mantissa of a bf16 a code is too
// small by the ratio of the biases, denormal codes included. (NaN becomes 480: a vector that holds one has a NaN for scale.)
__device__ __forceinline__ void widen_e4m3(u32 codes, u32& even, u32& odd) {
    const u32 factor = 0x7b807b80, zero = 0x80008000;
    u32 low = codes << 8;
    even = multiply_add_bf16((low & 0x80008000) | (low >> 4 & 0x07f007f0), factor, zero);
    odd = multiply_add_bf16((codes & 0x80008000) | (codes >> 4 & 0x07f007f0), factor, zero);
}

// Four whole numbers of eight bits as bf16, in the same order: 128 + x % 128 less 128 or, where x is negative, 256.
__device__ __forceinline__ void widen_i8(u32 codes, u32& even, u32& odd) {
    const u32 base = 0x43004300, minus_one = 0xbf80bf80;
    u32 high = codes >> 8;
    even = multiply_add_bf16((codes & 0x00800080) | base, minus_one, (codes & 0x007f007f) | base);
    odd = multiply_add_bf16((high & 0x00800080) | base, minus_one, (high & 0x007f007f) | base);
}
