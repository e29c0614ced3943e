// Products of each expert's rows with its weights on Hopper, for many rows: like expert_products.cu, with warpgroup
// products.
//
//   GATED        1: weights are gate rows, then up rows; the output is activation(gate) * up
//   ACTIVATION   activation of the gates
#include "expert_tiles.cuh"
#include "warpgroup.cuh"

#if GATED
// A program may contain both variants.
#define wgmma_expert_products gated_wgmma_expert_products
#endif

namespace wgmma_expert_products {

// Two warpgroups compute, a third one copies.
constexpr u32 COMPUTING = 2 * warpgroup::THREADS, COPYING = warpgroup::THREADS, THREADS = COMPUTING + COPYING;
// Registers of a thread. See attention_wgmma.cu.
constexpr int COMPUTING_REGISTERS = 216, COPYING_REGISTERS = 72, LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
static_assert(COMPUTING * COMPUTING_REGISTERS + COPYING * COPYING_REGISTERS == THREADS * LAUNCH_REGISTERS,
              "what one warpgroup gives is what the others take");
// Rows of a tile, 64 per computing warpgroup; its weight rows, and columns of the output.
constexpr u32 ROWS = 128, WEIGHTS = 256, TILE_COLUMNS = GATED ? WEIGHTS / 2 : WEIGHTS;
// The depth of a stage: a panel of each matrix.
constexpr u32 DEPTH = warpgroup::PANEL, ROW_BYTES = warpgroup::PANEL_ROW;
constexpr u32 ROWS_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = ROWS_BYTES + WEIGHTS * ROW_BYTES;
constexpr u32 STAGES = 4;
// A stage is announced when the copies of this many later ones have begun. That cannot block for ever: the place of a
// stage is that of the stage four before it, and the products with that one need no stage later than three before it.
constexpr u32 AHEAD = 2;
static_assert(AHEAD + 2 <= STAGES, "as above");
// A row of a stage is eight pieces of 16 bytes. This many rows are copied at a time.
constexpr u32 COPIED = COPYING / 8;

// Barriers. A stage is full for a computing warpgroup, and empty after both. Stages are counted over all tiles.
__device__ __forceinline__ u32 full(u32 stage, u32 computing) { return 1 + stage % STAGES * 2 + computing; }
__device__ __forceinline__ u32 empty(u32 stage) { return 1 + 2 * STAGES + stage % STAGES; }

__device__ __forceinline__ u8* place_of(u8* shared, u32 stage) { return shared + stage % STAGES * STAGE_BYTES; }

// The copying warpgroup. Each thread copies the same piece of each 16th row.
struct Copier {
    const ExpertProduct& p;
    u8* shared;
    // Of the row, and the first row.
    u32 piece, row;
    // Stages whose copies have begun.
    u32 num_begun;

    // Waits until both computing warpgroups are done with the stage that has this stage's place.
    __device__ __forceinline__ void await_place(u32 stage) const {
        if (stage >= STAGES) warpgroup::sync_at_barrier(empty(stage), THREADS);
    }

    // Announces a stage whose copies this thread has waited for.
    __device__ __forceinline__ void announce(u32 stage) const {
        warpgroup::show_to_products();
        for (u32 computing = 0; computing < 2; ++computing)
            warpgroup::arrive_at_barrier(full(stage, computing), COPYING + warpgroup::THREADS);
    }

    // Copies all stages of a tile. What is beyond the rows, the columns and the depth becomes zeros.
    __device__ __forceinline__ void copy(const experts::Tile& tile) {
        u32 rows[ROWS / COPIED];
#pragma unroll
        for (u32 i = 0; i < ROWS / COPIED; ++i) {
            u32 place = tile.first_place + row + i * COPIED;
            rows[i] = experts::NO_ROW;
            if (place < tile.end_place) rows[i] = p.rows ? p.rows[place] : place;
        }
        const u16* weights = p.weights + u64(tile.expert) * (GATED ? 2 : 1) * p.columns * p.depth;
        for (u32 first = 0; first < p.depth; first += DEPTH) {
            await_place(num_begun);
            u32 at = first + piece * 8;
            bool is_deep = at < p.depth;
            u8* to = place_of(shared, num_begun) + warpgroup::piece_at<ROWS>(row, piece);
#pragma unroll
            for (u32 i = 0; i < ROWS / COPIED; ++i) {
                bool is_wanted = is_deep && rows[i] != experts::NO_ROW;
                copy_async(to + i * COPIED * ROW_BYTES, is_wanted ? p.a + u64(rows[i]) * p.depth + at : p.a, is_wanted);
            }
            to += ROWS_BYTES;
#pragma unroll
            for (u32 half = 0; half < WEIGHTS / TILE_COLUMNS; ++half) {
                u32 column = tile.first_column + row;
                const u16* from = weights + (u64(half) * p.columns + column) * p.depth + at;
                // Not all at once: their addresses would not fit the registers.
#pragma unroll 4
                for (u32 i = 0; i < TILE_COLUMNS / COPIED; ++i) {
                    bool is_wanted = is_deep && column < p.columns;
                    copy_async(to, is_wanted ? from : weights, is_wanted);
                    column += COPIED, from += u64(COPIED) * p.depth, to += COPIED * ROW_BYTES;
                }
            }
            end_copy_group();
            if (num_begun >= AHEAD) {
                await_copies<AHEAD>();
                announce(num_begun - AHEAD);
            }
            num_begun += 1;
        }
    }

