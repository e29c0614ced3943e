// Attention for any number of rows and any KV. See attention.cuh.
#include "attention.cuh"

struct PlainAttention {
    AttentionArgs a;
    // The largest number of rows of a sequence.
    u64 max_rows;
};

namespace attention {

// Element `i` of a vector in its stored type.
__device__ __forceinline__ float load_element(const u8* vector, u32 i) {
    if (TYPE == 0) return reinterpret_cast<const float*>(vector)[i];
    if (TYPE == 1) return kv::widen_f16(reinterpret_cast<const u16*>(vector)[i]);
    if (TYPE == 2) return widen_bf16(reinterpret_cast<const u16*>(vector)[i]);
    if (TYPE == 4) return reinterpret_cast<const i8*>(vector)[i];
    u32 even, odd;
    widen_e4m3(vector[i], even, odd);
    return low_bf16(even);
}

} // namespace attention

// Attention for any number of rows, KV type and block size. There is a block for each row and query head; its warps
// take turns at positions. Reads the KV once per row and head, one element at a time: correct, but slow.
KERNEL(plain_attention, PlainAttention, 256) {
    using namespace attention;
    constexpr u32 WARPS = 8, PARTS = (DIM + WARP - 1) / WARP;
    __shared__ float stats[2][WARPS];
    __shared__ float outs[WARPS][PARTS * WARP];
    const AttentionArgs& a = p.a;
    u32 sequence = blockIdx.z, row = blockIdx.y, kv_head = blockIdx.x / a.group, pair = row * a.group + blockIdx.x % a.group;
    if (row >= a.num_rows[sequence]) return;
    u32 first_row = a.first_row[sequence], position = a.positions[first_row + row];
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Keys keys = keys_of(a, sequence, kv_head);
    Rule rule = rule_of(a);
    const u16* query = query_of(a, first_row, kv_head, pair);
    float q[PARTS], out[PARTS] = {}, max = MINUS_INFINITY, sum = 0.0f;
    for (u32 i = 0; i < PARTS; ++i) q[i] = i * WARP + lane < DIM ? widen_bf16(query[i * WARP + lane]) : 0.0f;
    for (u32 seen = first_seen(position, a.window) + warp; seen <= position; seen += WARPS) {
        const u8* key = keys.head + keys.offset(seen);
        float dot = 0.0f;
        for (u32 i = 0; i < PARTS; ++i)
            if (i * WARP + lane < DIM) dot += q[i] * load_element(key, i * WARP + lane);
        float key_scale = 1.0f, value_scale = 1.0f;
        if (IS_SCALED) {
            const u8* scale = keys.head + keys.scale_offset(seen);
            key_scale = widen_bf16(*reinterpret_cast<const u16*>(scale));
            value_scale = widen_bf16(*reinterpret_cast<const u16*>(scale + a.half_bytes));
        }
        float score = warp_sum(dot) * rule.factor * key_scale;
        if (rule.cap != 0.0f) score = capped(score, rule.cap);
        float greatest = max_of(max, score), base = base_of(greatest);
        float factor = exp2_fast(max - base), weight = exp2_fast(score - base);
        max = greatest;
        sum = sum * factor + weight;
        for (u32 i = 0; i < PARTS; ++i) {
            out[i] *= factor;
            if (i * WARP + lane < DIM) {
                out[i] += weight * value_scale * load_element(key + a.half_bytes, i * WARP + lane);
            }
        }
    }
    if (lane == 0) stats[0][warp] = max, stats[1][warp] = sum;
    for (u32 i = 0; i < PARTS; ++i) outs[warp][i * WARP + lane] = out[i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < DIM; i += blockDim.x) {
        float greatest = MINUS_INFINITY, total = 0.0f, found = 0.0f;
        for (u32 w = 0; w < WARPS; ++w) greatest = max_of(greatest, stats[0][w]);
        float base = base_of(greatest);
        for (u32 w = 0; w < WARPS; ++w) {
            float factor = exp2_fast(stats[0][w] - base);
            total += factor * stats[1][w];
            found += factor * outs[w][i];
        }
        a.out[head_row(a, first_row, kv_head, pair) * DIM + i] = round_bf16(found / total);
    }
}
