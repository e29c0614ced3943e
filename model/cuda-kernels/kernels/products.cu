// Products of few rows with weights below bf16: out[row][n] = sum over k of x[row][k] w[n][k], 16 or 32 rows at a time.
// Also the conversions around a library's products of many rows: weights to bf16, activations to fp8.
//
// Weights are widened to bf16 in registers, exactly, and multiplied by tensor cores with f32 sums. Scales are applied
// to the sums of groups, in f32. The bits of a row's result do not depend on the other rows or their number: a row is
// a column of its own in every matrix instruction, K is always divided in the same way, and the sums of its parts
// are added in the same order.
//
// WEIGHTS is the format of the weights. All formats are row-major, [n][k]:
//   1 fp8 (E4M3), as in files; its two NaNs become +-480
//   2 int8, in the order below
//   3 int4, levels from 0 on, in the order below
// Integers: the 16 bytes that a lane reads of a row hold, for each 32 numbers that its warp multiplies, the eight
// numbers 8 in to 8 in + 7 with in = lane % 4. All numbers of an instruction are then of one group. A row is stored
// in steps of 64 (int8) or 128 (int4) numbers: the 16 bytes of each of the four lanes. An int8 word holds its four
// numbers in the order 0 2 1 3, minus 128. An int4 word holds numbers 0 2 4 6 in its low half, from the lowest bits
// on, and 1 3 5 7 in its high half. The last step is padded: see pack in ../src/products.rs.
#include "common.cuh"

#ifndef WEIGHTS
#define WEIGHTS 1
#endif

// A model has weights of several kinds, so its program contains this file several times.
#if WEIGHTS == 1
#define OF_KIND(name) name##_fp8
#elif WEIGHTS == 2
#define OF_KIND(name) name##_int8
#else
#define OF_KIND(name) name##_int4
#endif
// Expands the macro.
#define NAMED_KERNEL(name, Params, ...) KERNEL(name, Params, __VA_ARGS__)
#define NAMED_EARLY_KERNEL(name, Params, ...) EARLY_KERNEL(name, Params, __VA_ARGS__)

namespace products {

struct Scales {
    // For output n and number k: [n / rows_per_scale * row_stride + k / group * group_stride]. Integers have
    // rows_per_scale 1, row_stride 1, and a group_stride that is a multiple of 4: four outputs are one load.
    const float* scales;
    // Like scales: the level that stands for zero, minus the middle level (8 or 128). Null if the format has no
    // zeros.
    const float* zeros;
    u32 rows_per_scale, row_stride, group_stride;
    // A multiple of 32, for fp8 of 64.
    u32 group;
};

// Divides by a number that is known before a loop: one multiplication each. Exact while the quotient times the square
// of the divisor is below 2^31, so for groups of any size in rows of up to a million numbers.
struct Divisor {
    u32 inverse;

    __device__ __forceinline__ explicit Divisor(u32 divisor) : inverse((0x80000000u + divisor - 1) / divisor) {}
    __device__ __forceinline__ u32 of(u32 x) const { return u32(u64(x * 2) * inverse >> 32); }
};

} // namespace products

