// Products of few rows with weights of all formats: out[row][n] = sum over k of x[row][k] w[n][k], 16 or 32 rows at a
// time. Also the conversions around a library's products of many rows: weights to bf16, activations to fp8.
//
// Weights are widened to bf16 in registers, exactly, and multiplied by tensor cores with f32 sums. Scales are applied
// to the sums of groups, in f32. The bits of a row's result do not depend on the other rows or their number: a row is
// a column of its own in every matrix instruction, K is always divided among warps in the same way, and their sums
// are added in the same order.
//
// WEIGHTS is the format of the weights. All formats are row-major, [n][k]:
//   0 bf16
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
#define WEIGHTS 0
#endif

// A model has weights of several kinds, so its program contains this file several times.
#if WEIGHTS == 0
#define OF_KIND(name) name##_bf16
#elif WEIGHTS == 1
#define OF_KIND(name) name##_fp8
#elif WEIGHTS == 2
#define OF_KIND(name) name##_int8
#else
#define OF_KIND(name) name##_int4
#endif
// Expands the macro.
#define NAMED_KERNEL(name, Params, ...) KERNEL(name, Params, __VA_ARGS__)

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

constexpr u32 BF16 = 0, FP8 = 1, INT8 = 2, INT4 = 3;
constexpr bool IS_INTEGER = WEIGHTS >= INT8;
constexpr bool HAS_SCALES = WEIGHTS != BF16;
// Numbers of a row in the 16 bytes of four lanes.
constexpr u32 STEP = WEIGHTS == BF16 ? 32 : WEIGHTS == INT4 ? 128 : 64;
// An instruction takes 16 numbers. A unit is two instructions.
constexpr u32 UNITS = STEP / 32;
// Tiles of 16 outputs per warp. With smaller weights, the reads of activations weigh more.
constexpr u32 TILES = WEIGHTS == BF16 ? 1 : 2;
constexpr u32 OUTPUTS = 16 * TILES;
constexpr u32 WARPS = 8;

// Offset of a lane's eight numbers of a unit, from the start of the step.
__device__ __forceinline__ u32 numbers_at(u32 in, u32 unit) {
    return WEIGHTS == FP8 ? 16 * in + 8 * unit : 32 * unit + 8 * in;
}

// Bytes from one row of weights to the next.
__device__ __forceinline__ u64 row_bytes(u32 k) {
    if (WEIGHTS == BF16) return u64(k) * 2;
    if (WEIGHTS == FP8) return k;
    return u64(k + STEP - 1) / STEP * 64;
}

// The eight numbers of a unit as four pairs of bf16. Integers have their middle level subtracted.
__device__ __forceinline__ void widen_unit(uint4 from, u32 unit, u32 (&to)[4]) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
    if (WEIGHTS == BF16) {
        for (u32 i = 0; i < 4; ++i) to[i] = words[i];
    } else if (WEIGHTS == FP8) {
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

// The outputs of a lane: ROWS adjacent ones, of which each is a row of a matrix instruction. Outputs past the end
// repeat the last one, and places past the end the last place: their results are not stored.
constexpr u32 ROWS = 2 * TILES;

// The numbers of a group for the outputs of a lane.
__device__ __forceinline__ void load_scales(const float* from, const u32 (&places)[ROWS], u32 at, float (&to)[ROWS]) {
    if constexpr (IS_INTEGER) {
        const float4 four = *reinterpret_cast<const float4*>(from + (places[0] + at));
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) to[i] = from[places[i] + at];
    }
}

// The sums of the warps, [warp][place][output]. Their memory is aligned to 16 bytes: if it is not, the assembler of CUDA 12.9
// spills three times as many registers for sm_120.
template <u32 COLUMN_TILES> constexpr u32 NUM_SUMS = WARPS * 8 * COLUMN_TILES * OUTPUTS;

