// Attention with tensor cores: softmax and masks of tiles of 16 pairs. A lane holds the two pairs of rows `lane / 4`
// and `lane / 4 + 8` in the layout of `mma_bf16`.
#pragma once
#include "attention.cuh"

static_assert(KV_TYPE >= 2 && HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "attention_plain.cu is for others");

struct PrefillAttention {
    AttentionArgs a;
    // [num_tiles]: the sequence, or all ones for no tile, and the tile's first pair.
    const uint2* tiles;
    u64 num_tiles;
};

namespace attention {

// Masks columns outside of the positions `begin` to `end` of each of the lane's two pairs. Masked columns have weight
// zero.
struct Seen {
    u32 begin[2], end[2];

    __device__ __forceinline__ void hide(float (&scores)[4], u32 first_column) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 position = first_column + k % 2;
            if (position < begin[k / 2] || position >= end[k / 2]) scores[k] = MINUS_INFINITY;
        }
    }
};

// What the pairs `pair` and `pair + 8` see. `position_of` has the position of a pair's row.
template <class PositionOf>
__device__ __forceinline__ Seen seen_by(const AttentionArgs& a, u32 pair, u32 num_pairs, PositionOf position_of) {
    Seen seen;
    for (int r = 0; r < 2; ++r) {
        // Missing pairs use the positions of the last pair.
        u32 position = position_of(pair + 8 * r < num_pairs ? pair + 8 * r : num_pairs - 1);
        seen.begin[r] = first_seen(position, a.window), seen.end[r] = position + 1;
    }
    return seen;
}

// The work of a block of many rows.
struct PrefillTile {
    u32 sequence, first_pair;
    // Rows and pairs of the sequence.
    u32 first_row, num_pairs;
    // No pair attends to positions outside of this range.
    u32 seen_begin, seen_end;
    // Positions that every pair attends to.
    u32 common_begin, common_end;

    // Computes the work of this block, which has at most `num_pairs` pairs. Returns whether there is any.
    __device__ __forceinline__ bool find(const PrefillAttention& p, u32 most_pairs) {
        const AttentionArgs& a = p.a;
        sequence = p.tiles[blockIdx.x].x, first_pair = p.tiles[blockIdx.x].y;
        if (sequence == ~0u) return false;
        first_row = a.first_row[sequence], num_pairs = a.num_rows[sequence] * a.group;
        if (first_pair >= num_pairs) return false;
        u32 last_pair = first_pair + most_pairs <= num_pairs ? first_pair + most_pairs - 1 : num_pairs - 1;
        u32 first_position = position_of(a, first_pair), last_position = position_of(a, last_pair);
        seen_begin = first_seen(first_position, a.window), seen_end = last_position + 1;
        common_begin = first_seen(last_position, a.window), common_end = first_position + 1;
        return true;
    }

    __device__ __forceinline__ u32 position_of(const AttentionArgs& a, u32 pair) const {
        return a.positions[first_row + pair / a.group];
    }

    __device__ __forceinline__ Seen seen(const AttentionArgs& a, u32 pair) const {
        return seen_by(a, pair, num_pairs, [&](u32 pair) { return position_of(a, pair); });
    }

    // Whether every pair attends to all of these positions.
    __device__ __forceinline__ bool is_common(u32 first, u32 num) const {
        return first >= common_begin && first + num <= common_end;
    }
};

// Rows in shared memory are an odd multiple of 16 bytes apart. The same 16 bytes of eight rows are then in different
// banks, for copies and for ldmatrix.
__device__ constexpr int padded(int num_bytes) { return num_bytes / 16 % 2 == 0 ? num_bytes + 16 : num_bytes; }

// The running softmax of 16 pairs.
struct Running {
    float max[2];
    // Sums of this lane's columns only.
    float sum[2];
    float out[DIM / 8][4];

    __device__ __forceinline__ void begin() {
        max[0] = max[1] = MINUS_INFINITY;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n)
            for (int k = 0; k < 4; ++k) out[n][k] = 0.0f;
    }

    // Turns the scores of more columns, times `scale`, into weights. `factor` rescales the earlier results.
    template <int N> __device__ __forceinline__ void weigh(float (&scores)[N][4], float scale, float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float greatest = MINUS_INFINITY;
#pragma unroll
            for (int n = 0; n < N; ++n) greatest = max_of(greatest, max_of(scores[n][2 * r], scores[n][2 * r + 1]));
            greatest = max_of(greatest, shuffle_xor(greatest, 1));
            greatest = max_of(max[r], scale * max_of(greatest, shuffle_xor(greatest, 2)));
            float base = base_of(greatest);
            factor[r] = exp2_fast(max[r] - base);
            max[r] = greatest;
            sum[r] *= factor[r];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                for (int k = 2 * r; k < 2 * r + 2; ++k) {
                    scores[n][k] = exp2_fast(scores[n][k] * scale - base);
                    sum[r] += scores[n][k];
                }
            }
        }
    }

    // After the first tiles the maximum rarely grows.
    __device__ __forceinline__ void rescale(const float (&factor)[2]) {
        if (ballot(factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n) {
                out[n][0] *= factor[0], out[n][1] *= factor[0];
                out[n][2] *= factor[1], out[n][3] *= factor[1];
            }
        }
    }

    template <int N> __device__ __forceinline__ void weigh(float (&scores)[N][4]) {
        float factor[2];
        weigh(scores, 1.0f, factor);
        rescale(factor);
    }

    // Adds up the sums of all columns.
    __device__ __forceinline__ void end() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += shuffle_xor(sum[r], 1);
            sum[r] += shuffle_xor(sum[r], 2);
        }
    }
};

// The weights of 16 columns as the left side of the next product.
__device__ __forceinline__ void pack_weights(const float (&low)[4], const float (&high)[4], u32 (&a)[4]) {
    a[0] = pack_bf16(low[0], low[1]), a[1] = pack_bf16(low[2], low[3]);
    a[2] = pack_bf16(high[0], high[1]), a[3] = pack_bf16(high[2], high[3]);
}

// Converts four 8-bit codes to bf16: bytes 0 and 2, and bytes 1 and 3.
__device__ __forceinline__ void widen_codes(u32 codes, u32& even, u32& odd) {
    if (TYPE == 3) {
        widen_e4m3(codes, even, odd);
    } else {
        widen_i8(codes, even, odd);
    }
}

// Converts 16 codes to 16 numbers in bf16, in their order.
__device__ __forceinline__ void widen_16_codes(uint4 codes, uint4& first, uint4& second) {
    u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, wide[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 even, odd;
        widen_codes(words[i], even, odd);
        wide[2 * i] = pick_bytes(even, odd, 0x5410), wide[2 * i + 1] = pick_bytes(even, odd, 0x7632);
    }
    first = make_uint4(wide[0], wide[1], wide[2], wide[3]), second = make_uint4(wide[4], wide[5], wide[6], wide[7]);
}

} // namespace attention
