// Shared code of the kernels for causal attention over paged KV: attention_decode.cu (few rows of a sequence),
// attention_prefill.cu (many rows) and attention_plain.cu (all other cases).
//
// A sequence's rows are in the order of their positions, which follow each other without a gap in attention_decode.cu;
// their own keys and values are already in the cache. A row at position p attends to positions p + 1 - window up to and
// including p. The rows times the query heads of a kv head are the rows of one matrix, the *pairs*: pair = row * group +
// head in the group. The KV is read once for all of them. Softmax uses powers of two and a running maximum. Codes of 8-bit KV are exact in bf16:
// the scales of keys are multiplied into scores, those of values into weights.
//
//   HEAD_DIM  elements of a head; for tensor cores a multiple of 16, up to 256
//   KV_TYPE   type of KV elements: 0 f32, 1 f16, 2 bf16, 3 fp8 (E4M3), 4 int8
#pragma once
#include "common.cuh"

struct AttentionArgs {
    // [rows][q_stride], bf16: the query heads of a row come first.
    const u16* q;
    // [rows][num_kv_heads * group][HEAD_DIM], bf16.
    u16* out;
    // The layer's piece of block 0.
    const u8* kv;
    // [num_sequences][max_blocks]
    const u32* block_tables;
    // [num_sequences] each. A sequence without rows is skipped.
    const u32* first_row;
    const u32* num_rows;
    // [num_sequences]: the position of the first row, for few rows.
    const u32* start_idx;
    // [rows], for many rows and for all other cases.
    const u32* positions;
    u64 block_bytes;
    u64 half_bytes;
    u32 head_bytes;
    u32 block_size;
    u32 max_blocks;
    u32 num_kv_heads;
    u32 group;
    u32 q_stride;
    // Positions that a row attends to, its own included.
    u32 window;
    float scale;
    // 0: no cap.
    float soft_cap;
    u32 num_sequences;
    // HEAD_DIM and KV_TYPE.
    u32 head_dim;
    u32 kv_type;
};

namespace attention {

constexpr int DIM = HEAD_DIM;
constexpr int TYPE = KV_TYPE;
constexpr bool IS_SCALED = TYPE >= 3;
constexpr int ELEMENT_BYTES = TYPE == 0 ? 4 : TYPE <= 2 ? 2 : 1;
constexpr int VECTOR_BYTES = DIM * ELEMENT_BYTES;

// Turns a product of vectors into a score. The product times `factor` is the exponent of two, or the argument of the
// cap.
struct Rule {
    float factor;
    float cap;
};

__device__ __forceinline__ Rule rule_of(const AttentionArgs& a) {
    if (a.soft_cap == 0.0f) return {a.scale * LOG2_E, 0.0f};
    return {a.scale * LOG2_E * 2.0f / a.soft_cap, a.soft_cap * LOG2_E};
}

// cap * tanh(x), from 2 x log2(e). The error is within 1e-7 of the cap.
__device__ __forceinline__ float capped(float x, float cap) {
    return cap - 2.0f * cap * reciprocal_fast(exp2_fast(x) + 1.0f);
}

// The maximum to subtract. A maximum of minus infinity means that no position was attended to yet.
__device__ __forceinline__ float base_of(float max) { return max == MINUS_INFINITY ? 0.0f : max; }

// The first position that a row at `position` attends to.
__device__ __forceinline__ u32 first_seen(u32 position, u32 window) {
    return window <= position ? position + 1 - window : 0;
}

// Addresses of the keys of one kv head of a sequence.
struct Keys {
    const u8* head;
    const u32* blocks;
    u64 block_bytes;
    u32 block_size;

    // Bytes from `head` to the key of a position.
    __device__ __forceinline__ u64 offset(u32 position) const {
        u32 block = position / block_size;
        return blocks[block] * block_bytes + (position - block * block_size) * u32(VECTOR_BYTES);
    }

    // Bytes from `head` to the scale of a position's key.
    __device__ __forceinline__ u64 scale_offset(u32 position) const {
        u32 block = position / block_size;
        return blocks[block] * block_bytes + block_size * u32(DIM) + (position - block * block_size) * 2;
    }
};

__device__ __forceinline__ Keys keys_of(const AttentionArgs& a, u32 sequence, u32 kv_head) {
    return {a.kv + u64(kv_head) * a.head_bytes, a.block_tables + u64(sequence) * a.max_blocks, a.block_bytes, a.block_size};
}

// The query of a pair, and the place of its result: elements from a.q and a.out.
__device__ __forceinline__ const u16* query_of(const AttentionArgs& a, u32 first_row, u32 kv_head, u32 pair) {
    u32 row = pair / a.group, head = kv_head * a.group + pair % a.group;
    return a.q + u64(first_row + row) * a.q_stride + head * u32(DIM);
}

__device__ __forceinline__ u64 head_row(const AttentionArgs& a, u32 first_row, u32 kv_head, u32 pair) {
    return u64(first_row + pair / a.group) * (a.num_kv_heads * a.group) + kv_head * a.group + pair % a.group;
}

} // namespace attention