namespace OF_KIND(products) {

constexpr u32 FP8 = 1, INT8 = 2, INT4 = 3;
constexpr bool IS_INTEGER = WEIGHTS >= INT8;
// Numbers of a row in the 16 bytes of four lanes.
constexpr u32 STEP = WEIGHTS == INT4 ? 128 : 64;
// An instruction takes 16 numbers. A unit is two instructions.
constexpr u32 UNITS = STEP / 32;

// Offset of a lane's eight numbers of a unit, from the start of the step.
__device__ __forceinline__ u32 numbers_at(u32 in, u32 unit) {
    return WEIGHTS == FP8 ? 16 * in + 8 * unit : 32 * unit + 8 * in;
}

// Bytes from a lane's eight activations of one unit to those of the next.
constexpr u32 UNIT_BYTES = WEIGHTS == FP8 ? 16 : 64;

// Bytes from one row of weights to the next.
__device__ __forceinline__ u64 row_bytes(u32 k) {
    if (WEIGHTS == FP8) return k;
    return u64(k + STEP - 1) / STEP * 64;
}

// The eight numbers of a unit as four pairs of bf16. Integers have their middle level subtracted.
__device__ __forceinline__ void widen_unit(uint4 from, u32 unit, u32 (&to)[4]) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
    if (WEIGHTS == FP8) {
        // Like widen_e4m3, with two codes next to each other: the sign is extended, so that one mask is enough.
        for (u32 i = 0; i < 4; ++i) {
            u32 pair = pick_bytes(words[(2 * unit + i / 2) % 4], 0, i % 2 ? 0xb3a2 : 0x9180);
            to[i] = multiply_add_bf16(pair << 4 & 0x87f087f0u, 0x7b807b80u, 0x80008000u);
        }
    } else if (WEIGHTS == INT8) {
        for (u32 i = 0; i < 2; ++i) widen_i8(words[(2 * unit + i) % 4], to[2 * i], to[2 * i + 1]);
    } else {
        for (u32 i = 0; i < 4; ++i) {
            // 128 + level, exactly; then minus 136.
            u32 levels = and_or(words[unit % 4] >> 4 * i, 0x000f000fu, 0x43004300u);
            to[i] = multiply_add_bf16(levels, 0x3f803f80u, 0xc308c308u);
        }
    }
}

} // namespace OF_KIND(products)

// out = x w^T (+ bias). With experts, each place has its row and the weights of its expert.
struct MultiplyFew {
    // [..][k], bf16. k is a multiple of 8, for fp8 of 16.
    const u16* x;
    // [places]: the row of x at each place. Null: the place itself.
    const u32* rows;
    // [num_experts + 1]: each expert's first place. Null: there is one matrix and num_rows places.
    const u32* offsets;
    // [num_experts][n]
    const u8* weights;
    // The scale of output n of expert e is that of output e * (number of outputs) + n.
    products::Scales scales;
    // [n], or null. Null with experts.
    const float* bias;
    // [places][n]: f32 if is_f32, otherwise bf16.
    void* out;
    u32 k, n;
    u32 num_rows;
    u32 num_experts;
    u32 is_f32;
    // WEIGHTS.
    u32 kind;
    // Parts of K, of part_chunks chunks each, in blocks of their own. 1 with experts.
    u32 num_parts, part_chunks;
    // [num_parts][num_rows][n, padded to a multiple of 4], f32. Null if there is one part.
    float* part_sums;
    // [passes of rows][blocks of outputs]: how many blocks have written their part. Zeros between launches.
    u32* parts_done;
};

