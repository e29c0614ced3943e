// Attention for few rows of a sequence, in splits of its context. See attention.cuh.
#include "attention_tiles.cuh"

struct DecodeAttention {
    AttentionArgs a;
    // [rows][heads][max_splits][HEAD_DIM]: the weighted sum of a split's values.
    float* sums;
    // [rows][heads][max_splits][2]: the largest score, and the sum of the weights relative to it.
    float* stats;
    // [rows * heads]: how many blocks have written their split, for each kv head and tile of pairs of a sequence, from
    // its first row on. Zeros between launches.
    u32* num_done;
    u32 max_splits;
    u32 min_split;
    // The largest number of rows of a sequence.
    u32 max_rows;
    u32 unused;
};

namespace attention {

// How a sequence's positions are split. It depends on the sequence's own length only, so that the result does not
// depend on the batch.
struct Splits {
    u32 begin, tokens, num;
};

__device__ __forceinline__ Splits splits_of(const DecodeAttention& p, u32 start, u32 num_rows) {
    u32 end = start + num_rows, begin = first_seen(start, p.a.window) / 16 * 16;
    u32 tokens = ((end - begin + p.max_splits - 1) / p.max_splits + 63) / 64 * 64;
    tokens = tokens < p.min_split ? p.min_split : tokens;
    return {begin, tokens, (end - begin + tokens - 1) / tokens};
}

namespace decode {

constexpr int WARPS = DIM <= 128 ? 4 : 2;
// Positions that a warp processes at a time.
constexpr int TOKENS = 16;
constexpr int STAGES = IS_SCALED ? 4 : 2;
constexpr int ROW = padded(VECTOR_BYTES);
constexpr int STAGE_BYTES = 2 * TOKENS * ROW;
// 16-byte pieces of a vector.
constexpr int PIECES = VECTOR_BYTES / 16;
// Floats of a pair's sums in shared memory: the rows that a warp writes at once begin eight banks apart.
constexpr int SUMS_ROW = DIM + 8;
// With 8-bit values a lane reads SPREAD adjacent columns at once, which belong to SPREAD products. Column c of
// product n is element (n / SPREAD * 8 + c) * SPREAD + n % SPREAD of the head.
constexpr int SPREAD = !IS_SCALED ? 1 : DIM % 32 == 0 ? 4 : 2;

__device__ __forceinline__ int dim_of(int n, int column) { return (n / SPREAD * 8 + column) * SPREAD + n % SPREAD; }

// Loads the left side of the scores' product, in the element order of the keys.
__device__ __forceinline__ void load_query(u32 (&q)[DIM / 16][4], int row, const u16* query, u32 in) {
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        if (IS_SCALED) {
            uint2 four = {0, 0};
            if (query) four = *reinterpret_cast<const uint2*>(query + 16 * step + 4 * in);
            q[step][row] = pick_bytes(four.x, four.y, 0x5410);
            q[step][row + 2] = pick_bytes(four.x, four.y, 0x7632);
        } else {
            q[step][row] = query ? *reinterpret_cast<const u32*>(query + 16 * step + 2 * in) : 0;
            q[step][row + 2] = query ? *reinterpret_cast<const u32*>(query + 16 * step + 8 + 2 * in) : 0;
        }
    }
}

// scores = Q K^T of 16 keys
__device__ __forceinline__ void score(float (&scores)[2][4], const u32 (&q)[DIM / 16][4], const u8* keys, u32 lane) {
    u32 group = lane / 4, in = lane % 4;
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        u32 k[2][2];
        if (IS_SCALED) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                u32 codes = *reinterpret_cast<const u32*>(keys + (8 * n + group) * ROW + 16 * step + 4 * in);
                widen_codes(codes, k[n][0], k[n][1]);
            }
        } else {
            u32 m[4];
            load_matrices(m, keys + (lane % 8 + lane / 16 * 8) * ROW + 32 * step + lane / 8 % 2 * 16);
            k[0][0] = m[0], k[0][1] = m[1], k[1][0] = m[2], k[1][1] = m[3];
        }
        mma_bf16(scores[0], q[step], k[0]);
        mma_bf16(scores[1], q[step], k[1]);
    }
}

