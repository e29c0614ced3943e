// Attention for many rows of a sequence on Hopper: like attention_prefill.cu, with warpgroup products. See
// attention.cuh.
#include "attention_tiles.cuh"
#include "warpgroup.cuh"

static_assert(KV_TYPE == 2 && (HEAD_DIM == 64 || HEAD_DIM == 128), "attention_prefill.cu is for others");

namespace attention {

namespace wgmma {

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
// Pairs of a tile: 64 per warpgroup, 16 per warp.
constexpr int PAIRS = WARPS * 16;
// Positions of a tile. Each warp copies 16 of them.
constexpr int TOKENS = WARPS * 16;
// 16-byte pieces of a vector.
constexpr int PIECES = DIM / 8;
// Vectors that a warp copies at once.
constexpr int AT_ONCE = WARP / PIECES;
// Bytes of a tile of queries, keys or values.
constexpr int ROWS = PAIRS;
constexpr int PANEL_BYTES = ROWS * warpgroup::PANEL_ROW;
constexpr int MATRIX_BYTES = DIM / warpgroup::PANEL * PANEL_BYTES;
static_assert(TOKENS == ROWS, "matrices of one shape");

// Shared memory: queries (later results), two tiles of keys, two tiles of values.
constexpr int KEYS_AT = MATRIX_BYTES, VALUES_AT = 3 * MATRIX_BYTES;

// Starts scores = Q K^T as one group.
__device__ __forceinline__ void begin_scores(float (&scores)[TOKENS / 8][4], u64 queries, u64 keys) {
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        // A panel has four steps of 32 bytes.
        u64 offset = (step / 4 * PANEL_BYTES + step % 4 * 32) >> 4;
        if (step == 0) {
            warpgroup::multiply<false>(scores, queries, keys);
        } else {
            warpgroup::multiply<true>(scores, queries + offset, keys + offset);
        }
    }
    warpgroup::end_product_group();
}

// Starts out += weights V as one group.
__device__ __forceinline__ void begin_adding(float (&out)[DIM / 8][4], const u32 (&weights)[TOKENS / 16][4], u64 values) {
#pragma unroll
    for (int step = 0; step < TOKENS / 16; ++step)
        warpgroup::add_product(out, weights[step], values + (step * 2 * warpgroup::ATOM_BYTES >> 4));
    warpgroup::end_product_group();
}

} // namespace wgmma

} // namespace attention

