// Attention for many rows of a sequence. See attention.cuh.
#include "attention_tiles.cuh"

namespace attention {

namespace prefill {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
// Tiles of 16 pairs per warp. All of them use the keys and values that the warp reads.
constexpr int TILES = DIM <= 128 ? 2 : 1;
constexpr int PAIRS = WARPS * TILES * 16;
// Positions of a tile of keys and values.
constexpr int TOKENS = 32;
constexpr int ROW = padded(DIM * 2);
constexpr int KV_BYTES = TOKENS * ROW;
// 16-byte pieces of a vector in the cache.
constexpr int PIECES = VECTOR_BYTES / 16;

// Shared memory: queries (later results), and keys and values in bf16. Keys and values have two tiles if they are
// copied directly. If they are widened, there is one tile, a staging tile of stored bytes, and its scales. The
// padding of the first query rows holds the addresses of positions.
constexpr int KV_AT = PAIRS * ROW;
constexpr int RAW_AT = KV_AT + (IS_SCALED ? 2 : 4) * KV_BYTES;
constexpr int SCALES_AT = RAW_AT + (IS_SCALED ? 2 * TOKENS * VECTOR_BYTES : 0);
constexpr int SHARED_BYTES = SCALES_AT + (IS_SCALED ? 2 * TOKENS * 4 : 0);
static_assert(SHARED_BYTES <= 99 << 10, "what a block of sm_89 has");
static_assert(ROW >= DIM * 2 + 8 && PAIRS >= 2 * TOKENS, "room for places");

// Bytes from a head's first key to the key of each position, for two tiles of positions.
__device__ __forceinline__ u64& place(u8* shared, u32 buffer, u32 i) {
    return *reinterpret_cast<u64*>(shared + (buffer * TOKENS + i) * ROW + DIM * 2);
}

// Widens 16 codes to 32 bytes. Half of the lanes start with the second 16 bytes, so that eight lanes use eight banks.
__device__ __forceinline__ void store_widened(u8* to, uint4 codes, bool is_second_first) {
    uint4 first, second;
    widen_16_codes(codes, first, second);
    u32 shift = is_second_first ? 16 : 0;
    *reinterpret_cast<uint4*>(to + shift) = is_second_first ? second : first;
    *reinterpret_cast<uint4*>(to + (16 - shift)) = is_second_first ? first : second;
}

} // namespace prefill

} // namespace attention

// Attention for many rows. There is a block for each tile of pairs and kv head. Keys and values are loaded in tiles;
// the next tile is copied while the tensor cores work on the current one. Tiles outside of all windows are skipped,
// and only tiles at the edges are masked.
//
// Takes 4 HEAD_DIM multiplications per pair and position, and reads 4 HEAD_DIM bytes of KV per tile and position,
// from the L2 cache except for the first block. With 128 pairs it is bound by the tensor cores. The 32 pairs of a
// warp use each matrix from shared memory twice: 24 KiB per 128 products, three quarters of an A100's time for those
// products: of a multiprocessor in a cycle, 32 banks of 4 bytes (CUDA C++ Programming Guide) and 2,048 operations
// (NVIDIA A100 Tensor Core GPU Architecture).
KERNEL(prefill_attention, PrefillAttention, attention::prefill::THREADS) {
    using namespace attention;
    using namespace attention::prefill;
    DYNAMIC_SHARED(shared);
    const AttentionArgs& a = p.a;
    PrefillTile tile;
    if (!tile.find(p, PAIRS)) return;
    u32 first_pair = tile.first_pair, num_pairs = tile.num_pairs, first_row = tile.first_row, kv_head = blockIdx.y;
    u32 seen_begin = tile.seen_begin, seen_end = tile.seen_end, begin = seen_begin / TOKENS * TOKENS;

    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, in = lane % 4;
    Keys keys = keys_of(a, tile.sequence, kv_head);
    Rule rule = rule_of(a);
    float* shared_scales = reinterpret_cast<float*>(shared + SCALES_AT);
    // The scale of this thread's position: of its key in the first half of the threads, of its value in the second
    // half.
    float next_scale = 0.0f;

    // A thread computes the address of one position.
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
        seen[t] = tile.seen(a, first_pair + (warp * TILES + t) * 16 + group);
    }

    u32 buffer = 0;
    for (u32 first = begin; first < seen_end; first += TOKENS, buffer ^= 1) {
        float scale = next_scale;
        bool is_last = first + TOKENS >= seen_end;
        if (!is_last) find_places(first + TOKENS, buffer ^ 1);
        await_copies<0>();
        // All threads have copied this tile, and all are done with the previous one.
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

        bool is_common = tile.is_common(first, TOKENS);
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

    // A warp's results replace its queries in shared memory, and are then stored 16 bytes at a time.
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
