// Attention for many rows of a sequence on Hopper: like attention_prefill.cu, with warpgroup products. See
// attention.cuh.
#include "attention_tiles.cuh"
#include "warpgroup.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "attention_prefill.cu is for others");

namespace attention {

namespace wgmma {

// Two warpgroups compute, a third one copies keys and values.
constexpr int COMPUTING = 2 * warpgroup::THREADS;
constexpr int COPYING = warpgroup::THREADS;
constexpr int THREADS = COMPUTING + COPYING;
// Registers of a thread: at the launch as many as 384 threads can have of 65,536, a multiple of 8. cuda-check sees
// that the compiler takes them all: with fewer, the computing warpgroups would wait for the rest for ever. The bound of one
// block tells it their number; without one, some versions ignore the exchange.
constexpr int COMPUTING_REGISTERS = 224, COPYING_REGISTERS = 56, LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
static_assert(COMPUTING * COMPUTING_REGISTERS + COPYING * COPYING_REGISTERS == THREADS * LAUNCH_REGISTERS,
              "what one warpgroup gives is what the others take");
// Pairs of a tile: 64 per warpgroup, 16 per warp.
constexpr int PAIRS = COMPUTING / WARP * 16;
// Positions of a tile. Each copying warp copies 32 of them.
constexpr int TOKENS = 128;
// 16-byte pieces of a vector in a tile, and in the cache.
constexpr int PIECES = DIM / 8, STORED_PIECES = IS_SCALED ? PIECES / 2 : PIECES;
// Vectors that a warp copies at once, and copies of a thread for each tile.
constexpr int AT_ONCE = WARP / STORED_PIECES, COPIES = WARP / AT_ONCE;
// Bytes of a tile of queries, keys or values.
constexpr int ROWS = PAIRS;
constexpr int PANEL_BYTES = ROWS * warpgroup::PANEL_ROW;
constexpr int MATRIX_BYTES = DIM / warpgroup::PANEL * PANEL_BYTES;
static_assert(TOKENS == ROWS && TOKENS == COPYING, "matrices of one shape, and a copying thread for each position");

// Shared memory: queries (later results), two tiles of keys, two tiles of values. With 8-bit KV also the codes of two
// tiles, and the scales of four tiles, [4][keys, values][TOKENS].
constexpr int TILES_AT = MATRIX_BYTES, CODES_AT = 5 * MATRIX_BYTES;
constexpr int SCALES_AT = CODES_AT + 2 * TOKENS * VECTOR_BYTES;
static_assert(!IS_SCALED || SCALES_AT + 8 * TOKENS * 4 <= 227 << 10, "what a block of sm_90 has");

// The matrices of a tile.
constexpr u32 KEYS = 0, VALUES = 1;

// The place of a tile of keys or values in shared memory. There are two for each, used in turn.
__device__ __forceinline__ u32 tile_at(u32 matrix, u32 idx) { return TILES_AT + (matrix * 2 + idx % 2) * MATRIX_BYTES; }

// Barriers. A tile is full for a computing warpgroup, and empty after both.
__device__ __forceinline__ u32 full(u32 matrix, u32 idx, u32 computing) { return 1 + matrix * 4 + idx % 2 * 2 + computing; }
__device__ __forceinline__ u32 empty(u32 matrix, u32 idx) { return 9 + matrix * 2 + idx % 2; }
__device__ __forceinline__ u32 turn(u32 computing) { return 13 + computing; }

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

// Multiplies scores, or weights, by the scales of their positions. `scales` starts at the lane's first column.
__device__ __forceinline__ void scale_by(float (&scores)[TOKENS / 8][4], const float* scales) {
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n) {
        float2 scale = *reinterpret_cast<const float2*>(scales + 8 * n);
        scores[n][0] *= scale.x, scores[n][1] *= scale.y, scores[n][2] *= scale.x, scores[n][3] *= scale.y;
    }
}

// The keys and values of one kv head, and the positions that a block reads.
struct Source {
    Keys keys;
    u64 half_bytes;
    u32 begin, num_tiles, seen_begin, seen_end;
};

// The copying warpgroup. It copies tiles in the order K0, K1, V0, K2, V1, .. and announces each after it has begun the
// copies of the next one. That cannot block for ever: the place of the next tile is that of the tile four before it, and
// the products with that one need no tile later than three before it.
struct Copier {
    const Source& source;
    u8* shared;
    u32 thread, warp, lane;