// out += weights V of 16 values
__device__ __forceinline__ void add(float (&out)[DIM / 8][4], const u32 (&weights)[4], const u8* values, u32 lane) {
    u32 group = lane / 4, in = lane % 4;
    if constexpr (!IS_SCALED) {
#pragma unroll
        for (int n = 0; n < DIM / 8; n += 2) {
            u32 m[4];
            load_matrices_transposed(m, values + lane % 16 * ROW + 16 * n + lane / 16 * 16);
            u32 low[2] = {m[0], m[1]}, high[2] = {m[2], m[3]};
            mma_bf16(out[n], weights, low);
            mma_bf16(out[n + 1], weights, high);
        }
    } else {
#pragma unroll
        for (int n = 0; n < DIM / 8; n += SPREAD) {
            const u8* at = values + 2 * in * ROW + (n * 8 + group * SPREAD);
            u32 v[4][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u8* row = at + 8 * half * ROW;
                if (SPREAD == 4) {
                    u32 first = *reinterpret_cast<const u32*>(row), second = *reinterpret_cast<const u32*>(row + ROW);
                    widen_codes(pick_bytes(first, second, 0x5410), v[0][half], v[1][half]);
                    widen_codes(pick_bytes(first, second, 0x7632), v[2][half], v[3][half]);
                } else {
                    u32 first = *reinterpret_cast<const u16*>(row), second = *reinterpret_cast<const u16*>(row + ROW);
                    widen_codes(first | second << 16, v[0][half], v[1][half]);
                }
            }
#pragma unroll
            for (int j = 0; j < SPREAD; ++j) mma_bf16(out[n + j], weights, v[j]);
        }
    }
}

// Merges the splits of one pair, by a warp, always in the same order. `to` is the pair's place in the results.
__device__ __forceinline__ void merge_splits(const DecodeAttention& p, u64 to, u32 num_splits, u32 lane) {
    const float* sums = p.sums + to * p.max_splits * DIM;
    const float2* stats = reinterpret_cast<const float2*>(p.stats) + to * p.max_splits;
    float max = MINUS_INFINITY;
    for (u32 i = lane; i < num_splits; i += WARP) max = max_of(max, stats[i].x);
    float base = base_of(warp_max(max));
    float sum = 0.0f;
    constexpr int PARTS = (DIM + 127) / 128;
    float4 out[PARTS] = {};
    for (u32 first = 0; first < num_splits; first += WARP) {
        float2 mine = make_float2(MINUS_INFINITY, 0.0f);
        if (first + lane < num_splits) mine = stats[first + lane];
        float weight = exp2_fast(mine.x - base);
        sum += weight * mine.y;
        u32 num = num_splits - first < WARP ? num_splits - first : WARP;
#pragma unroll 4
        for (u32 i = 0; i < num; ++i, sums += DIM) {
            float factor = shuffle(weight, i);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                u32 column = part * 128 + lane * 4;
                if (column >= DIM) continue;
                float4 some = *reinterpret_cast<const float4*>(sums + column);
                out[part].x += factor * some.x, out[part].y += factor * some.y;
                out[part].z += factor * some.z, out[part].w += factor * some.w;
            }
        }
    }
    float whole = 1.0f / warp_sum(sum);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        u32 column = part * 128 + lane * 4;
        if (column >= DIM) continue;
        uint2 rounded = make_uint2(pack_bf16(out[part].x * whole, out[part].y * whole),
                                   pack_bf16(out[part].z * whole, out[part].w * whole));
        *reinterpret_cast<uint2*>(p.a.out + to * DIM + column) = rounded;
    }
}

} // namespace decode

} // namespace attention