    __device__ __forceinline__ void end() const {
        await_copies<0>();
        for (u32 stage = num_begun < AHEAD ? 0 : num_begun - AHEAD; stage < num_begun; ++stage) announce(stage);
        // The last products, so that every phase of a barrier ends.
        for (u32 stage = num_begun < STAGES ? STAGES : num_begun; stage < num_begun + STAGES; ++stage) await_place(stage);
    }
};

// Two adjacent columns of each of four groups of eight become all columns of one group: that of the lane's place among
// four adjacent lanes.
__device__ __forceinline__ uint4 join_columns(u32 (&pairs)[4]) {
    u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (u32 i = 0; i < 4; i += 2) {
        u32 got = shuffle_xor(lane & 1 ? pairs[i] : pairs[i + 1], 1);
        pairs[i] = lane & 1 ? got : pairs[i], pairs[i + 1] = lane & 1 ? pairs[i + 1] : got;
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        u32 got = shuffle_xor(lane & 2 ? pairs[i] : pairs[i + 2], 2);
        pairs[i] = lane & 2 ? got : pairs[i], pairs[i + 2] = lane & 2 ? pairs[i + 2] : got;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

} // namespace wgmma_expert_products

// out = a weights^T. The blocks share the tiles of 128 rows and 256 weight rows; two warpgroups compute 64 rows each, a
// third one copies ahead of them. Reads the weights once per 128 rows of an expert and the rows once per 256 weight rows:
// 85 operations per byte from the L2 cache. That, with 192 KiB of shared memory, keeps one block to a multiprocessor. A
// warpgroup without rows does not multiply, so up to 64 rows take half of the tensor cores' time.
//
// `columns` is a multiple of 8.
#if GATED
KERNEL(wgmma_gated_expert_product, ExpertProduct, wgmma_expert_products::THREADS, 1) {
#else
KERNEL(wgmma_expert_product, ExpertProduct, wgmma_expert_products::THREADS, 1) {
#endif
#if defined(BATON_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using namespace wgmma_expert_products;
    DYNAMIC_SHARED_ALIGNED(shared, warpgroup::ATOM_BYTES);
    u32* first_tiles = reinterpret_cast<u32*>(shared + STAGES * STAGE_BYTES);
    experts::Tiles tiles = experts::tiles_of(p, first_tiles, ROWS, TILE_COLUMNS);
    tiles.count(p);
    __syncthreads();
    u64 num_tiles = tiles.number(p);

    if (threadIdx.x >= COMPUTING) {
        warpgroup::give_registers<COPYING_REGISTERS>();
        u32 thread = threadIdx.x - COMPUTING;
        Copier copier = {p, shared, thread % 8, thread / 8, 0};
        for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) copier.copy(tiles.find(p, tile));
        copier.end();
        return;
    }
    warpgroup::take_registers<COMPUTING_REGISTERS>();
    u32 computing = threadIdx.x / warpgroup::THREADS, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 num_steps = (p.depth + DEPTH - 1) / DEPTH, stage = 0;
    u64 rows_at_0 = warpgroup::matrix_of(shared + computing * (64 * ROW_BYTES), ROWS_BYTES);
    u64 weights_at_0 = warpgroup::matrix_of(shared + ROWS_BYTES, STAGE_BYTES - ROWS_BYTES);
    auto await_stage = [&](u32 stage) {
        warpgroup::sync_at_barrier(full(stage, computing), COPYING + warpgroup::THREADS);
    };
    auto release_stage = [&](u32 stage) { warpgroup::arrive_at_barrier(empty(stage), THREADS); };

    for (u64 idx = blockIdx.x; idx < num_tiles; idx += gridDim.x) {
        experts::Tile tile = tiles.find(p, idx);
        if (tile.first_place + computing * 64 >= tile.end_place) {
            for (u32 end = stage + num_steps; stage < end; ++stage) await_stage(stage), release_stage(stage);
            continue;
        }
        float sums[WEIGHTS / 8][4] = {};
        for (u32 step = 0; step < num_steps; ++step, ++stage) {
            await_stage(stage);
            u64 offset = stage % STAGES * (STAGE_BYTES >> 4);
            warpgroup::hold(sums);
            warpgroup::begin_products();
#pragma unroll
            for (u32 k = 0; k < DEPTH / 16; ++k)
                warpgroup::add_product(sums, rows_at_0 + offset + k * 2, weights_at_0 + offset + k * 2);
            warpgroup::end_product_group();
            // The products of the stage before are done.
            warpgroup::await_products<1>();
            warpgroup::hold(sums);
            if (step > 0) release_stage(stage - 1);
        }
        warpgroup::await_products<0>();
        warpgroup::hold(sums);
        release_stage(stage - 1);

#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 place = tile.first_place + warp * 16 + half * 8 + lane / 4;
#pragma unroll
            for (u32 n = 0; n < TILE_COLUMNS / 8; n += 4) {
                u32 pairs[4];
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    float x = sums[n + j][half * 2], y = sums[n + j][half * 2 + 1];
#if GATED
                    x = activated<ACTIVATION>(x) * sums[TILE_COLUMNS / 8 + n + j][half * 2];
                    y = activated<ACTIVATION>(y) * sums[TILE_COLUMNS / 8 + n + j][half * 2 + 1];
#endif
                    pairs[j] = pack_bf16(x, y);
                }
                // By all lanes, also those of rows that do not exist.
                uint4 joined = join_columns(pairs);
                u32 column = tile.first_column + (n + lane % 4) * 8;
                if (place < tile.end_place && column < p.columns) {
                    *reinterpret_cast<uint4*>(p.out + u64(place) * p.columns + column) = joined;
                }
            }
        }
    }
#endif
}