// The next 8 * COLUMN_TILES places, or fewer. Leaves their sums in shared memory.
template <u32 COLUMN_TILES, Groups GROUPS, bool HAS_ZEROS>
__device__ __forceinline__ void multiply(const MultiplyFew& p, u32 done, float* sums) {
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, in = lane % 4;
    // The weights of this expert.
    const u32 first_row = blockIdx.y * p.n;
    const u32 first = blockIdx.x * OUTPUTS + group * ROWS, num_steps = (p.k + STEP - 1) / STEP;
    const u32 place = first_place(p) + done, last = end_place(p) - place - 1;
    // A lane's numbers of the next step, in the rows of x and of the weights.
    const u16* x_rows[COLUMN_TILES];
#pragma unroll
    for (u32 c = 0; c < COLUMN_TILES; ++c) {
        const u32 of_tile = c * 8 + group, at = place + (of_tile < last ? of_tile : last);
        x_rows[c] = p.x + u64(p.rows ? p.rows[at] : at) * p.k + warp * STEP + numbers_at(in, 0);
    }
    // In units of 16 bytes, in which 32 bits reach 64 GiB: they take half of the registers of addresses.
    u32 weight_places[ROWS];
    u32 scale_places[ROWS];
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) {
        const u32 n = first_row + (first + i < p.n ? first + i : p.n - 1);
        weight_places[i] = n * u32(row_bytes(p.k) / 16) + warp * 4 + in;
        scale_places[i] = IS_INTEGER ? n : HAS_SCALES ? n / p.scales.rows_per_scale * p.scales.row_stride : 0;
    }
    // Four outputs are loaded together. The rows of a table are padded to a multiple of four.
    if (IS_INTEGER) scale_places[0] = first_row + (first < p.n ? first : (p.n - 1) / 4 * 4);
    const products::Divisor groups(GROUPS == Groups::SHORT  ? p.scales.group / 32
                                   : GROUPS == Groups::LONG ? p.scales.group / STEP
                                                            : 1);
    const u32 last_group = (p.k - 1) / p.scales.group;
    float total[TILES][COLUMN_TILES][4] = {};
    uint4 next[ROWS];
    auto load = [&](u32 step) {
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) {
            // Integers are padded to whole steps.
            if (!IS_INTEGER) next[i] = make_uint4(0, 0, 0, 0);
            if (IS_INTEGER || step * STEP + numbers_at(in, 0) < p.k) {
                next[i] = load_once(p.weights + u64(weight_places[i]) * 16);
            }
            weight_places[i] += WARPS * 4;
        }
    };
    if (warp < num_steps) load(warp);
    for (u32 step = warp; step < num_steps; step += WARPS) {
        uint4 now[ROWS];
#pragma unroll
        for (u32 i = 0; i < ROWS; ++i) now[i] = next[i];
        if (step + WARPS < num_steps) load(step + WARPS);
        float part[TILES][COLUMN_TILES][4] = {};
        // The sums of a group's activations, for the product with its zero.
        float sum_of_x[COLUMN_TILES][4] = {};
        float scales[ROWS], zeros[ROWS];
#pragma unroll
        for (u32 unit = 0; unit < UNITS; ++unit) {
            if (GROUPS == Groups::SHORT || (GROUPS == Groups::LONG && unit == 0)) {
                u32 nth = groups.of(GROUPS == Groups::SHORT ? step * UNITS + unit : step);
                // The last step may have units past the end of K. Their activations are zero.
                if (GROUPS == Groups::SHORT) nth = nth < last_group ? nth : last_group;
                const u32 at = nth * p.scales.group_stride;
                load_scales(p.scales.scales, scale_places, at, scales);
                if (HAS_ZEROS) load_scales(p.scales.zeros, scale_places, at, zeros);
            }
            const u32 k = step * STEP + numbers_at(in, unit);
            uint4 x[COLUMN_TILES];
#pragma unroll
            for (u32 c = 0; c < COLUMN_TILES; ++c) {
                x[c] = make_uint4(0, 0, 0, 0);
                if (k < p.k) x[c] = *reinterpret_cast<const uint4*>(x_rows[c] + numbers_at(0, unit));
                if (HAS_ZEROS) {
                    const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
                    mma_bf16(sum_of_x[c], ones, {x[c].x, x[c].y});
                    mma_bf16(sum_of_x[c], ones, {x[c].z, x[c].w});
                }
            }
            constexpr bool IS_SCALED_LATER = GROUPS != Groups::WHOLE_ROWS;
#pragma unroll
            for (u32 t = 0; t < TILES; ++t) {
                u32 upper[4], lower[4];
                widen_unit(now[2 * t], unit, upper);
                widen_unit(now[2 * t + 1], unit, lower);
                const u32 a[4] = {upper[0], lower[0], upper[1], lower[1]};
                const u32 b[4] = {upper[2], lower[2], upper[3], lower[3]};
#pragma unroll
                for (u32 c = 0; c < COLUMN_TILES; ++c) {
                    mma_bf16(IS_SCALED_LATER ? part[t][c] : total[t][c], a, {x[c].x, x[c].y});
                    mma_bf16(IS_SCALED_LATER ? part[t][c] : total[t][c], b, {x[c].z, x[c].w});
                }
            }
            if constexpr (IS_SCALED_LATER) {
                if (GROUPS == Groups::LONG && unit + 1 < UNITS) continue;
#pragma unroll
                for (u32 c = 0; c < COLUMN_TILES; ++c) {
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
#pragma unroll
        for (u32 c = 0; c < COLUMN_TILES; ++c) x_rows[c] += WARPS * STEP;
    }
    float scales[ROWS];
    if (HAS_SCALES && GROUPS == Groups::WHOLE_ROWS) load_scales(p.scales.scales, scale_places, 0, scales);
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
#pragma unroll
        for (u32 c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                u32 row = c * 8 + 2 * in + i % 2, output = group * ROWS + 2 * t + i / 2;
                float sum = total[t][c][i];
                if (HAS_SCALES && GROUPS == Groups::WHOLE_ROWS) sum *= scales[2 * t + i / 2];
                sums[(warp * 8 * COLUMN_TILES + row) * OUTPUTS + output] = sum;
            }
        }
    }
}