namespace OF_KIND(products) {

__device__ __forceinline__ u32 first_place(const MultiplyFew& p) { return p.offsets ? p.offsets[blockIdx.y] : 0; }

__device__ __forceinline__ u32 end_place(const MultiplyFew& p) {
    return p.offsets ? p.offsets[blockIdx.y + 1] : p.num_rows;
}

// How the groups of K that share a scale meet the steps of K.
//   WHOLE_ROWS   a row is one group: its scale is applied to the whole sum
//   LONG         a group is one or more steps
//   SHORT        a group is one or more units
enum class Groups { WHOLE_ROWS, LONG, SHORT };

// A block multiplies 128 outputs, four warps of 32. A chunk of K has two steps: one for four warps, one for the other four.
constexpr u32 TILES = 2, WARP_OUTPUTS = 16 * TILES;
constexpr u32 OUTPUT_WARPS = 4, K_WARPS = 2, WARPS = OUTPUT_WARPS * K_WARPS;
constexpr u32 OUTPUTS = OUTPUT_WARPS * WARP_OUTPUTS, CHUNK = K_WARPS * STEP;
// The outputs of a lane: ROWS adjacent ones, of which each is a row of a matrix instruction. Outputs and places past the end
// are zeros.
constexpr u32 ROWS = 2 * TILES;

// A stage of the pipeline, in shared memory: a chunk of rows of x, of weights, and of an integer's scales and zeros, at most
// one for each unit. In odd rows of x, the pieces of a lane's even and odd units change places, so that the lanes of a load
// find theirs in different banks.
template <u32 COLUMN_TILES, bool HAS_ZEROS> struct StageLayout {
    static constexpr u32 X_ROW = CHUNK * 2;
    static constexpr u32 WEIGHTS_AT = 8 * COLUMN_TILES * X_ROW;
    static constexpr u32 SCALES_AT = WEIGHTS_AT + ROWS * WARPS * WARP * 16;
    static constexpr u32 SCALE_BYTES = IS_INTEGER ? K_WARPS * UNITS * OUTPUTS * 4 : 0;
    static constexpr u32 ZEROS_AT = SCALES_AT + SCALE_BYTES;
    static constexpr u32 BYTES = ZEROS_AT + (HAS_ZEROS ? SCALE_BYTES : 0);
};

// Stages that fit 99 KiB, which every supported card has for a block. The launch has room for as many: `shared_bytes` in ../src/products.rs.
template <u32 COLUMN_TILES> constexpr u32 STAGES = COLUMN_TILES == 4 && WEIGHTS == INT4 ? 2 : 3;

// Floats from one place to the next where the warps of a block add their sums: lanes find theirs in different banks.
constexpr u32 SUMS_ROW = OUTPUTS + 4;

__device__ __forceinline__ float4 add(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Stores four adjacent outputs from n on, as far as they exist.
__device__ __forceinline__ void store(const MultiplyFew& p, u32 place, u32 n, float4 sums) {
    const float values[4] = {sums.x, sums.y, sums.z, sums.w};
    const u64 to = u64(place) * p.n + n;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if (n + i >= p.n) return;
        const float sum = p.bias ? values[i] + p.bias[n + i] : values[i];
        if (p.is_f32) {
            static_cast<float*>(p.out)[to + i] = sum;
        } else {
            static_cast<u16*>(p.out)[to + i] = round_bf16(sum);
        }
    }
}

// Multiplies the next 8 * COLUMN_TILES places, or fewer, with a part of K, and stores the results.
template <u32 COLUMN_TILES, Groups GROUPS, bool HAS_ZEROS>
__device__ __forceinline__ void multiply(const MultiplyFew& p, u32 done, u8* shared) {
    using Stage = StageLayout<COLUMN_TILES, HAS_ZEROS>;
    constexpr u32 NUM = STAGES<COLUMN_TILES>;
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, in = lane % 4;
    const u32 k_warp = warp / OUTPUT_WARPS, first_of_warp = warp % OUTPUT_WARPS * WARP_OUTPUTS;
    // The weights of this expert.
    const u32 first_row = blockIdx.y * p.n, first_output = blockIdx.x * OUTPUTS;
    const u32 first = first_output + first_of_warp + group * ROWS;
    const u32 num_steps = (p.k + STEP - 1) / STEP, num_chunks = (num_steps + K_WARPS - 1) / K_WARPS;
    const u32 chunk_begin = blockIdx.z * p.part_chunks;
    const u32 chunk_end = p.num_parts == 1 || chunk_begin + p.part_chunks > num_chunks ? num_chunks : chunk_begin + p.part_chunks;

    // In units of 16 bytes, in which 32 bits reach 64 GiB: they take half of the registers of addresses.
    const u32 row_places = u32(row_bytes(p.k) / 16), weights_place = (first_row + first) * row_places + k_warp * 4 + in;
    u32 scale_places[ROWS];
    if constexpr (!IS_INTEGER) {
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            const u32 n = first_row + (first + i < p.n ? first + i : p.n - 1);
            scale_places[i] = n / p.scales.rows_per_scale * p.scales.row_stride;
        }
    }
    const products::Divisor groups(GROUPS == Groups::SHORT  ? p.scales.group / 32
                                   : GROUPS == Groups::LONG ? p.scales.group / STEP
                                                            : 1);
    const u32 last_group = (p.k - 1) / p.scales.group;
    // Each lane copies the weights that it will multiply, and threads share the copies of four outputs' scales: one for each
    // group that meets the chunk, or one for each step.
    constexpr u32 SCALES_OF_CHUNK = GROUPS == Groups::SHORT ? K_WARPS * UNITS : K_WARPS;
    const u32 scale_idx = threadIdx.x / (OUTPUTS / 4), scale_output = threadIdx.x % (OUTPUTS / 4) * 4;
    // The rows of a table are padded to a multiple of four.
    const u32 scale_place = first_row + (first_output + scale_output < p.n ? first_output + scale_output : (p.n - 1) / 4 * 4);
    auto copy_weights = [&](u32 chunk, u8* stage) {
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            // Integers are padded to whole steps.
            const u32 step = chunk * K_WARPS + k_warp;
            const bool is_k = IS_INTEGER ? step < num_steps : step * STEP + numbers_at(in, 0) < p.k;
            const bool is_there = is_k && first + i < p.n;
            const u8* from = p.weights + u64(weights_place + i * row_places + chunk * (K_WARPS * 4)) * 16;
            copy_weights_async(stage + Stage::WEIGHTS_AT + (i * WARPS * WARP + threadIdx.x) * 16, from, is_there);
        }
        if (IS_INTEGER && scale_idx < SCALES_OF_CHUNK) {
            // The last chunk may have units past the end of K. Their activations are zero.
            const u32 nth = groups.of(chunk * SCALES_OF_CHUNK + scale_idx);
            const u64 at = u64(nth < last_group ? nth : last_group) * p.scales.group_stride + scale_place;
            u8* to = stage + Stage::SCALES_AT + (scale_idx * OUTPUTS + scale_output) * 4;
            copy_async(to, p.scales.scales + at, true);
            if (HAS_ZEROS) copy_async(to + Stage::SCALE_BYTES, p.scales.zeros + at, true);
        }
    };

    // Threads share the copies of rows of x, 16 bytes at a time.
    constexpr u32 PIECES = CHUNK / 8, ROWS_AT_ONCE = WARPS * WARP / PIECES, X_ROWS = 8 * COLUMN_TILES;
    constexpr u32 X_COPIES = (X_ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const u32 x_row = threadIdx.x / PIECES, x_piece = threadIdx.x % PIECES;
    // Experts have as many as 16 rows at a time.
    u32 x_places[COLUMN_TILES == 4 ? 1 : X_COPIES];
    u32 last = 0;
    auto copy_x = [&](u32 chunk, u8* stage) {
        if (X_ROWS < ROWS_AT_ONCE && x_row >= X_ROWS) return;
        u8* to = stage + x_row * Stage::X_ROW + (x_piece ^ x_row % 2 * (UNIT_BYTES / 16)) * 16;
#pragma unroll
        for (u32 i = 0; i < X_COPIES; ++i) {
            const u32 place = COLUMN_TILES == 4 ? x_places[0] + i * ROWS_AT_ONCE * (p.k / 8) : x_places[i];
            const bool is_there = chunk * CHUNK + x_piece * 8 < p.k && x_row + i * ROWS_AT_ONCE <= last;
            copy_async(to + i * ROWS_AT_ONCE * Stage::X_ROW, p.x + u64(place + chunk * PIECES) * 8, is_there);
        }
    };

    // Weights do not depend on the kernel ahead, nor do the places of a matrix that is not an expert's.
    const bool is_early = !p.offsets && done == 0;
    if (is_early) {
#pragma unroll
        for (u32 i = 0; i + 1 < NUM; ++i) {
            if (chunk_begin + i < chunk_end) copy_weights(chunk_begin + i, shared + i * Stage::BYTES);
        }
        begin_kernel();
    }
    const u32 place = first_place(p) + done;
    last = end_place(p) - place - 1;
    if constexpr (COLUMN_TILES == 4) {
        x_places[0] = (place + x_row) * (p.k / 8) + x_piece;
    } else {
#pragma unroll
        for (u32 i = 0; i < X_COPIES; ++i) {
            const u32 row = x_row + i * ROWS_AT_ONCE, at = place + (row < last ? row : last);
            x_places[i] = (p.rows ? p.rows[at] : at) * (p.k / 8) + x_piece;
        }
    }
#pragma unroll
    for (u32 i = 0; i + 1 < NUM; ++i) {
        if (chunk_begin + i < chunk_end) {
            if (!is_early) copy_weights(chunk_begin + i, shared + i * Stage::BYTES);
            copy_x(chunk_begin + i, shared + i * Stage::BYTES);
        }
        end_copy_group();
    }

    // Scales of fp8 blocks are loaded one chunk ahead, into registers.
    float scales[ROWS], next_scales[ROWS];
    auto load_scales = [&](u32 chunk) {
        const u32 nth = groups.of(chunk * K_WARPS + k_warp);
        const u32 at = (nth < last_group ? nth : last_group) * p.scales.group_stride;
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) next_scales[i] = p.scales.scales[scale_places[i] + at];
    };
    constexpr bool HAS_BLOCK_SCALES = !IS_INTEGER && GROUPS == Groups::LONG;
    if (HAS_BLOCK_SCALES) load_scales(chunk_begin);

    float total[TILES][COLUMN_TILES][4] = {};
    u32 at_stage = 0;
    for (u32 chunk = chunk_begin; chunk < chunk_end; ++chunk) {
        await_copies<NUM - 2>();
        // What others copied is there, and the stage before is free.
        __syncthreads();
        if (chunk + NUM - 1 < chunk_end) {
            u8* before = shared + (at_stage == 0 ? NUM - 1 : at_stage - 1) * Stage::BYTES;
            copy_weights(chunk + NUM - 1, before);
            copy_x(chunk + NUM - 1, before);
        }
        end_copy_group();
        const u8* stage = shared + at_stage * Stage::BYTES;
        at_stage = at_stage + 1 == NUM ? 0 : at_stage + 1;
        uint4 now[ROWS];
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            now[i] = *reinterpret_cast<const uint4*>(stage + Stage::WEIGHTS_AT + (i * WARPS * WARP + threadIdx.x) * 16);
        }
        const u8* x_rows = stage + group * Stage::X_ROW + k_warp * (STEP * 2) + numbers_at(in, 0) * 2;
        float part[TILES][COLUMN_TILES][4] = {};
        // The sums of a group's activations, for the product with its zero.
        float sum_of_x[COLUMN_TILES][4] = {};
        float zeros[ROWS];
        if (HAS_BLOCK_SCALES) {
#pragma unroll
            for (u32 i = 0; i < ROWS; ++i) scales[i] = next_scales[i];
            load_scales(chunk + 1);
        }
