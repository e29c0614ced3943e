// Root-mean-square norms of rows, and the addition to the residual stream before them.
#include "common.cuh"

struct AddNorm {
    // [rows][hidden], the residual stream. Written only if something is added.
    u16* x;
    // [rows][hidden], added to x before the norm. Null: nothing is added.
    const u16* added;
    // [hidden]
    const float* weight;
    // [rows][hidden]
    u16* out;
    u32 hidden;
    float eps;
    u64 num_rows;
};

namespace norms {

// x += added, and the factor of the row's norm.
__device__ __forceinline__ float add(const AddNorm& p, u64 row, float* scratch) {
    u16* x = p.x + row;
    float sum = 0.0f;
    for (u32 i = threadIdx.x * 8; i < p.hidden; i += blockDim.x * 8) {
        float here[8];
        widen_bf16(*reinterpret_cast<const uint4*>(x + i), here);
        if (p.added) {
            float more[8];
            widen_bf16(load_once(p.added + row + i), more);
            for (int k = 0; k < 8; ++k) here[k] += more[k];
            uint4 rounded = pack_bf16(here);
            *reinterpret_cast<uint4*>(x + i) = rounded;
            widen_bf16(rounded, here);
        }
        for (int k = 0; k < 8; ++k) sum += here[k] * here[k];
    }
    return rsqrtf(block_sum(sum, scratch) / float(p.hidden) + p.eps);
}

// Norms eight numbers from `i` on. Each thread reads only what it wrote itself.
__device__ __forceinline__ uint4 apply(const AddNorm& p, u64 row, u32 i, float scale) {
    float here[8];
    widen_bf16(*reinterpret_cast<const uint4*>(p.x + row + i), here);
    for (int k = 0; k < 8; ++k) here[k] *= scale * p.weight[i + k];
    uint4 rounded = pack_bf16(here);
    *reinterpret_cast<uint4*>(p.out + row + i) = rounded;
    return rounded;
}

} // namespace norms

// out = (x + added) / sqrt(mean((x + added)^2) + eps) * weight, one block per row. The sum is kept in bf16. Reads and
// writes each row once, 6 or 8 bytes per element: bound by memory bandwidth.
KERNEL(add_norm, AddNorm, 1024) {
    __shared__ float scratch[32];
    u64 row = u64(blockIdx.x) * p.hidden;
    float scale = norms::add(p, row, scratch);
    for (u32 i = threadIdx.x * 8; i < p.hidden; i += blockDim.x * 8) norms::apply(p, row, i, scale);
}

struct AddNormQuantise {
    AddNorm norm;
    // [rows][hidden], E4M3.
    u8* quantised;
    // [rows], or [hidden / 128][stride]: the factors that restore the numbers.
    float* scales;
    // At least the number of rows. 0 for add_norm_rows.
    u32 stride;
    u32 unused;
};

// add_norm, then quantise_rows (products.cu) of its output, with the same bits. It saves a launch and a read of 2 bytes
// per element.
KERNEL(add_norm_rows, AddNormQuantise, 1024) {
    __shared__ float sums[32], scratch[2][32];
    const AddNorm& n = p.norm;
    u64 row = u64(blockIdx.x) * n.hidden;
    float factor = norms::add(n, row, sums);
    fp8::Range range = {0.0f, 0.0f};
    for (u32 i = threadIdx.x * 8; i < n.hidden; i += blockDim.x * 8) {
        float here[8];
        widen_bf16(norms::apply(n, row, i, factor), here);
        range.take(here);
    }
    fp8::quantise_row(n.out + row, n.hidden, range, scratch, p.quantised + row, p.scales + blockIdx.x);
}

// The same with quantise_groups: 16 lanes share a group of 128.
KERNEL(add_norm_groups, AddNormQuantise, 1024) {
    __shared__ float scratch[32];
    const AddNorm& n = p.norm;
    u64 row = u64(blockIdx.x) * n.hidden;
    float factor = norms::add(n, row, scratch);
    for (u32 first = 0; first < n.hidden; first += blockDim.x * 8) {
        u32 i = first + threadIdx.x * 8;
        float here[8] = {};
        if (i < n.hidden) widen_bf16(norms::apply(n, row, i, factor), here);
        u8* to = p.quantised + row + i;
        fp8::quantise_group(here, i < n.hidden, to, p.scales + i / 128 * p.stride + blockIdx.x);
    }
}
