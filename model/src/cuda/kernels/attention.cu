// Causal attention over paged KV: few rows of a sequence (decode), many (prefill), and a plain kernel for whatever the
// other two do not take.
//
// A sequence's rows are at positions start_idx, start_idx + 1, ..; their own keys and values are in the cache already.
// Row r sees positions start_idx + r + 1 - window up to and including start_idx + r. Query heads of a kv head times rows
// are the rows of a matrix, *pairs*: pair = row * group + head in the group, so that KV is read once for all of them.
// Softmax goes by powers of two with a running maximum. Codes of eight-bit KV are exact in bf16: scales of keys are
// multiplied into scores, those of values into weights.
//
//   HEAD_DIM  a multiple of 16, up to 256
//   KV_TYPE   0 f32, 1 f16, 2 bf16, 3 fp8 (E4M3), 4 int8; the tensor cores' kernels are there for the last three
#include "common.cuh"

struct Attention {
    // [rows][q_stride], bf16: the query heads of a row come first.
    const u16* q;
    // [rows][num_kv_heads * group][HEAD_DIM], bf16
    u16* out;
    // The layer's piece in block 0.
    const u8* kv;
    // [num_sequences][max_blocks]
    const u32* block_tables;
    // [num_sequences] each; a sequence without rows is passed over.
    const u32* first_row;
    const u32* num_rows;
    const u32* start_idx;
    u64 block_bytes;
    u64 half_bytes;
    u32 head_bytes;
    u32 block_size;
    u32 max_blocks;
    u32 num_kv_heads;
    u32 group;
    u32 q_stride;
    // Positions that a row sees, its own included.
    u32 window;
    float scale;
    // 0: none.
    float soft_cap;
    u32 num_sequences;
    // HEAD_DIM and KV_TYPE
    u32 head_dim;
    u32 kv_type;
};

struct DecodeAttention {
    Attention a;
    // [rows][heads][max_splits][HEAD_DIM]: weighted sums of a split's values ...
    float* sums;
    // [rows][heads][max_splits][2]: ... the greatest score, and the sum of weights relative to it.
    float* stats;
    u32 max_splits;
    u32 min_split;
    // The most rows that a sequence has.
    u32 max_rows;
    u32 unused;
};

struct MergeSplits {
    DecodeAttention decode;
};

struct PrefillAttention {
    Attention a;
    // [num_tiles]: sequence (none if all ones), and the tile's first pair
    const uint2* tiles;
    u64 num_tiles;
};

struct PlainAttention {
    Attention a;
    // The most rows that a sequence has.
    u64 max_rows;
};

namespace attention {

constexpr int DIM = HEAD_DIM;
constexpr int TYPE = KV_TYPE;
constexpr bool IS_SCALED = TYPE >= 3;
constexpr int ELEMENT_BYTES = TYPE == 0 ? 4 : TYPE <= 2 ? 2 : 1;
constexpr int VECTOR_BYTES = DIM * ELEMENT_BYTES;

// What scores are made of: a product of vectors times `factor` is the power of two, or what the cap is put on.
struct Rule {
    float factor;
    float cap;
};

__device__ __forceinline__ Rule rule_of(const Attention& a) {
    if (a.soft_cap == 0.0f) return {a.scale * LOG2_E, 0.0f};
    return {a.scale * LOG2_E * 2.0f / a.soft_cap, a.soft_cap * LOG2_E};
}

// cap * tanh(x), from 2 x log2(e); within 1e-7 of the cap.
__device__ __forceinline__ float capped(float x, float cap) {
    return cap - 2.0f * cap * reciprocal_fast(exp2_fast(x) + 1.0f);
}

// Less a maximum; nothing has been seen yet where it is minus infinity.
__device__ __forceinline__ float base_of(float max) { return max == MINUS_INFINITY ? 0.0f : max; }

// The first position that a row at `position` sees.
__device__ __forceinline__ u32 first_seen(u32 position, u32 window) {
    return window <= position ? position + 1 - window : 0;
}

// Keys of one kv head of a sequence.
struct Keys {
    const u8* head;
    const u32* blocks;
    u64 block_bytes;
    u32 block_size;