#pragma unroll
        for (u32 unit = 0; unit < UNITS; ++unit) {
            if (IS_INTEGER && (GROUPS == Groups::SHORT || unit == 0)) {
                const u32 nth = GROUPS == Groups::SHORT ? k_warp * UNITS + unit : k_warp;
                const u8* at = stage + Stage::SCALES_AT + (nth * OUTPUTS + first_of_warp + group * ROWS) * 4;
                const float4 four = *reinterpret_cast<const float4*>(at);
                scales[0] = four.x, scales[1] = four.y, scales[2] = four.z, scales[3] = four.w;
                if (HAS_ZEROS) {
                    const float4 levels = *reinterpret_cast<const float4*>(at + Stage::SCALE_BYTES);
                    zeros[0] = levels.x, zeros[1] = levels.y, zeros[2] = levels.z, zeros[3] = levels.w;
                }
            }
            u32 left[TILES][2][4];
#pragma unroll
            for (u32 t = 0; t < TILES; ++t) {
                u32 upper[4], lower[4];
                widen_unit(now[2 * t], unit, upper);
                widen_unit(now[2 * t + 1], unit, lower);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) left[t][i / 2][i % 2 * 2] = upper[i], left[t][i / 2][i % 2 * 2 + 1] = lower[i];
            }
            const u8* of_unit = x_rows + (unit ^ group % 2) * UNIT_BYTES;