    // Bytes from the head's first key to the key of this lane's position.
    __device__ __forceinline__ u64 find_place(u32 idx) const {
        u32 position = source.begin + idx * TOKENS + thread;
        return position >= source.seen_begin && position < source.seen_end ? source.keys.offset(position) : 0;
    }

    __device__ __forceinline__ float load_scale(u32 matrix, u32 idx) const {
        u32 position = source.begin + idx * TOKENS + thread;
        if (position < source.seen_begin || position >= source.seen_end) return 0.0f;
        const u8* scale = source.keys.head + matrix * source.half_bytes + source.keys.scale_offset(position);
        return widen_bf16(*reinterpret_cast<const u16*>(scale));
    }

    // Waits until both computing warpgroups are done with the tile that has this tile's place.
    __device__ __forceinline__ void await_place(u32 matrix, u32 idx) const {
        if (idx >= 2) warpgroup::sync_at_barrier(empty(matrix, idx), THREADS);
    }

    // This thread's codes in one of two buffers.
    __device__ __forceinline__ u8* codes(u32 buffer) const {
        return shared + CODES_AT + buffer % 2 * (TOKENS * VECTOR_BYTES) + thread * 16;
    }

    // Starts the copies of a tile, or of its codes. `place` is that of the key of this lane's position.
    __device__ __forceinline__ void begin(u32 matrix, u32 idx, u64 place, u32 buffer) const {
        if constexpr (!IS_SCALED) await_place(matrix, idx);
        u8* to = IS_SCALED ? codes(buffer) : shared + tile_at(matrix, idx);
        const u8* from = source.keys.head + matrix * source.half_bytes;
        u32 low = u32(place), high = u32(place >> 32), first = source.begin + idx * TOKENS;
#pragma unroll 4
        for (int i = 0; i < COPIES; ++i) {
            u32 mine = i * AT_ONCE + lane / STORED_PIECES, row = warp * WARP + mine, piece = lane % STORED_PIECES;
            u64 at = u64(shuffle(high, mine)) << 32 | shuffle(low, mine);
            bool is_wanted = first + row >= source.seen_begin && first + row < source.seen_end;
            u32 offset = IS_SCALED ? i * COPYING * 16 : warpgroup::piece_at<ROWS>(row, piece);
            copy_async(to + offset, from + at + piece * 16, is_wanted);
        }
        end_copy_group();
    }

    // Announces a tile whose copies this thread has waited for.
    __device__ __forceinline__ void end(u32 matrix, u32 idx, u32 buffer) const {
        if constexpr (IS_SCALED) {
            await_place(matrix, idx);
            widen(shared + tile_at(matrix, idx), codes(buffer));
        }
        warpgroup::show_to_products();
        for (u32 computing = 0; computing < 2; ++computing)
            warpgroup::arrive_at_barrier(full(matrix, idx, computing), COPYING + warpgroup::THREADS);
    }

    // Widens the codes that this thread copied. Eight lanes store to different banks: half of them start with the second
    // 16 bytes where they have the same row.
    __device__ __forceinline__ void widen(u8* to, const u8* codes) const {
        bool is_second_first = STORED_PIECES == 8 && (lane & 4);
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            u32 row = warp * WARP + i * AT_ONCE + lane / STORED_PIECES, piece = lane % STORED_PIECES * 2 + is_second_first;
            uint4 first, second;
            widen_16_codes(*reinterpret_cast<const uint4*>(codes + i * COPYING * 16), first, second);
            warpgroup::store_for_products(to + warpgroup::piece_at<ROWS>(row, piece), is_second_first ? second : first);
            warpgroup::store_for_products(to + warpgroup::piece_at<ROWS>(row, piece ^ 1), is_second_first ? first : second);
        }
    }