    // Bytes from `head` to a position's key.
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

__device__ __forceinline__ Keys keys_of(const Attention& a, u32 sequence, u32 kv_head) {
    return {a.kv + u64(kv_head) * a.head_bytes, a.block_tables + u64(sequence) * a.max_blocks, a.block_bytes, a.block_size};
}

// Where a pair's query is, and its result: elements from a.q and a.out.
__device__ __forceinline__ const u16* query_of(const Attention& a, u32 first_row, u32 kv_head, u32 pair) {
    u32 row = pair / a.group, head = kv_head * a.group + pair % a.group;
    return a.q + u64(first_row + row) * a.q_stride + head * u32(DIM);
}

__device__ __forceinline__ u64 head_row(const Attention& a, u32 first_row, u32 kv_head, u32 pair) {
    return u64(first_row + pair / a.group) * (a.num_kv_heads * a.group) + kv_head * a.group + pair % a.group;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor cores. A lane has of 16 pairs the two in rows `lane / 4` and that + 8 of what `mma_bf16` gives.

#if KV_TYPE >= 2 && HEAD_DIM % 16 == 0 && HEAD_DIM <= 256

// Rows in shared memory are an odd number of 16 bytes apart: eight rows, 16 bytes of each, are then in different banks,
// for copies as well as for ldmatrix.
__device__ constexpr int padded(int num_bytes) { return num_bytes / 16 % 2 == 0 ? num_bytes + 16 : num_bytes; }

// The softmax of 16 pairs so far.
struct Running {
    float max[2];
    // Of this lane's columns.
    float sum[2];
    float out[DIM / 8][4];

    __device__ __forceinline__ void begin() {
        max[0] = max[1] = MINUS_INFINITY;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n)
            for (int k = 0; k < 4; ++k) out[n][k] = 0.0f;
    }

    // Scores of so many more columns become weights; what has been found is put on the new maximum, if that has grown.
    template <int N> __device__ __forceinline__ void weigh(float (&scores)[N][4]) {
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float greatest = max[r];
#pragma unroll
            for (int n = 0; n < N; ++n) greatest = max_of(greatest, max_of(scores[n][2 * r], scores[n][2 * r + 1]));
            greatest = max_of(greatest, shuffle_xor(greatest, 1));
            greatest = max_of(greatest, shuffle_xor(greatest, 2));
            float base = base_of(greatest);
            factor[r] = exp2_fast(max[r] - base);
            max[r] = greatest;
            sum[r] *= factor[r];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                for (int k = 2 * r; k < 2 * r + 2; ++k) {
                    scores[n][k] = exp2_fast(scores[n][k] - base);
                    sum[r] += scores[n][k];
                }
            }
        }
        // After the first tiles that seldom happens.
        if (ballot(factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n) {
                out[n][0] *= factor[0], out[n][1] *= factor[0];
                out[n][2] *= factor[1], out[n][3] *= factor[1];
            }
        }
    }

    // The sums of all columns.
    __device__ __forceinline__ void end() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += shuffle_xor(sum[r], 1);
            sum[r] += shuffle_xor(sum[r], 2);
        }
    }
};

// Weights of 16 columns as the left side of the next product.
__device__ __forceinline__ void pack_weights(const float (&low)[4], const float (&high)[4], u32 (&a)[4]) {
    a[0] = pack_bf16(low[0], low[1]), a[1] = pack_bf16(low[2], low[3]);
    a[2] = pack_bf16(high[0], high[1]), a[3] = pack_bf16(high[2], high[3]);
}

// Positions `begin` to `end` that each of the lane's two pairs sees; those of other columns weigh nothing.
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