#pragma unroll
            for (u32 c = 0; c < COLUMN_TILES; ++c) {
                const uint4 x = *reinterpret_cast<const uint4*>(of_unit + 8 * c * Stage::X_ROW);
                if (HAS_ZEROS) {
                    const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
                    mma_bf16(sum_of_x[c], ones, {x.x, x.y});
                    mma_bf16(sum_of_x[c], ones, {x.z, x.w});
                }
#pragma unroll
                for (u32 t = 0; t < TILES; ++t) {
                    float(&to)[4] = GROUPS == Groups::WHOLE_ROWS ? total[t][c] : part[t][c];
                    mma_bf16(to, left[t][0], {x.x, x.y});
                    mma_bf16(to, left[t][1], {x.z, x.w});
                }
                if constexpr (GROUPS != Groups::WHOLE_ROWS) {
                    if (GROUPS == Groups::LONG && unit + 1 < UNITS) continue;
#pragma unroll
                    for (u32 i = 0; i < ROWS * 2; ++i) {
                        float& of_group = part[i / 4][c][i % 4];
                        if (HAS_ZEROS) of_group -= zeros[i / 2] * sum_of_x[c][i % 2];
                        total[i / 4][c][i % 4] += scales[i / 2] * of_group;
                        of_group = 0.0f;
                    }
                    sum_of_x[c][0] = sum_of_x[c][1] = 0.0f;
                }
            }
        }
    }
    if (GROUPS == Groups::WHOLE_ROWS) {
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) scales[i] = p.scales.scales[scale_places[i]];
    }
    // The sums of an output's two warps are added, and parts of K after that, in one order, always.
    float* sums = reinterpret_cast<float*>(shared);
    await_copies<0>();
    __syncthreads();
    const u32 part_width = (p.n + 3) / 4 * 4;
    float* part_to = p.part_sums + u64(blockIdx.z) * p.num_rows * part_width;