// Attention for many rows. There is a block for each tile of 128 pairs and kv head, with two warpgroups of 64 pairs
// each. While softmax processes the scores of a tile, the tensor cores compute the scores of the next tile and the
// weighted values of this one. The keys of a tile are copied one tile ahead, its values one tile later.
//
// Takes 4 HEAD_DIM multiplications per pair and position, and reads 4 HEAD_DIM bytes of KV per tile and position: 128
// operations per byte, which is about the ratio of an H100's tensor cores to its L2 cache. With heads of 128 elements
// a block uses 160 KiB of shared memory and has a multiprocessor to itself.
KERNEL(wgmma_attention, PrefillAttention, attention::wgmma::THREADS) {
#if defined(BATON_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using namespace attention;
    using namespace attention::wgmma;
    DYNAMIC_SHARED(shared);
    const AttentionArgs& a = p.a;
    PrefillTile tile;
    if (!tile.find(p, PAIRS)) return;
    u32 first_pair = tile.first_pair, num_pairs = tile.num_pairs, first_row = tile.first_row, kv_head = blockIdx.y;
    u32 seen_begin = tile.seen_begin, seen_end = tile.seen_end, begin = seen_begin / TOKENS * TOKENS;

    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, in = lane % 4;
    Keys keys = keys_of(a, tile.sequence, kv_head);
    Rule rule = rule_of(a);

    // Bytes from a head's first key to the key of a position. A lane computes one of the 16 positions that its warp
    // copies of a tile.
    auto find_place = [&](u32 first) {
        u32 position = first + warp * 16 + lane % 16;
        return position >= seen_begin && position < seen_end ? keys.offset(position) : 0;
    };
    auto begin_copies = [&](u8* to, const u8* from, u32 first, u64 place) {
        u32 low = u32(place), high = u32(place >> 32);
#pragma unroll
        for (int i = 0; i < 16 / AT_ONCE; ++i) {
            u32 mine = i * AT_ONCE + lane / PIECES, row = warp * 16 + mine, piece = lane % PIECES;
            u64 at = u64(shuffle(high, mine)) << 32 | shuffle(low, mine);
            bool is_wanted = first + row >= seen_begin && first + row < seen_end;
            copy_async(to + warpgroup::piece_at<ROWS>(row, piece), from + at + piece * 16, is_wanted);
        }
    };
    u8 *key_tiles = shared + KEYS_AT, *value_tiles = shared + VALUES_AT;

    for (u32 i = threadIdx.x; i < PAIRS * PIECES; i += THREADS) {
        u32 row = i / PIECES, piece = i % PIECES, pair = first_pair + row;
        bool is_wanted = pair < num_pairs;
        const u16* from = query_of(a, first_row, kv_head, is_wanted ? pair : first_pair) + piece * 8;
        copy_async(shared + warpgroup::piece_at<ROWS>(row, piece), from, is_wanted);
    }
    u64 place = find_place(begin);
    begin_copies(key_tiles, keys.head, begin, place);
    end_copy_group();

    Running running;
    running.begin();
    Seen seen = seen_by(a, tile.start, first_pair + warp * 16 + group, num_pairs);
    u64 queries = warpgroup::matrix_of(shared + warp / 4 * (64 * warpgroup::PANEL_ROW), PANEL_BYTES);
    u64 key_matrix = warpgroup::matrix_of(key_tiles, PANEL_BYTES);
    u64 value_matrix = warpgroup::matrix_of(value_tiles, PANEL_BYTES);
    constexpr u64 NEXT = MATRIX_BYTES >> 4;

    float scores[TOKENS / 8][4];
    u32 weights[TOKENS / 16][4];
    // All threads have copied this tile, and all are done with the previous one.
    auto meet = [&] {
        await_copies<0>();
        warpgroup::show_to_products();
        __syncthreads();
    };
    // Copies the values of tile `idx` and the keys of the next tile.
    auto begin_next_copies = [&](u32 idx) {
        u32 first = begin + idx * TOKENS;
        begin_copies(value_tiles + idx % 2 * MATRIX_BYTES, keys.head + a.half_bytes, first, place);
        if (first + TOKENS < seen_end) {
            place = find_place(first + TOKENS);
            begin_copies(key_tiles + (idx + 1) % 2 * MATRIX_BYTES, keys.head, first + TOKENS, place);
        }
        end_copy_group();
    };
    // Turns scores into weights, which are not rounded yet. Both branches join at the end: the assembler inserts a
    // wait for the products in flight before any earlier join.
    auto weigh = [&](u32 idx, float (&factor)[2]) {
        u32 first = begin + idx * TOKENS;
        if (rule.cap == 0.0f && tile.is_common(first, TOKENS)) {
            running.weigh(scores, rule.factor, factor);
            return;
        }
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                scores[n][k] *= rule.factor;
                if (rule.cap != 0.0f) scores[n][k] = capped(scores[n][k], rule.cap);
            }
            seen.hide(scores[n], first + 8 * n + 2 * in);
        }
        running.weigh(scores, 1.0f, factor);
    };
    auto pack = [&] {
#pragma unroll
        for (int n = 0; n < TOKENS / 16; ++n) pack_weights(scores[2 * n], scores[2 * n + 1], weights[n]);
    };

    float factor[2];
    meet();
    begin_next_copies(0);
    warpgroup::begin_products();
    begin_scores(scores, queries, key_matrix);
    warpgroup::await_products<0>();
    warpgroup::hold(scores);
    weigh(0, factor);
    pack();
    u32 num_tiles = (seen_end - begin + TOKENS - 1) / TOKENS;
    for (u32 idx = 1; idx < num_tiles; ++idx) {
        meet();
        begin_next_copies(idx);
        warpgroup::hold(scores);
        warpgroup::hold(running.out);
        warpgroup::begin_products();
        begin_scores(scores, queries, key_matrix + idx % 2 * NEXT);
        begin_adding(running.out, weights, value_matrix + (idx - 1) % 2 * NEXT);
        warpgroup::await_products<1>();
        warpgroup::hold(scores);
        weigh(idx, factor);
        // Must come before the wait for the products of weights and values.
        warpgroup::hold(scores);
        warpgroup::await_products<0>();
        warpgroup::hold(running.out);
        warpgroup::hold(weights);
        running.rescale(factor);
        pack();
    }
    meet();
    warpgroup::hold(running.out);
    warpgroup::begin_products();
    begin_adding(running.out, weights, value_matrix + (num_tiles - 1) % 2 * NEXT);
    warpgroup::await_products<0>();
    warpgroup::hold(running.out);
    warpgroup::hold(weights);
    running.end();

    // A warp's results replace its queries in shared memory, and are then stored 16 bytes at a time.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float whole = 1.0f / running.sum[r];
        u32 row = warp * 16 + group + 8 * r;
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n) {
            u32 pair = pack_bf16(running.out[n][2 * r] * whole, running.out[n][2 * r + 1] * whole);
            *reinterpret_cast<u32*>(shared + warpgroup::piece_at<ROWS>(row, n) + 4 * in) = pair;
        }
    }
    __syncwarp();
    for (u32 i = lane; i < 16 * PIECES; i += WARP) {
        u32 row = warp * 16 + i / PIECES, piece = i % PIECES, pair = first_pair + row;
        if (pair >= num_pairs) break;
        uint4 out = *reinterpret_cast<const uint4*>(shared + warpgroup::piece_at<ROWS>(row, piece));
        *reinterpret_cast<uint4*>(a.out + head_row(a, first_row, kv_head, pair) * DIM + piece * 8) = out;
    }
#endif
}