__device__ __forceinline__ Seen seen_by(const Attention& a, u32 start, u32 pair, u32 num_pairs) {
    Seen seen;
    for (int r = 0; r < 2; ++r) {
        // Pairs that are not there see what the last one does.
        u32 position = start + (pair + 8 * r < num_pairs ? pair + 8 * r : num_pairs - 1) / a.group;
        seen.begin[r] = first_seen(position, a.window), seen.end[r] = position + 1;
    }
    return seen;
}

// Four codes of eight bits as bf16: bytes 0 and 2, 1 and 3.
__device__ __forceinline__ void widen_codes(u32 codes, u32& even, u32& odd) {
    if (TYPE == 3) {
        widen_e4m3(codes, even, odd);
    } else {
        widen_i8(codes, even, odd);
    }
}

// How a sequence's positions are divided: a function of its own length, so that its result does not depend on the batch.
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
// Positions that a warp takes at a time.
constexpr int TOKENS = 16;
constexpr int STAGES = IS_SCALED ? 4 : 2;
constexpr int ROW = padded(VECTOR_BYTES);
constexpr int STAGE_BYTES = 2 * TOKENS * ROW;
// 16-byte pieces of a vector.
constexpr int PIECES = VECTOR_BYTES / 16;
// Of eight-bit values a lane reads so many neighbouring columns at once, which belong to as many products: column c of
// product n is number (n / SPREAD * 8 + c) * SPREAD + n % SPREAD of the head.
constexpr int SPREAD = !IS_SCALED ? 1 : DIM % 32 == 0 ? 4 : 2;

__device__ __forceinline__ int dim_of(int n, int column) { return (n / SPREAD * 8 + column) * SPREAD + n % SPREAD; }

// The left side of the scores' product, in the order in which keys come.
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

} // namespace decode

namespace prefill {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
// Tiles of 16 pairs that a warp has: what it reads of keys and values serves all of them.
constexpr int TILES = DIM <= 128 ? 2 : 1;
constexpr int PAIRS = WARPS * TILES * 16;
// Positions at a time.
constexpr int TOKENS = 32;
constexpr int ROW = padded(DIM * 2);
constexpr int KV_BYTES = TOKENS * ROW;
// 16-byte pieces of a vector as it is in the cache.
constexpr int PIECES = VECTOR_BYTES / 16;

// Shared memory: queries (later results), keys and values in bf16 (two tiles where they are copied as they are), a tile on
// its way where they are widened, and its scales. What pads the first rows of queries has the places of positions.
constexpr int KV_AT = PAIRS * ROW;
constexpr int RAW_AT = KV_AT + (IS_SCALED ? 2 : 4) * KV_BYTES;
constexpr int SCALES_AT = RAW_AT + (IS_SCALED ? 2 * TOKENS * VECTOR_BYTES : 0);
constexpr int SHARED_BYTES = SCALES_AT + (IS_SCALED ? 2 * TOKENS * 4 : 0);
static_assert(SHARED_BYTES <= 99 << 10, "what a block of sm_89 has");
static_assert(ROW >= DIM * 2 + 8 && PAIRS >= 2 * TOKENS, "room for places");

// Bytes from a head's first key to a position's, for two tiles of positions.
__device__ __forceinline__ u64& place(u8* shared, u32 buffer, u32 i) {
    return *reinterpret_cast<u64*>(shared + (buffer * TOKENS + i) * ROW + DIM * 2);
}

// Sixteen codes become 32 bytes. Half of the lanes begin with the second 16, so that eight lanes are in eight banks.
__device__ __forceinline__ void store_widened(u8* to, uint4 codes, bool is_second_first) {
    u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, wide[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 even, odd;
        widen_codes(words[i], even, odd);
        wide[2 * i] = pick_bytes(even, odd, 0x5410), wide[2 * i + 1] = pick_bytes(even, odd, 0x7632);
    }
    uint4 first = make_uint4(wide[0], wide[1], wide[2], wide[3]), second = make_uint4(wide[4], wide[5], wide[6], wide[7]);
    u32 shift = is_second_first ? 16 : 0;
    *reinterpret_cast<uint4*>(to + shift) = is_second_first ? second : first;
    *reinterpret_cast<uint4*>(to + (16 - shift)) = is_second_first ? first : second;
}

} // namespace prefill