#pragma unroll
    for (u32 k = K_WARPS; k-- > 0;) {
        if (k_warp == k) {
#pragma unroll
            for (u32 c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    const u32 row = c * 8 + 2 * in + i;
                    float4 four = make_float4(total[0][c][i], total[0][c][i + 2], total[1][c][i], total[1][c][i + 2]);
                    if (GROUPS == Groups::WHOLE_ROWS) {
                        four.x *= scales[0], four.y *= scales[1], four.z *= scales[2], four.w *= scales[3];
                    }
                    float4* of_block = reinterpret_cast<float4*>(sums + row * SUMS_ROW + first_of_warp + group * ROWS);
                    if (k > 0) {
                        *of_block = four;
                    } else if (row <= last && first < p.n) {
                        four = add(four, *of_block);
                        if (p.num_parts == 1) {
                            store(p, place + row, first, four);
                        } else {
                            *reinterpret_cast<float4*>(part_to + u64(done + row) * part_width + first) = four;
                        }
                    }
                }
            }
        }
        __syncthreads();
    }
    if (p.num_parts == 1) return;
    u32* parts_done = p.parts_done + done / (8 * COLUMN_TILES) * gridDim.x + blockIdx.x;
    const bool is_last = is_last_part(parts_done, p.num_parts, reinterpret_cast<u32*>(shared));
    // All have read it, and the next places may overwrite it.
    __syncthreads();
    if (!is_last) return;
    // Fours of outputs of a thread: it loads those of all rows together.
    constexpr u32 FOURS = X_ROWS * OUTPUTS / 4 / (WARPS * WARP), ROWS_OF_ONE = X_ROWS / FOURS;
    const u32 row = threadIdx.x / (OUTPUTS / 4), n = first_output + threadIdx.x % (OUTPUTS / 4) * 4;
    if (n >= p.n) return;
    const float* from = p.part_sums + u64(done + row) * part_width + n;
    float4 fours[FOURS];
#pragma unroll
    for (u32 i = 0; i < FOURS; ++i) fours[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (u32 part = 0; part < p.num_parts; ++part) {
#pragma unroll
        for (u32 i = 0; i < FOURS; ++i) {
            if (row + i * ROWS_OF_ONE > last) continue;
            fours[i] = add(fours[i], *reinterpret_cast<const float4*>(from + i * ROWS_OF_ONE * part_width));
        }
        from += u64(p.num_rows) * part_width;
    }
#pragma unroll
    for (u32 i = 0; i < FOURS; ++i) {
        if (row + i * ROWS_OF_ONE <= last) store(p, place + row + i * ROWS_OF_ONE, n, fours[i]);
    }
}

template <u32 COLUMN_TILES, bool HAS_ZEROS>
__device__ __forceinline__ void multiply(const MultiplyFew& p, u32 done, u8* shared) {
    if constexpr (IS_INTEGER) {
        if (p.scales.group % STEP == 0) {
            multiply<COLUMN_TILES, Groups::LONG, HAS_ZEROS>(p, done, shared);
        } else {
            multiply<COLUMN_TILES, Groups::SHORT, HAS_ZEROS>(p, done, shared);
        }
    } else if (p.scales.group >= p.k) {
        multiply<COLUMN_TILES, Groups::WHOLE_ROWS, false>(p, done, shared);
    } else {
        multiply<COLUMN_TILES, Groups::LONG, false>(p, done, shared);
    }
}

