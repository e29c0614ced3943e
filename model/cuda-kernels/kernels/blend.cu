// Blended prompts: the keys and values of passages, and how far a prompt's keys are from them.
#include "common.cuh"

struct KeepKv {
    // [rows][width]: queries, keys, values.
    const u16* qkv;
    // [rows][kv_width], output: keys, values. May be memory of the host.
    u16* to;
    u32 width;
    // Numbers of the keys and values of a row, a multiple of 8.
    u32 kv_width;
    u64 num_rows;
};

// Copies the keys and values of rows, as their projection left them. Reads and writes 2 bytes per number: bound by
// memory bandwidth, or by the link to the host.
KERNEL(keep_kv, KeepKv, 256) {
    u64 per_row = p.kv_width / 8, step = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < p.num_rows * per_row; i += step) {
        u64 row = i / per_row, at = i % per_row * 8;
        const u16* from = p.qkv + row * p.width + (p.width - p.kv_width) + at;
        *reinterpret_cast<uint4*>(p.to + row * p.kv_width + at) = *reinterpret_cast<const uint4*>(from);
    }
}

struct DeviateKeys {
    // [rows][width]: queries, keys, values.
    const u16* qkv;
    // [rows][2 num_kv_heads * head_dim]: the keys and values of the passage, from keep_kv.
    const u16* kept;
    // [num_kv_heads * head_dim], of the projection of keys. Null: the model has none.
    const float* bias;
    // [head_dim], the norm of key heads. Null: the model has none.
    const float* key_norm;
    // [rows], output.
    float* deviations;
    u32 width;
    u32 num_heads;
    u32 num_kv_heads;
    u32 head_dim;
    float eps;
    u32 num_rows;
};

// The squared distance of each row's keys from those that its passage has, before the rotation, over all heads. A warp
// computes a row. Reads 4 bytes per number of a key: bound by memory bandwidth.
KERNEL(deviate_keys, DeviateKeys, 128) {
    u32 row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= p.num_rows) return;
    const u16* mine = p.qkv + u64(row) * p.width + p.num_heads * p.head_dim;
    const u16* kept = p.kept + u64(row) * 2 * p.num_kv_heads * p.head_dim;
    float apart = 0.0f;
    for (u32 head = 0; head < p.num_kv_heads; ++head) {
        const u16 *a = mine + head * p.head_dim, *b = kept + head * p.head_dim;
        const float* bias = p.bias ? p.bias + head * p.head_dim : nullptr;
        auto number = [&](const u16* from, u32 i) { return widen_bf16(from[i]) + (bias ? bias[i] : 0.0f); };
        float scale_a = 1.0f, scale_b = 1.0f;
        if (p.key_norm) {
            float squares_a = 0.0f, squares_b = 0.0f;
            for (u32 i = lane; i < p.head_dim; i += WARP) {
                float x = number(a, i), y = number(b, i);
                squares_a += x * x, squares_b += y * y;
            }
            scale_a = rsqrtf(warp_sum(squares_a) / float(p.head_dim) + p.eps);
            scale_b = rsqrtf(warp_sum(squares_b) / float(p.head_dim) + p.eps);
        }
        for (u32 i = lane; i < p.head_dim; i += WARP) {
            float difference = number(a, i) * scale_a - number(b, i) * scale_b;
            if (p.key_norm) difference *= p.key_norm[i];
            apart += difference * difference;
        }
    }
    apart = warp_sum(apart);
    if (lane == 0) p.deviations[row] = apart;
}