#endif

} // namespace attention

#if KV_TYPE >= 2 && HEAD_DIM % 16 == 0 && HEAD_DIM <= 256

// Attention of few rows: a block for each split of the context, 16 pairs of a kv head, and sequence; its warps take turns
// at 16 positions each, every warp with a pipeline of its own. One split writes `out`, several leave sums to merge_splits.
//
// Reads each key and value once for 16 pairs: 4 HEAD_DIM bytes a position and kv head in bf16, half of it in eight bits,
// for 32 HEAD_DIM multiplications. By an H100's data sheet that is a tenth of what its tensor cores do meanwhile, a
// fifth of eight bits: bound by memory. With heads of 128 three blocks fit a multiprocessor, and a tile of 8 KiB under
// way for each of their warps is some 100 KB, five times its share of the bandwidth times half a microsecond.
KERNEL(decode_attention, DecodeAttention, attention::decode::WARPS * WARP) {
    using namespace attention;
    using namespace attention::decode;
    DYNAMIC_SHARED(shared);
    const Attention& a = p.a;
    // Blocks of the same split begin together: what one reads the others find in the second cache.
    u32 num_tiles = (p.max_rows * a.group + 15) / 16, split = blockIdx.x / num_tiles;
    u32 sequence = blockIdx.z, kv_head = blockIdx.y, first_pair = blockIdx.x % num_tiles * 16;
    u32 num_rows = a.num_rows[sequence], num_pairs = num_rows * a.group;
    if (first_pair >= num_pairs) return;
    u32 start = a.start_idx[sequence], first_row = a.first_row[sequence];
    Splits splits = splits_of(p, start, num_rows);
    if (split >= splits.num) return;
    // Nobody sees positions outside of these.
    u32 seen_begin = first_seen(start, a.window), seen_end = start + num_rows;
    u32 begin = splits.begin + split * splits.tokens;
    u32 end = begin + splits.tokens < seen_end ? begin + splits.tokens : seen_end;

    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, in = lane % 4;
    Keys keys = keys_of(a, sequence, kv_head);
    u8* stages = shared + warp * (STAGES * STAGE_BYTES);
    // Of the stages, the oldest first: lanes 0 to 15 have scales of keys, the others of values; bf16.
    u32 scales[STAGES] = {};
    // A lane finds the place of one position: its block, read a tile ahead, and its place in that.
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
    begin_copy(0, 0);
    if constexpr (STAGES > 2) begin_copy(1, 1), begin_copy(2, 2);

    u32 q[DIM / 16][4];
    for (int r = 0; r < 2; ++r) {
        u32 pair = first_pair + group + 8 * r;
        load_query(q, r, pair < num_pairs ? query_of(a, first_row, kv_head, pair) : nullptr, in);
    }
    Seen seen = seen_by(a, start, first_pair + group, num_pairs);
    // Columns that every pair sees.
    u32 last_pair = first_pair + 15 < num_pairs ? first_pair + 15 : num_pairs - 1;
    u32 common_begin = first_seen(start + last_pair / a.group, a.window), common_end = start + first_pair / a.group + 1;
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

    // Warps put together what they found, always in the same order.
    __syncthreads();
    float* stats = reinterpret_cast<float*>(shared); // [2][WARPS][16]
    float* outs = stats + 2 * WARPS * 16;            // [WARPS][16][DIM]
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        u32 row = warp * 16 + group + 8 * r;
        if (in == 0) stats[row] = running.max[r], stats[WARPS * 16 + row] = running.sum[r];
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n)
            for (int k = 0; k < 2; ++k) outs[row * DIM + dim_of(n, 2 * in + k)] = running.out[n][2 * r + k];
    }
    __syncthreads();
    u32 num = num_pairs - first_pair < 16 ? num_pairs - first_pair : 16;
    for (u32 i = threadIdx.x * 4; i < num * DIM; i += WARPS * WARP * 4) {
        u32 row = i / DIM, column = i % DIM;
        float max = MINUS_INFINITY;
        for (int w = 0; w < WARPS; ++w) max = max_of(max, stats[w * 16 + row]);
        float base = base_of(max), sum = 0.0f;
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int w = 0; w < WARPS; ++w) {
            float factor = exp2_fast(stats[w * 16 + row] - base);
            float4 some = *reinterpret_cast<const float4*>(outs + (w * 16 + row) * DIM + column);
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
}