// 16 places at a time.
template <bool HAS_ZEROS> __device__ __forceinline__ void multiply_few(const MultiplyFew& p) {
    DYNAMIC_SHARED(shared);
    // Only the kernel ahead knows the places of experts.
    if (p.offsets) begin_kernel();
    // Registers are scarce, so both ends are read again for every 16 places.
    for (u32 done = 0;; done += 16) {
        if (first_place(p) + done >= end_place(p)) return;
        if (end_place(p) - first_place(p) - done <= 8) {
            multiply<1, HAS_ZEROS>(p, done, shared);
        } else {
            multiply<2, HAS_ZEROS>(p, done, shared);
        }
    }
}

// 32 places at a time, without experts.
template <bool HAS_ZEROS> __device__ __forceinline__ void multiply_few32(const MultiplyFew& p) {
    DYNAMIC_SHARED(shared);
    for (u32 done = 0; done < p.num_rows; done += 32) multiply<4, HAS_ZEROS>(p, done, shared);
}

} // namespace OF_KIND(products)

// Blocks on a multiprocessor. The assembler of CUDA 12.9 spills many registers for Blackwell if it must leave room for a second
// one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define BLOCKS_OF_FEW 1
#else
#define BLOCKS_OF_FEW 2
#endif

// One block per expert, 128 outputs and part of K. For every 16 rows it reads each weight once (1 or 1/2 bytes, and 4 bytes of
// scale per group), from memory the first time, mostly from the L2 cache after that; and 2 bytes of each activation from
// the L2 cache for 128 outputs. Two operations per weight and row, and 1 to 2 more to widen a weight for 16 rows: bound by memory
// bandwidth. 16 KiB of weights for each stage but one are in flight; the first of them before the kernel ahead has ended.
NAMED_EARLY_KERNEL(OF_KIND(multiply_few), MultiplyFew, 256, BLOCKS_OF_FEW) { OF_KIND(products)::multiply_few<false>(p); }

// The same for 32 rows at a time, with the same bits. Weights are read and widened half as often.
NAMED_EARLY_KERNEL(OF_KIND(multiply_few32), MultiplyFew, 256, BLOCKS_OF_FEW) {
    OF_KIND(products)::multiply_few32<false>(p);
}

#if WEIGHTS >= 2
// The same for weights with zeros.
NAMED_EARLY_KERNEL(OF_KIND(multiply_few_zeros), MultiplyFew, 256, BLOCKS_OF_FEW) {
    OF_KIND(products)::multiply_few<true>(p);
}
NAMED_EARLY_KERNEL(OF_KIND(multiply_few32_zeros), MultiplyFew, 256, BLOCKS_OF_FEW) {
    OF_KIND(products)::multiply_few32<true>(p);
}
#endif

#undef BLOCKS_OF_FEW

struct Dequantise {
    const u8* weights;
    products::Scales scales;
    // [n]: the row of the weights for each output row, counted from first_row. Null: row n itself. Rows outside of
    // num_held become zeros.
    const u32* rows;
    // [n][k], bf16.
    u16* out;
    u32 k, n;
    u32 num_held;
    float factor;
    // WEIGHTS.
    u32 kind;
    u32 first_row;
};

