// The product of one row with a matrix in bf16: out[n] = sum over k of x[k] w[n][k].
#include "common.cuh"

struct MultiplyRow {
    // [k], bf16. k is a multiple of 8.
    const u16* x;
    // [n][k], bf16. Nothing on the device writes it.
    const u16* weights;
    // [n], or null.
    const float* bias;
    // [n]: f32 if is_f32, otherwise bf16.
    void* out;
    u32 k, n;
    u32 is_f32, unused;
};

namespace one_row {

// Each computes one output.
constexpr u32 WARPS = 8;
// Loads of a lane that are in flight together. On an H100, eight of them, or two or four outputs of a warp, are slower
// where kernels overlap.
constexpr u32 LOADS = 4;
// Numbers that a warp reads with one load of each lane.
constexpr u32 STEP = WARP * 8;

// The next loads of a lane. What is past the end of K becomes zero.
__device__ __forceinline__ void load(const u16* row, u32 k, u32 end, uint4 (&to)[LOADS]) {
#pragma unroll
    for (u32 i = 0; i < LOADS; ++i) {
        to[i] = make_uint4(0, 0, 0, 0);
        if (k + i * STEP < end) to[i] = load_once(row + k + i * STEP);
    }
}

} // namespace one_row

// A warp computes one output. Reads 2 bytes per weight, once, for two operations: bound by memory bandwidth. The 32 warps of
// four blocks of a multiprocessor have 64 KiB in flight. The first weights are read while the kernel ahead computes x. A
// row's sum has one order, always.
EARLY_KERNEL(multiply_row, MultiplyRow, one_row::WARPS * WARP, 4) {
    using namespace one_row;
    u32 lane = threadIdx.x % WARP, n = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (n >= p.n) return begin_kernel();
    const u16* row = p.weights + u64(n) * p.k;
    uint4 weights[LOADS];
    load(row, lane * 8, p.k, weights);
    begin_kernel();
    float sum = 0.0f;
    for (u32 k = lane * 8; k < p.k; k += LOADS * STEP) {
        if (k >= LOADS * STEP) load(row, k, p.k, weights);
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
            if (k + i * STEP >= p.k) break;
            float x[8], w[8];
            widen_bf16(*reinterpret_cast<const uint4*>(p.x + k + i * STEP), x);
            widen_bf16(weights[i], w);
#pragma unroll
            for (u32 j = 0; j < 8; ++j) sum += x[j] * w[j];
        }
    }
    sum = warp_sum(sum);
    if (lane != 0) return;
    if (p.bias) sum += p.bias[n];
    if (p.is_f32) {
        static_cast<float*>(p.out)[n] = sum;
    } else {
        static_cast<u16*>(p.out)[n] = round_bf16(sum);
    }
}