// Puts the splits of each pair together, a warp for each, always in the same order; nothing where there was one.
// Reads 4 (HEAD_DIM + 2) bytes a split, mostly from the second cache; bound by latency.
KERNEL(merge_splits, MergeSplits, 4 * WARP) {
    using namespace attention;
    const DecodeAttention& d = p.decode;
    const Attention& a = d.a;
    u32 sequence = blockIdx.y, num_heads = a.num_kv_heads * a.group;
    u32 idx = blockIdx.x * 4 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 num_rows = a.num_rows[sequence];
    if (idx >= num_rows * num_heads) return;
    u32 num_splits = splits_of(d, a.start_idx[sequence], num_rows).num;
    if (num_splits == 1) return;
    u64 to = u64(a.first_row[sequence]) * num_heads + idx;
    const float* sums = d.sums + to * d.max_splits * DIM;
    const float2* stats = reinterpret_cast<const float2*>(d.stats) + to * d.max_splits;
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
#pragma unroll 2
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
        *reinterpret_cast<uint2*>(a.out + to * DIM + column) = rounded;
    }
}

// Attention of many rows: a block for each tile of pairs and kv head. Keys and values pass by in tiles, the next one on its
// way while the tensor cores are at this one; tiles that no pair sees are left out, and only those at the edges are masked.
//
// 4 HEAD_DIM multiplications for each pair and position seen, 4 HEAD_DIM bytes of KV (from the second cache but for
// the first block) for each tile and position: with 128 pairs bound by the tensor cores. A warp's 32 pairs use each
// matrix from shared memory twice: it gives 24 KiB for 128 products, three quarters of an A100's time for them.
KERNEL(prefill_attention, PrefillAttention, attention::prefill::THREADS) {
    using namespace attention;
    using namespace attention::prefill;
    DYNAMIC_SHARED(shared);
    const Attention& a = p.a;
    u32 sequence = p.tiles[blockIdx.x].x, first_pair = p.tiles[blockIdx.x].y, kv_head = blockIdx.y;
    if (sequence == ~0u) return;
    u32 start = a.start_idx[sequence], first_row = a.first_row[sequence];
    u32 num_pairs = a.num_rows[sequence] * a.group;
    if (first_pair >= num_pairs) return;
    u32 last_pair = first_pair + PAIRS <= num_pairs ? first_pair + PAIRS - 1 : num_pairs - 1;
    u32 first_position = start + first_pair / a.group, last_position = start + last_pair / a.group;
    // Nobody sees positions outside of these.
    u32 seen_begin = first_seen(first_position, a.window), seen_end = last_position + 1;
    u32 begin = seen_begin / TOKENS * TOKENS;
    // Positions that every pair sees.
    u32 common_begin = first_seen(last_position, a.window), common_end = first_position + 1;

    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, in = lane % 4;
    Keys keys = keys_of(a, sequence, kv_head);
    Rule rule = rule_of(a);
    float* shared_scales = reinterpret_cast<float*>(shared + SCALES_AT);
    // The scale of the position that this thread has, of its key (first half of the threads) or value.
    float next_scale = 0.0f;

    // A thread finds the place of one position.
    auto find_places = [&](u32 first, u32 buffer) {
        u32 position = first + threadIdx.x % TOKENS;
        bool is_wanted = position >= seen_begin && position < seen_end;
        if (threadIdx.x < TOKENS) place(shared, buffer, threadIdx.x) = is_wanted ? keys.offset(position) : 0;
        if (IS_SCALED && threadIdx.x < 2 * TOKENS) {
            const u8* scale = keys.head + (threadIdx.x < TOKENS ? 0 : a.half_bytes);
            next_scale = 0.0f;
            if (is_wanted) next_scale = widen_bf16(*reinterpret_cast<const u16*>(scale + keys.scale_offset(position)));
        }
    };
    auto begin_copies = [&](u32 first, u32 buffer) {
        u8* to = shared + (IS_SCALED ? RAW_AT : KV_AT + buffer * 2 * KV_BYTES);
        constexpr int STRIDE = IS_SCALED ? VECTOR_BYTES : ROW;
#pragma unroll
        for (int i = 0; i < (TOKENS * PIECES + THREADS - 1) / THREADS; ++i) {
            u32 piece = i * THREADS + threadIdx.x, row = piece / PIECES, column = piece % PIECES * 16;
            if (TOKENS * PIECES % THREADS != 0 && piece >= TOKENS * PIECES) continue;
            bool is_wanted = first + row >= seen_begin && first + row < seen_end;
            const u8* from = keys.head + place(shared, buffer, row) + column;
            copy_async(to + row * STRIDE + column, from, is_wanted);
            copy_async(to + TOKENS * STRIDE + row * STRIDE + column, from + a.half_bytes, is_wanted);
        }
        end_copy_group();
    };

    for (u32 piece = threadIdx.x; piece < PAIRS * DIM / 8; piece += THREADS) {
        u32 row = piece / (DIM / 8), column = piece % (DIM / 8), pair = first_pair + row;
        bool is_wanted = pair < num_pairs;
        const u16* from = query_of(a, first_row, kv_head, is_wanted ? pair : first_pair) + column * 8;
        copy_async(shared + row * ROW + column * 16, from, is_wanted);
    }
    find_places(begin, 0);
    __syncthreads();
    begin_copies(begin, 0);

    u8* queries = shared + warp * (TILES * 16 * ROW);
    Running running[TILES];
    Seen seen[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        running[t].begin();
        seen[t] = seen_by(a, start, first_pair + (warp * TILES + t) * 16 + group, num_pairs);
    }

    u32 buffer = 0;
    for (u32 first = begin; first < seen_end; first += TOKENS, buffer ^= 1) {
        float scale = next_scale;
        bool is_last = first + TOKENS >= seen_end;
        if (!is_last) find_places(first + TOKENS, buffer ^ 1);
        await_copies<0>();
        // The tile is there for all, and all are done with the one before.
        __syncthreads();
        const u8* tile_keys = shared + KV_AT + (IS_SCALED ? 0 : buffer * 2 * KV_BYTES);
        if (IS_SCALED) {
            for (u32 piece = threadIdx.x; piece < 2 * TOKENS * PIECES; piece += THREADS) {
                uint4 codes = *reinterpret_cast<const uint4*>(shared + RAW_AT + piece * 16);
                store_widened(shared + KV_AT + piece / PIECES * ROW + piece % PIECES * 32, codes, lane & 4);
            }
            if (threadIdx.x < 2 * TOKENS) shared_scales[threadIdx.x] = scale;
            __syncthreads();
        }
        if (!is_last) begin_copies(first + TOKENS, buffer ^ 1);

        float scores[TILES][TOKENS / 8][4] = {};
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) {
            u32 q[TILES][4];
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                load_matrices(q[t], queries + (t * 16 + lane % 16) * ROW + 32 * step + lane / 16 * 16);
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n += 2) {
                u32 m[4];
                load_matrices(m, tile_keys + (8 * n + lane % 8 + lane / 16 * 8) * ROW + 32 * step + lane / 8 % 2 * 16);
                u32 low[2] = {m[0], m[1]}, high[2] = {m[2], m[3]};
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    mma_bf16(scores[t][n], q[t], low);
                    mma_bf16(scores[t][n + 1], q[t], high);
                }
            }
        }

        bool is_common = first >= common_begin && first + TOKENS <= common_end;
        u32 weights[TILES][TOKENS / 16][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
#pragma unroll
            for (int n = 0; n < TOKENS / 8; ++n) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float factor = rule.factor;
                    if (IS_SCALED) factor *= shared_scales[8 * n + 2 * in + k];
                    scores[t][n][k] *= factor, scores[t][n][k + 2] *= factor;
                }
                if (rule.cap != 0.0f) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) scores[t][n][k] = capped(scores[t][n][k], rule.cap);
                }
                if (!is_common) seen[t].hide(scores[t][n], first + 8 * n + 2 * in);
            }
            running[t].weigh(scores[t]);
