// Products of each expert's rows with its weights, all experts in one launch.
//
//   TILE_ROWS    rows of an output tile: 16, 32, 64 or 128
//   GATED        1: weights are gate rows, then up rows; the output is activation(gate) * up
//   ACTIVATION   activation of the gates
#include "expert_tiles.cuh"

#if GATED
// A program may contain both variants.
#define expert_products gated_expert_products
#endif

namespace expert_products {

// Weight rows of a tile, and the depth of a pipeline stage in elements.
constexpr u32 COLUMNS = 128, DEPTH = 64;
constexpr u32 STAGES = TILE_ROWS > 64 ? 3 : 4;
// Four groups of warps share the columns. Large tiles have two groups that share the rows.
constexpr u32 WARPS_DOWN = TILE_ROWS > 64 ? 2 : 1, THREADS = WARPS_DOWN * 4 * WARP;
constexpr u32 WARP_ROWS = TILE_ROWS / WARPS_DOWN, ROW_TILES = WARP_ROWS / 16;
// Columns of the output.
constexpr u32 TILE_COLUMNS = GATED ? COLUMNS / 2 : COLUMNS;
constexpr u32 STAGE_BYTES = (TILE_ROWS + COLUMNS) * DEPTH * 2;
// A row of a stage is eight chunks of 16 bytes. This many rows are copied at a time.
constexpr u32 COPIED = THREADS / 8;

// Swaps chunks so that the same chunk of eight adjacent rows is in different banks.
__device__ __forceinline__ u8* chunk_at(u8* rows, u32 row, u32 chunk) {
    return rows + row * DEPTH * 2 + (chunk ^ row % 8) * 16;
}

} // namespace expert_products

// out = a weights^T. The blocks share the tiles, which they derive from the offsets: only the device knows their
// number. Tiles with the same weights follow each other. Reads the weights once per TILE_ROWS rows of an expert, 2
// bytes per element, with 2 operations per row and weight. Bound by memory bandwidth up to about 300 rows per expert,
// then by tensor cores.
#if GATED
KERNEL(gated_expert_product, ExpertProduct, expert_products::THREADS) {
#else
KERNEL(expert_product, ExpertProduct, expert_products::THREADS) {
#endif
    using namespace expert_products;
    DYNAMIC_SHARED(shared);
    u32* first_tiles = reinterpret_cast<u32*>(shared + STAGES * STAGE_BYTES);
    experts::Tiles tiles = experts::tiles_of(p, first_tiles, TILE_ROWS, TILE_COLUMNS);
    tiles.count(p);
    __syncthreads();
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 warp_row = warp / 4 * WARP_ROWS, warp_column = warp % 4;
    u32 num_steps = (p.depth + DEPTH - 1) / DEPTH;
    u64 num_tiles = tiles.number(p);
    // The chunks that a thread copies of each row.
    u32 chunk = threadIdx.x % 8, copied_row = threadIdx.x / 8;

    for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        experts::Tile found = tiles.find(p, tile);
        u32 first_place = found.first_place, end_place = found.end_place, first_column = found.first_column;
        const u16* weights = p.weights + u64(found.expert) * (GATED ? 2 : 1) * p.columns * p.depth;

        const u16* a_rows[TILE_ROWS / COPIED + 1];
#pragma unroll
        for (u32 i = 0; i * COPIED < TILE_ROWS; ++i) {
            u32 place = first_place + copied_row + i * COPIED;
            a_rows[i] = nullptr;
            if (place < end_place) a_rows[i] = p.a + u64(p.rows ? p.rows[place] : place) * p.depth;
        }
        auto copy = [&](u32 step) {
            u8 *a = shared + step % STAGES * STAGE_BYTES, *b = a + TILE_ROWS * DEPTH * 2;
            u32 at = step * DEPTH + chunk * 8;
#pragma unroll
            for (u32 i = 0; i * COPIED < TILE_ROWS; ++i) {
                bool is_wanted = a_rows[i] && at < p.depth;
                copy_async(chunk_at(a, copied_row + i * COPIED, chunk), is_wanted ? a_rows[i] + at : p.a, is_wanted);
            }
#pragma unroll
            for (u32 i = 0; i * COPIED < COLUMNS; ++i) {
                u32 row = copied_row + i * COPIED, column = first_column + row % TILE_COLUMNS;
                bool is_wanted = column < p.columns && at < p.depth;
                const u16* from = weights + (u64(row / TILE_COLUMNS) * p.columns + column) * p.depth + at;
                copy_async(chunk_at(b, row, chunk), is_wanted ? from : weights, is_wanted);
            }
        };

        float sums[ROW_TILES][4][4] = {};
        for (u32 step = 0; step < STAGES - 1; ++step) {
            if (step < num_steps) copy(step);
            end_copy_group();
        }
        for (u32 step = 0; step < num_steps; ++step) {
            await_copies<STAGES - 2>();
            // All threads have copied this stage, and the stage before is free.
            __syncthreads();
            if (step + STAGES - 1 < num_steps) copy(step + STAGES - 1);
            end_copy_group();
            u8 *a = shared + step % STAGES * STAGE_BYTES, *b = a + TILE_ROWS * DEPTH * 2;
#pragma unroll
            for (u32 k = 0; k < DEPTH / 16; ++k) {
                // Columns 8 j to 8 j + 7 of the warp. If gated: two groups of gates, then the two matching groups of
                // up values.
                u32 columns[4][2];
#pragma unroll
                for (u32 j = 0; j < 2; ++j) {
                    u32 m[4], row = GATED ? j * TILE_COLUMNS + warp_column * 16 : warp_column * 32 + j * 16;
                    load_matrices(m, chunk_at(b, row + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
                    columns[2 * j][0] = m[0], columns[2 * j][1] = m[1];
                    columns[2 * j + 1][0] = m[2], columns[2 * j + 1][1] = m[3];
                }
#pragma unroll
                for (u32 i = 0; i < ROW_TILES; ++i) {
                    u32 rows[4];
                    load_matrices(rows, chunk_at(a, warp_row + i * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) mma_bf16(sums[i][j], rows, columns[j]);
                }
            }
        }
        // The first copies of the next tile overwrite memory that other threads may still read.
        __syncthreads();

#pragma unroll
        for (u32 i = 0; i < ROW_TILES; ++i) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                u32 place = first_place + warp_row + i * 16 + half * 8 + lane / 4;
                if (place >= end_place) continue;
                u16* out = p.out + u64(place) * p.columns;
#pragma unroll
                for (u32 j = 0; j < (GATED ? 2 : 4); ++j) {
                    u32 column = first_column + warp_column * (TILE_COLUMNS / 4) + j * 8 + lane % 4 * 2;
                    if (column >= p.columns) continue;
                    float x = sums[i][j][half * 2], y = sums[i][j][half * 2 + 1];
#if GATED
                    x = activated<ACTIVATION>(x) * sums[i][j + 2][half * 2];
                    y = activated<ACTIVATION>(y) * sums[i][j + 2][half * 2 + 1];
#endif
                    *reinterpret_cast<u32*>(out + column) = pack_bf16(x, y);
                }
            }
        }
    }
}