// Attention for few rows. There is a block for each split of the context, 16 pairs of a kv head, and sequence. Its
// warps take turns at 16 positions each, and each warp has a pipeline of its own. A single split writes `out`. Of
// several splits, each writes its sums, and the last block to do so merges them, mostly from the L2 cache:
// 4 (HEAD_DIM + 2) bytes per pair and split.
//
// Reads each key and value once per 16 pairs: 4 HEAD_DIM bytes per position and kv head in bf16, half of that in
// eight bits, for 32 HEAD_DIM multiplications: 16 operations for each byte, or 32, where an H100's data sheet has 295. So
// it is bound by memory bandwidth. With heads of 128 elements three blocks fit a multiprocessor. Each of their warps
// has a tile of 8 KiB in flight, 96 KiB in all: what a 132nd of 3.35 TB/s delivers in 3.9 microseconds.
//
// What it reads first was written before the kernel ahead of it, which stores the new rows: the copies of older
// positions start while that kernel runs.
EARLY_KERNEL(decode_attention, DecodeAttention, attention::decode::WARPS * WARP) {
    using namespace attention;
    using namespace attention::decode;
    DYNAMIC_SHARED(shared);
    const AttentionArgs& a = p.a;
    // Blocks of the same split start together, so that the later readers hit the L2 cache.
    u32 num_tiles = (p.max_rows * a.group + 15) / 16, split = blockIdx.x / num_tiles;
    u32 sequence = blockIdx.z, kv_head = blockIdx.y, first_pair = blockIdx.x % num_tiles * 16;
    u32 num_rows = a.num_rows[sequence], num_pairs = num_rows * a.group;
    if (first_pair >= num_pairs) return begin_kernel();
    u32 start = a.start_idx[sequence], first_row = a.first_row[sequence];
    Splits splits = splits_of(p, start, num_rows);
    if (split >= splits.num) return begin_kernel();
    // No pair attends to positions outside of this range.
    u32 seen_begin = first_seen(start, a.window), seen_end = start + num_rows;
    u32 begin = splits.begin + split * splits.tokens;
    u32 end = begin + splits.tokens < seen_end ? begin + splits.tokens : seen_end;

    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, in = lane % 4;
    Keys keys = keys_of(a, sequence, kv_head);
    u8* stages = shared + warp * (STAGES * STAGE_BYTES);
    // A register per stage, the oldest first: lanes 0 to 15 hold scales of keys, the others scales of values, in
    // bf16.
    u32 scales[STAGES] = {};
    // A lane computes the address of one position: its block, read one tile ahead, and its offset in the block.
    u32 block = 0, token = 0;
    bool is_mine_wanted = false;
    auto find_block = [&](u32 tile) {
        u32 position = begin + (tile * WARPS + warp) * TOKENS + lane % TOKENS;
        is_mine_wanted = position >= seen_begin && position < end;
        u32 block_idx = position / a.block_size;
        token = position - block_idx * a.block_size;
        block = is_mine_wanted ? keys.blocks[block_idx] : 0;
    };
    auto begin_copy = [&](u32 tile, u32 stage) {
        u64 place = block * a.block_bytes, offset = place + token * u32(VECTOR_BYTES);
        if constexpr (IS_SCALED) {
            const u8* scale = keys.head + (lane < TOKENS ? 0 : a.half_bytes) + place + a.block_size * u32(DIM) + token * 2;
#pragma unroll
            for (int i = 0; i + 1 < STAGES; ++i) scales[i] = scales[i + 1];
            scales[STAGES - 1] = is_mine_wanted ? *reinterpret_cast<const u16*>(scale) : 0;
        }
        find_block(tile + 1);
        u32 low = u32(offset), high = u32(offset >> 32), first = begin + (tile * WARPS + warp) * TOKENS;
        u8* to = stages + stage * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < (TOKENS * PIECES + WARP - 1) / WARP; ++i) {
            u32 piece = i * WARP + lane, row = piece / PIECES % TOKENS, column = piece % PIECES * 16;
            u64 at = u64(shuffle(high, row)) << 32 | shuffle(low, row);
            if (TOKENS * PIECES % WARP != 0 && piece >= TOKENS * PIECES) continue;
            const u8* from = keys.head + at + column;
            bool is_wanted = first + row >= seen_begin && first + row < end;
            copy_async(to + row * ROW + column, from, is_wanted);
            copy_async(to + TOKENS * ROW + row * ROW + column, from + a.half_bytes, is_wanted);
        }
        end_copy_group();
    };
    find_block(0);
    bool is_old = begin + (STAGES - 1) * (WARPS * TOKENS) <= start;
    if (!is_old) begin_kernel();