#pragma unroll
            for (int n = 0; IS_SCALED && n < TOKENS / 8; ++n) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float factor = shared_scales[TOKENS + 8 * n + 2 * in + k];
                    scores[t][n][k] *= factor, scores[t][n][k + 2] *= factor;
                }
            }
#pragma unroll
            for (int n = 0; n < TOKENS / 16; ++n) pack_weights(scores[t][2 * n], scores[t][2 * n + 1], weights[t][n]);
        }

        const u8* tile_values = tile_keys + KV_BYTES;
#pragma unroll
        for (int step = 0; step < TOKENS / 16; ++step) {
#pragma unroll
            for (int n = 0; n < DIM / 8; n += 2) {
                u32 m[4];
                load_matrices_transposed(m, tile_values + (16 * step + lane % 16) * ROW + 16 * n + lane / 16 * 16);
                u32 low[2] = {m[0], m[1]}, high[2] = {m[2], m[3]};
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    mma_bf16(running[t].out[n], weights[t][step], low);
                    mma_bf16(running[t].out[n + 1], weights[t][step], high);
                }
            }
        }
    }

    // A warp's results take the place of its queries, and leave from there 16 bytes at a time.
    __syncwarp();
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        running[t].end();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float whole = 1.0f / running[t].sum[r];
            u32* row = reinterpret_cast<u32*>(queries + (t * 16 + group + 8 * r) * ROW) + in;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
                row[4 * n] = pack_bf16(running[t].out[n][2 * r] * whole, running[t].out[n][2 * r + 1] * whole);
        }
    }
    __syncwarp();
    for (u32 piece = lane; piece < TILES * 16 * DIM / 8; piece += WARP) {
        u32 row = piece / (DIM / 8), column = piece % (DIM / 8), pair = first_pair + warp * (TILES * 16) + row;
        if (pair >= num_pairs) break;
        uint4 out = *reinterpret_cast<const uint4*>(queries + row * ROW + column * 16);
        *reinterpret_cast<uint4*>(a.out + head_row(a, first_row, kv_head, pair) * DIM + column * 8) = out;
    }
}

#endif

namespace attention {

// Number `i` of a vector, as it is stored.
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

// Attention of any rows, KV types and block sizes: a block for each row and query head, whose warps take turns at
// positions. Reads KV once for every row and head, an element at a time: right, not fast.
KERNEL(plain_attention, PlainAttention, 256) {
    using namespace attention;
    constexpr u32 WARPS = 8, PARTS = (DIM + WARP - 1) / WARP;
    __shared__ float stats[2][WARPS];
    __shared__ float outs[WARPS][PARTS * WARP];
    const Attention& a = p.a;
    u32 sequence = blockIdx.z, row = blockIdx.y, kv_head = blockIdx.x / a.group, pair = row * a.group + blockIdx.x % a.group;
    if (row >= a.num_rows[sequence]) return;
    u32 first_row = a.first_row[sequence], position = a.start_idx[sequence] + row;
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