// Dequantises weights to bf16, times a factor, each rounded once: for products of many rows and for embeddings. A
// thread converts 16 bytes. Writes 2 bytes per weight and reads 1 or 1/2: bound by memory bandwidth.
NAMED_KERNEL(OF_KIND(dequantise), Dequantise, 256) {
    using namespace OF_KIND(products);
    const u32 chunks = (p.k + STEP - 1) / STEP * 4;
    const u32 idx = blockIdx.x * 256 + threadIdx.x;
    if (idx >= p.n * chunks) return;
    const u32 n = idx / chunks, chunk = idx % chunks, in = chunk % 4, start = chunk / 4 * STEP;
    if (start + numbers_at(in, 0) >= p.k) return;
    const u32 row = p.rows ? p.rows[n] - p.first_row : n;
    const bool is_held = row < p.num_held;
    uint4 from = make_uint4(0, 0, 0, 0);
    if (is_held) from = load_once(p.weights + row * row_bytes(p.k) + u64(chunk) * 16);
    // A step of fp8 is of one group, and a unit of integers.
    const products::Divisor groups(IS_INTEGER ? p.scales.group / 32 : p.scales.group);
    const u64 of_row = is_held ? u64(IS_INTEGER ? row : row / p.scales.rows_per_scale * p.scales.row_stride) : 0;
#pragma unroll
    for (u32 unit = 0; unit < UNITS; ++unit) {
        u32 k = start + numbers_at(in, unit);
        if (k >= p.k) return;
        u32 pairs[4];
        widen_unit(from, unit, pairs);
        u64 of_group = of_row + u64(groups.of(IS_INTEGER ? start / 32 + unit : start)) * p.scales.group_stride;
        float scale = is_held ? p.scales.scales[of_group] * p.factor : 0.0f;
        float zero = IS_INTEGER && p.scales.zeros && is_held ? p.scales.zeros[of_group] : 0.0f;
        float numbers[8];
        widen_bf16(make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]), numbers);
        for (u32 i = 0; i < 8; ++i) numbers[i] = scale * (numbers[i] - zero);
        *reinterpret_cast<uint4*>(p.out + u64(n) * p.k + k) = pack_bf16(numbers);
    }
}

#if WEIGHTS == 1

struct QuantiseRows {
    // [rows][k], bf16; k is a multiple of 8.
    const u16* x;
    // [rows][k], E4M3.
    u8* out;
    // [rows]: the factors that restore the numbers.
    float* scales;
    u32 k;
    u32 num_rows;
};

// Quantises rows of activations to E4M3. The largest number of a row becomes 448. One block per row. Reads 2 bytes
// and writes 1: bound by memory bandwidth; the second read hits a cache.
KERNEL(quantise_rows, QuantiseRows, 256) {
    __shared__ float scratch[2][32];
    u64 row = u64(blockIdx.x) * p.k;
    fp8::Range range = {0.0f, 0.0f};
    for (u32 k = threadIdx.x * 8; k < p.k; k += 256 * 8) {
        float here[8];
        widen_bf16(*reinterpret_cast<const uint4*>(p.x + row + k), here);
        range.take(here);
    }
    fp8::quantise_row(p.x + row, p.k, range, scratch, p.out + row, p.scales + blockIdx.x);
}

struct QuantiseGroups {
    // [rows][k], bf16; k is a multiple of 128.
    const u16* x;
    // [rows][k], E4M3.
    u8* out;
    // [k / 128][stride]
    float* scales;
    u32 k;
    // At least the number of rows.
    u32 stride;
    u64 num_rows;
};

// Like quantise_rows, for each 128 numbers of a row, with 16 lanes each. Reads 2 bytes and writes 1: bound by memory
// bandwidth.
KERNEL(quantise_groups, QuantiseGroups, 256) {
    const u64 row = u64(blockIdx.x) * p.k;
    for (u32 first = 0; first < p.k; first += 256 * 8) {
        u32 k = first + threadIdx.x * 8;
        float here[8] = {};
        if (k < p.k) widen_bf16(*reinterpret_cast<const uint4*>(p.x + row + k), here);
        fp8::quantise_group(here, k < p.k, p.out + row + k, p.scales + k / 128 * p.stride + blockIdx.x);
    }
}

struct ScaleProduct {
    // [rows][n], bf16.
    u16* x;
    // [rows]
    const float* row_scales;
    // [n]
    const float* column_scales;
    u32 n;
    u32 num_rows;
};

// x = x * row scale * column scale, for a library whose fp8 products do not scale. A thread scales eight numbers.
// Moves 4 bytes per element: bound by memory bandwidth.
KERNEL(scale_product, ScaleProduct, 256) {
    const u32 n = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (n >= p.n) return;
    const float of_row = p.row_scales[blockIdx.x];
    uint4* x = reinterpret_cast<uint4*>(p.x + u64(blockIdx.x) * p.n + n);
    float here[8];
    widen_bf16(*x, here);
    for (u32 i = 0; i < 8; ++i) here[i] *= of_row * p.column_scales[n + i];
    *x = pack_bf16(here);
}

#endif