    __device__ __forceinline__ void run() const {
        u32 num_tiles = source.num_tiles, last_matrix = KEYS, last_idx = 0, buffer = 0;
        // Places in the newest tile of keys, and in the one before it.
        u64 place = 0, last_place = 0;
        for (u32 step = 0; step <= 2 * num_tiles; ++step) {
            u32 matrix = step == 0 || step % 2 ? KEYS : VALUES, idx = (step + 1) / 2 - matrix;
            float scales[2] = {};
            if (matrix == KEYS) {
                last_place = place, place = find_place(idx);
                if (idx == num_tiles) continue;
                if constexpr (IS_SCALED) scales[0] = load_scale(KEYS, idx), scales[1] = load_scale(VALUES, idx);
            }
            begin(matrix, idx, matrix == KEYS ? place : last_place, buffer);
            if (step > 0) {
                await_copies<1>();
                end(last_matrix, last_idx, buffer - 1);
            }
            // The scales of the fourth tile before are not needed: the wait for the place of the last keys was one for
            // later products.
            if (IS_SCALED && matrix == KEYS) {
                float* to = reinterpret_cast<float*>(shared + SCALES_AT) + idx % 4 * (2 * TOKENS) + thread;
                to[0] = scales[0], to[TOKENS] = scales[1];
            }
            last_matrix = matrix, last_idx = idx, buffer += 1;
        }
        await_copies<0>();
        end(last_matrix, last_idx, buffer - 1);
        // The last products, so that every phase of a barrier ends.
        for (u32 idx = num_tiles < 2 ? 2 : num_tiles; idx < num_tiles + 2; ++idx)
            await_place(KEYS, idx), await_place(VALUES, idx);
    }
};

} // namespace wgmma

} // namespace attention