#pragma unroll
    for (int i = 0; i + 1 < STAGES; ++i) begin_copy(i, i);
    if (is_old) begin_kernel();

    u32 q[DIM / 16][4];
    for (int r = 0; r < 2; ++r) {
        u32 pair = first_pair + group + 8 * r;
        load_query(q, r, pair < num_pairs ? query_of(a, first_row, kv_head, pair) : nullptr, in);
    }
    auto position_of = [&](u32 pair) { return start + pair / a.group; };
    Seen seen = seen_by(a, first_pair + group, num_pairs, position_of);
    // Positions that every pair attends to.
    u32 last_pair = first_pair + 15 < num_pairs ? first_pair + 15 : num_pairs - 1;
    u32 common_begin = first_seen(position_of(last_pair), a.window), common_end = position_of(first_pair) + 1;
    Rule rule = rule_of(a);

    Running running;
    running.begin();
    for (u32 tile = 0; begin + (tile * WARPS + warp) * TOKENS < end; ++tile) {
        begin_copy(tile + STAGES - 1, (tile + STAGES - 1) % STAGES);
        await_copies<STAGES - 1>();
        __syncwarp();
        const u8* here = stages + tile % STAGES * STAGE_BYTES;
        float scores[2][4] = {};
        score(scores, q, here, lane);
        u32 first = begin + (tile * WARPS + warp) * TOKENS;
        bool is_common = first >= common_begin && first + TOKENS <= common_end;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float factor = rule.factor;
                if (IS_SCALED) factor *= widen_bf16(u16(shuffle(scales[0], 8 * n + 2 * in + k)));
                scores[n][k] *= factor, scores[n][k + 2] *= factor;
            }
            if (rule.cap != 0.0f) {
                for (int k = 0; k < 4; ++k) scores[n][k] = capped(scores[n][k], rule.cap);
            }
            if (!is_common) seen.hide(scores[n], first + 8 * n + 2 * in);
        }
        running.weigh(scores);
        if (IS_SCALED) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float scale = widen_bf16(u16(shuffle(scales[0], TOKENS + 8 * n + 2 * in + k)));
                    scores[n][k] *= scale, scores[n][k + 2] *= scale;
                }
            }
        }
        u32 weights[4];
        pack_weights(scores[0], scores[1], weights);
        add(running.out, weights, here + TOKENS * ROW, lane);
        __syncwarp();
    }
    running.end();

    // Merges the results of the warps, always in the same order. A barrier does not wait for the copies beyond the end,
    // which would overwrite them.
    await_copies<0>();
    __syncthreads();
    float* stats = reinterpret_cast<float*>(shared); // [2][WARPS][16]
    float* outs = stats + 2 * WARPS * 16;            // [WARPS][16][SUMS_ROW]
    u32 num = num_pairs - first_pair < 16 ? num_pairs - first_pair : 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (group + 8 * r >= num) continue;
        u32 row = warp * 16 + group + 8 * r;
        if (in == 0) stats[row] = running.max[r], stats[WARPS * 16 + row] = running.sum[r];
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n)
            for (int k = 0; k < 2; ++k) outs[row * SUMS_ROW + dim_of(n, 2 * in + k)] = running.out[n][2 * r + k];
    }
    __syncthreads();
    for (u32 i = threadIdx.x * 4; i < num * DIM; i += WARPS * WARP * 4) {
        u32 row = i / DIM, column = i % DIM;
        float max = MINUS_INFINITY;
        for (int w = 0; w < WARPS; ++w) max = max_of(max, stats[w * 16 + row]);
        float base = base_of(max), sum = 0.0f;
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int w = 0; w < WARPS; ++w) {
            float factor = exp2_fast(stats[w * 16 + row] - base);
            float4 some = *reinterpret_cast<const float4*>(outs + (w * 16 + row) * SUMS_ROW + column);
            sum += factor * stats[WARPS * 16 + w * 16 + row];
            out.x += factor * some.x, out.y += factor * some.y, out.z += factor * some.z, out.w += factor * some.w;
        }
        u64 to = head_row(a, first_row, kv_head, first_pair + row);
        if (splits.num == 1) {
            float whole = 1.0f / sum;
            uint2 rounded = make_uint2(pack_bf16(out.x * whole, out.y * whole), pack_bf16(out.z * whole, out.w * whole));
            *reinterpret_cast<uint2*>(a.out + to * DIM + column) = rounded;
        } else {
            u64 part = to * p.max_splits + split;
            *reinterpret_cast<float4*>(p.sums + part * DIM + column) = out;
            if (column == 0) *reinterpret_cast<float2*>(p.stats + part * 2) = make_float2(max, sum);
        }
    }
    if (splits.num == 1) return;
    u32* num_done = p.num_done + first_row * (a.num_kv_heads * a.group) + kv_head * num_pairs + first_pair / 16;
    if (!is_last_part(num_done, splits.num, reinterpret_cast<u32*>(shared))) return;
#pragma unroll 1
    for (u32 row = warp; row < num; row += WARPS)
        merge_splits(p, head_row(a, first_row, kv_head, first_pair + row), splits.num, lane);
}
