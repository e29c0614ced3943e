// Other operations on single rows: gathers, norms after a layer, biases, soft caps.
#include "common.cuh"

namespace rows {

// No row. Its output is zero.
constexpr u32 NONE = 0xffffffffu;

// x + added, rounded as in the residual stream.
__device__ __forceinline__ void load_sum(const u16* x, const u16* added, float (&sum)[8]) {
    widen_bf16(*reinterpret_cast<const uint4*>(x), sum);
    if (!added) return;
    float more[8];
    widen_bf16(*reinterpret_cast<const uint4*>(added), more);
    for (int k = 0; k < 8; ++k) sum[k] += more[k];
    widen_bf16(pack_bf16(sum), sum);
}

__device__ __forceinline__ float squares(const float (&x)[8]) {
    float sum = 0.0f;
    for (int k = 0; k < 8; ++k) sum += x[k] * x[k];
    return sum;
}

__device__ __forceinline__ void scale_by(float (&x)[8], float scale, const float* weight) {
    float4 low = *reinterpret_cast<const float4*>(weight), high = *reinterpret_cast<const float4*>(weight + 4);
    x[0] *= scale * low.x, x[1] *= scale * low.y, x[2] *= scale * low.z, x[3] *= scale * low.w;
    x[4] *= scale * high.x, x[5] *= scale * high.y, x[6] *= scale * high.z, x[7] *= scale * high.w;
}

} // namespace rows

struct NormWanted {
    // [..][hidden], the residual stream.
    const u16* x;
    // [..][hidden], added to x before the norm. Null: nothing is added.
    const u16* added;
    // [hidden]
    const float* weight;
    // [rows]: the row of x, or NONE.
    const u32* indices;
    // [rows][hidden]
    u16* out;
    u32 hidden;
    float eps;
    u64 num_rows;
};

// out[i] = norm(x + added) * weight for row indices[i]: the last norm, only for rows whose logits are wanted. One
// block per row. Reads 2 or 4 bytes per element and writes 2: bound by memory bandwidth.
KERNEL(norm_wanted, NormWanted, 1024) {
    __shared__ float scratch[32];
    u32 idx = p.indices[blockIdx.x];
    u16* out = p.out + u64(blockIdx.x) * p.hidden;
    if (idx == rows::NONE) {
        for (u32 i = threadIdx.x * 8; i < p.hidden; i += blockDim.x * 8) {
            *reinterpret_cast<uint4*>(out + i) = make_uint4(0, 0, 0, 0);
        }
        return;
    }
    u64 row = u64(idx) * p.hidden;
    const u16 *x = p.x + row, *added = p.added ? p.added + row : nullptr;
    float here[8], sum = 0.0f;
    for (u32 i = threadIdx.x * 8; i < p.hidden; i += blockDim.x * 8) {
        rows::load_sum(x + i, added ? added + i : nullptr, here);
        sum += rows::squares(here);
    }
    float scale = rsqrtf(block_sum(sum, scratch) / float(p.hidden) + p.eps);
    for (u32 i = threadIdx.x * 8; i < p.hidden; i += blockDim.x * 8) {
        rows::load_sum(x + i, added ? added + i : nullptr, here);
        rows::scale_by(here, scale, p.weight + i);
        *reinterpret_cast<uint4*>(out + i) = pack_bf16(here);
    }
}

struct PostNorm {
    // [rows][hidden], the residual stream, read and written.
    u16* x;
    // [rows][hidden], the output of a part of the layer.
    const u16* added;
    // [hidden], the norm after the part.
    const float* post_weight;
    // [hidden], the norm before the next part. Null: there is none.
    const float* weight;
    // [rows][hidden]. Null if `weight` is null.
    u16* out;
    u32 hidden;
    float eps;
    u64 num_rows;
};

// x += norm(added) * post_weight; out = norm(x) * weight, one block per row. The sum is kept in bf16. Reads 4 bytes
// per element and writes 4: bound by memory bandwidth.
KERNEL(post_norm, PostNorm, 1024) {
    __shared__ float scratch[2][32];
    u64 row = u64(blockIdx.x) * p.hidden;
    u16* x = p.x + row;
    const u16* added = p.added + row;
    float here[8], more[8], sum = 0.0f;
    for (u32 i = threadIdx.x * 8; i < p.hidden; i += blockDim.x * 8) {
        widen_bf16(*reinterpret_cast<const uint4*>(added + i), more);
        sum += rows::squares(more);
    }
    float scale = rsqrtf(block_sum(sum, scratch[0]) / float(p.hidden) + p.eps);
    sum = 0.0f;
    for (u32 i = threadIdx.x * 8; i < p.hidden; i += blockDim.x * 8) {
        widen_bf16(*reinterpret_cast<const uint4*>(added + i), more);
        widen_bf16(*reinterpret_cast<const uint4*>(x + i), here);
        rows::scale_by(more, scale, p.post_weight + i);
        for (int k = 0; k < 8; ++k) here[k] += more[k];
        uint4 rounded = pack_bf16(here);
        *reinterpret_cast<uint4*>(x + i) = rounded;
        widen_bf16(rounded, here);
        sum += rows::squares(here);
    }
    if (!p.weight) return;
    scale = rsqrtf(block_sum(sum, scratch[1]) / float(p.hidden) + p.eps);
    // Each thread reads only what it wrote itself.
    for (u32 i = threadIdx.x * 8; i < p.hidden; i += blockDim.x * 8) {
        widen_bf16(*reinterpret_cast<const uint4*>(x + i), here);
        rows::scale_by(here, scale, p.weight + i);
        *reinterpret_cast<uint4*>(p.out + row + i) = pack_bf16(here);
    }
}

struct AddBias {
    // [rows][width]
    u16* x;
    // [width]
    const float* bias;
    u32 width;
    u32 num_rows;
};

// x += bias. Reads and writes 2 bytes per element: bound by memory bandwidth.
KERNEL(add_bias, AddBias, 256) {
    u32 i = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (i >= p.width) return;
    uint4* at = reinterpret_cast<uint4*>(p.x + u64(blockIdx.x) * p.width + i);
    float here[8];
    widen_bf16(*at, here);
    for (int k = 0; k < 8; ++k) here[k] += p.bias[i + k];
    *at = pack_bf16(here);
}

struct SoftCap {
    float* x;
    u64 len;
    float cap;
    u32 unused;
};

// x = cap * tanh(x / cap), four numbers per thread. Reads and writes 4 bytes per number, with about twenty
// operations: bound by memory bandwidth.
KERNEL(soft_cap, SoftCap, 256) {
    u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (i + 4 <= p.len) {
        float4* at = reinterpret_cast<float4*>(p.x + i);
        float4 x = *at;
        x.x = p.cap * tanhf(x.x / p.cap), x.y = p.cap * tanhf(x.y / p.cap);
        x.z = p.cap * tanhf(x.z / p.cap), x.w = p.cap * tanhf(x.w / p.cap);
        *at = x;
    } else {
        for (; i < p.len; ++i) p.x[i] = p.cap * tanhf(p.x[i] / p.cap);
    }
}