// Multiplies the next 8 * COLUMN_TILES places, or fewer, and stores the results.
template <u32 COLUMN_TILES, bool HAS_ZEROS>
__device__ __forceinline__ void multiply(const MultiplyFew& p, u32 done, float* sums) {
    if constexpr (!HAS_SCALES) {
        multiply<COLUMN_TILES, Groups::WHOLE_ROWS, false>(p, done, sums);
    } else if constexpr (IS_INTEGER) {
        if (p.scales.group % STEP == 0) {
            multiply<COLUMN_TILES, Groups::LONG, HAS_ZEROS>(p, done, sums);
        } else {
            multiply<COLUMN_TILES, Groups::SHORT, HAS_ZEROS>(p, done, sums);
        }
    } else if (p.scales.group >= p.k) {
        multiply<COLUMN_TILES, Groups::WHOLE_ROWS, false>(p, done, sums);
    } else {
        multiply<COLUMN_TILES, Groups::LONG, false>(p, done, sums);
    }
    __syncthreads();
    // The sums of the warps are added in one order, always.
    const u32 place = first_place(p) + done, num_places = end_place(p) - place, most = 8 * COLUMN_TILES;
    for (u32 i = threadIdx.x; i < (num_places < most ? num_places : most) * OUTPUTS; i += WARPS * WARP) {
        u32 n = blockIdx.x * OUTPUTS + i % OUTPUTS;
        if (n >= p.n) continue;
        float sum = 0.0f;
        for (u32 warp = 0; warp < WARPS; ++warp) sum += sums[warp * most * OUTPUTS + i];
        u64 to = u64(place + i / OUTPUTS) * p.n + n;
        if (p.bias) sum += p.bias[n];
        if (p.is_f32) {
            static_cast<float*>(p.out)[to] = sum;
        } else {
            static_cast<u16*>(p.out)[to] = round_bf16(sum);
        }
    }
    // The sums were read.
    __syncthreads();
}

// 16 places at a time.
template <bool HAS_ZEROS> __device__ __forceinline__ void multiply_few(const MultiplyFew& p) {
    __shared__ uint4 shared[NUM_SUMS<2> / 4];
    float* sums = reinterpret_cast<float*>(shared);
    // Registers are scarce, so both ends are read again for every 16 places.
    for (u32 done = 0;; done += 16) {
        if (first_place(p) + done >= end_place(p)) return;
        if (end_place(p) - first_place(p) - done <= 8) {
            multiply<1, HAS_ZEROS>(p, done, sums);
        } else {
            multiply<2, HAS_ZEROS>(p, done, sums);
        }
    }
}

// 32 places at a time, without experts.
template <bool HAS_ZEROS> __device__ __forceinline__ void multiply_few32(const MultiplyFew& p) {
    __shared__ uint4 shared[NUM_SUMS<4> / 4];
    float* sums = reinterpret_cast<float*>(shared);
    for (u32 done = 0; done < p.num_rows; done += 32) multiply<4, HAS_ZEROS>(p, done, sums);
}

} // namespace OF_KIND(products)

// Blocks of 16 places on a multiprocessor. The assembler of CUDA 12.9 spills many registers for Blackwell if it must
// leave room for a second one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define BLOCKS_OF_FEW 1
#else
#define BLOCKS_OF_FEW 2
#endif

// One block per expert and 16 outputs of bf16, or 32 outputs of smaller weights. Its warps take turns at steps of K,
// every eighth step each. For every 16 rows it reads each weight once (2, 1 or 1/2 bytes, and 4 bytes of scale per
// group): from memory the first time, mostly from the L2 cache after that, like activations. Two operations per
// weight and row, and 1 to 2 more to widen a weight for 16 rows: bound by memory bandwidth. The weights of the next step
// are in flight, in registers, while one is multiplied.
NAMED_KERNEL(OF_KIND(multiply_few), MultiplyFew, 256, BLOCKS_OF_FEW) { OF_KIND(products)::multiply_few<false>(p); }

// The same for 32 rows at a time, with the same bits. Weights are read and widened half as often. It takes more
// registers: one block runs on a multiprocessor.
NAMED_KERNEL(OF_KIND(multiply_few32), MultiplyFew, 256) { OF_KIND(products)::multiply_few32<false>(p); }

#if WEIGHTS >= 2
// The same for weights with zeros.
NAMED_KERNEL(OF_KIND(multiply_few_zeros), MultiplyFew, 256, BLOCKS_OF_FEW) { OF_KIND(products)::multiply_few<true>(p); }
NAMED_KERNEL(OF_KIND(multiply_few32_zeros), MultiplyFew, 256) { OF_KIND(products)::multiply_few32<true>(p); }
#endif

#undef BLOCKS_OF_FEW

#if WEIGHTS != 0

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

#endif

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
