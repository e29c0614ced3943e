// The tiles of products of experts, which blocks of threads share. Only the device knows how many rows an expert has.
#pragma once
#include "common.cuh"

struct ExpertProduct {
    // [..][depth]
    const u16* a;
    // [places]: the row of a at each place. Null: the place itself.
    const u32* rows;
    // [num_experts + 1]: each expert's first place.
    const u32* offsets;
    // [num_experts][columns, twice if gated][depth]
    const u16* weights;
    // [places][columns]
    u16* out;
    u32 depth;
    u32 columns;
    u32 num_experts;
    // Read by the launch only.
    u16 num_blocks;
    u16 tile_rows;
};

namespace experts {

// The row of a place that does not exist.
constexpr u32 NO_ROW = 0xffffffffu;

// An output tile. Its rows may end beyond `end_place`, and its columns beyond those of the output.
struct Tile {
    u32 expert, first_place, end_place, first_column;
};

// All tiles, in an order in which those with the same weights follow each other.
struct Tiles {
    // Shared memory, [num_experts + 1]: the index of each expert's first tile of the first columns, and their number.
    u32* first_tiles;
    u32 tile_rows, tile_columns, column_tiles;

    // Called by all threads; all of them may use the tiles after the next barrier.
    __device__ __forceinline__ void count(const ExpertProduct& p) const {
        if (threadIdx.x >= WARP) return;
        u32 lane = threadIdx.x, done = 0;
        for (u32 first = 0; first < p.num_experts; first += WARP) {
            u32 expert = first + lane, sum = 0;
            if (expert < p.num_experts) sum = (p.offsets[expert + 1] - p.offsets[expert] + tile_rows - 1) / tile_rows;
            for (u32 step = 1; step < WARP; step *= 2) {
                u32 lower = shuffle(sum, lane >= step ? lane - step : lane);
                if (lane >= step) sum += lower;
            }
            if (expert < p.num_experts) first_tiles[expert + 1] = done + sum;
            done += shuffle(sum, WARP - 1);
        }
        if (lane == 0) first_tiles[0] = 0;
    }

    __device__ __forceinline__ u64 number(const ExpertProduct& p) const {
        return u64(first_tiles[p.num_experts]) * column_tiles;
    }

    __device__ __forceinline__ Tile find(const ExpertProduct& p, u64 idx) const {
        u32 row_tile = u32(idx / column_tiles), expert = 0;
        for (u32 end = p.num_experts; end - expert > 1;) {
            u32 middle = (expert + end) / 2;
            if (first_tiles[middle] <= row_tile) {
                expert = middle;
            } else {
                end = middle;
            }
        }
        u32 row_tiles = first_tiles[expert + 1] - first_tiles[expert];
        u32 of_expert = u32(idx - u64(first_tiles[expert]) * column_tiles);
        u32 first_place = p.offsets[expert] + of_expert % row_tiles * tile_rows;
        return {expert, first_place, p.offsets[expert + 1], of_expert / row_tiles * tile_columns};
    }
};

__device__ __forceinline__ Tiles tiles_of(const ExpertProduct& p, u32* first_tiles, u32 tile_rows, u32 tile_columns) {
    return {first_tiles, tile_rows, tile_columns, (p.columns + tile_columns - 1) / tile_columns};
}

} // namespace experts