// Attention for many rows. There is a block for each tile of 128 pairs and kv head. Two warpgroups compute 64 pairs each,
// a third one copies keys and values ahead of them. In each of the two, the tensor cores compute the scores of the next
// tile and the weighted values of this one while softmax processes the scores of this one. The two take turns at
// starting their products, so that one has softmax while the other has the tensor cores.
//
// Takes 4 HEAD_DIM multiplications per pair and position, and reads 4 HEAD_DIM bytes of KV per tile and position: 128
// operations per byte from the L2 cache. With heads of 128 elements a block uses 160 KiB of shared memory and has a
// multiprocessor to itself.
//
// 8-bit KV is widened to bf16 by the copying warpgroup, each thread the codes that it copied itself: as many
// instructions as softmax takes, for half of the bytes from the L2 cache. This uses 196 KiB.
KERNEL(wgmma_attention, PrefillAttention, attention::wgmma::THREADS, 1) {
#if defined(BATON_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using namespace attention;
    using namespace attention::wgmma;
    DYNAMIC_SHARED_ALIGNED(shared, warpgroup::ATOM_BYTES);
    const AttentionArgs& a = p.a;
    PrefillTile tile;
    if (!tile.find(p, PAIRS)) return;
    u32 first_pair = tile.first_pair, num_pairs = tile.num_pairs, first_row = tile.first_row, kv_head = blockIdx.y;
    u32 seen_end = tile.seen_end, begin = tile.seen_begin / TOKENS * TOKENS;
    u32 num_tiles = (seen_end - begin + TOKENS - 1) / TOKENS;
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    if (threadIdx.x >= COMPUTING) {
        warpgroup::give_registers<COPYING_REGISTERS>();
        Source source = {keys_of(a, tile.sequence, kv_head), a.half_bytes, begin, num_tiles, tile.seen_begin, seen_end};
        Copier copier = {source, shared, threadIdx.x - COMPUTING, warp - COMPUTING / WARP, lane};
        copier.run();
        return;
    }
    warpgroup::take_registers<COMPUTING_REGISTERS>();
    u32 computing = warp / 4, group = lane / 4, in = lane % 4;
    Rule rule = rule_of(a);

    // Each warpgroup copies its own queries.
    for (u32 i = threadIdx.x % warpgroup::THREADS; i < 64 * PIECES; i += warpgroup::THREADS) {
        u32 row = computing * 64 + i / PIECES, piece = i % PIECES, pair = first_pair + row;
        bool is_wanted = pair < num_pairs;
        const u16* from = query_of(a, first_row, kv_head, is_wanted ? pair : first_pair) + piece * 8;
        copy_async(shared + warpgroup::piece_at<ROWS>(row, piece), from, is_wanted);
    }
    end_copy_group();

    Running running;
    running.begin();
    Seen seen = tile.seen(a, first_pair + warp * 16 + group);
    u64 queries = warpgroup::matrix_of(shared + computing * (64 * warpgroup::PANEL_ROW), PANEL_BYTES);
    u64 key_matrix = warpgroup::matrix_of(shared + tile_at(KEYS, 0), PANEL_BYTES);
    u64 value_matrix = warpgroup::matrix_of(shared + tile_at(VALUES, 0), PANEL_BYTES);
    const float* scales = reinterpret_cast<const float*>(shared + SCALES_AT) + 2 * in;
    constexpr u64 NEXT = MATRIX_BYTES >> 4;

    float scores[TOKENS / 8][4];
    u32 weights[TOKENS / 16][4];
    auto await_tile = [&](u32 matrix, u32 idx) {
        warpgroup::sync_at_barrier(full(matrix, idx, computing), COPYING + warpgroup::THREADS);
    };
    auto release_tile = [&](u32 matrix, u32 idx) { warpgroup::arrive_at_barrier(empty(matrix, idx), THREADS); };
    // Turns scores into weights, which are not rounded yet. Both branches join at the end: the assembler inserts a
    // wait for the products in flight before any earlier join.
    auto weigh = [&](u32 idx, float (&factor)[2]) {
        u32 first = begin + idx * TOKENS;
        if (rule.cap == 0.0f && tile.is_common(first, TOKENS)) {
            if constexpr (IS_SCALED) scale_by(scores, scales + idx % 4 * (2 * TOKENS));
            running.weigh(scores, rule.factor, factor);
            return;
        }
        if constexpr (IS_SCALED) scale_by(scores, scales + idx % 4 * (2 * TOKENS));
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
    auto pack = [&](u32 idx) {
        if constexpr (IS_SCALED) scale_by(scores, scales + idx % 4 * (2 * TOKENS) + TOKENS);
#pragma unroll
        for (int n = 0; n < TOKENS / 16; ++n) pack_weights(scores[2 * n], scores[2 * n + 1], weights[n]);
    };

    // The first turn is that of the first warpgroup.
    if (computing == 1) warpgroup::arrive_at_barrier(turn(0), COMPUTING);
    await_copies<0>();
    warpgroup::show_to_products();
    // Also waits for the queries of the other threads.
    await_tile(KEYS, 0);
    float factor[2];
    warpgroup::begin_products();
    begin_scores(scores, queries, key_matrix);
    warpgroup::await_products<0>();
    warpgroup::hold(scores);
    release_tile(KEYS, 0);
    weigh(0, factor);
    pack(0);
    for (u32 idx = 1; idx < num_tiles; ++idx) {
        await_tile(KEYS, idx);
        warpgroup::sync_at_barrier(turn(computing), COMPUTING);
        warpgroup::hold(scores);
        warpgroup::hold(running.out);
        warpgroup::hold(weights);
        warpgroup::begin_products();
        begin_scores(scores, queries, key_matrix + idx % 2 * NEXT);
        await_tile(VALUES, idx - 1);
        begin_adding(running.out, weights, value_matrix + (idx - 1) % 2 * NEXT);
        warpgroup::arrive_at_barrier(turn(1 - computing), COMPUTING);
        warpgroup::await_products<1>();
        warpgroup::hold(scores);
        release_tile(KEYS, idx);
        weigh(idx, factor);
        // Must come before the wait for the products of weights and values.
        warpgroup::hold(scores);
        warpgroup::await_products<0>();
        warpgroup::hold(running.out);
        warpgroup::hold(weights);
        release_tile(VALUES, idx - 1);
        running.rescale(factor);
        pack(idx);
    }
    await_tile(VALUES, num_tiles - 1);
    warpgroup::hold(running.out);
    warpgroup::hold(weights);
    warpgroup::begin_products();
    begin_adding(running.out, weights, value_matrix + (num_tiles - 1) % 2 * NEXT);
    warpgroup::await_products<0>();
    warpgroup::hold(running.out);
    warpgroup::hold(weights);
    release_tile(VALUES, num_tiles - 1);
    // The last turn, which ends the last phase of its barrier.
    if (computing == 0) warpgroup::sync_at_barrier(turn(0), COMPUTING);
    running.end();

    // A warpgroup's results replace its queries in shared memory, and are then stored 16 bytes at a time. Its products
    // were done with the queries before the last tile of values was full.
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
