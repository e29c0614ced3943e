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

// out = (x + added) / sqrt(mean((x + added)^2) + eps) * weight, one block per row. The sum is kept in bf16. Reads and
// writes each row once, 6 or 8 bytes per element: bound by memory bandwidth.
KERNEL(add_norm, AddNorm, 1024) {
    __shared__ float scratch[32];
    u64 row = u64(blockIdx.x) * p.hidden;
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
    float scale = rsqrtf(block_sum(sum, scratch) / float(p.hidden) + p.eps);
    // Each thread reads only what it wrote itself.
    for (u32 i = threadIdx.x * 8; i < p.hidden; i += blockDim.x * 8) {
        float here[8];
        widen_bf16(*reinterpret_cast<const uint4*>(x + i), here);
        for (int k = 0; k < 8; ++k) here[k] *= scale * p.weight[i + k];
        *reinterpret_cast<uint4*>(p.out + row + i) = pack_bf16(here);
    }
}
