// Products of few rows with weights of all formats: out[row][n] = sum over k of x[row][k] w[n][k], 16 rows at a time.
// Also the conversions around a library's products of many rows: weights to bf16, activations to fp8.
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
#define NAMED_KERNEL(name, Params, max_threads) KERNEL(name, Params, max_threads)

namespace products {

struct Scales {
    // For output n and number k: [n / rows_per_scale * row_stride + k / group * group_stride].
    const float* scales;
    // Like scales: the level that stands for zero, minus the middle level (8 or 128). Null if the format has no
    // zeros.
    const float* zeros;
    u32 rows_per_scale, row_stride, group_stride;
    // A multiple of 32, for fp8 of 64.
    u32 group;

    __device__ __forceinline__ u64 place(u32 n, u32 k) const {
        return u64(n / rows_per_scale) * row_stride + u64(k / group) * group_stride;
    }
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
constexpr u32 NO_ROW = 0xffffffffu;

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
        for (u32 i = 0; i < 2; ++i) {
            widen_e4m3(pick_bytes(words[(2 * unit + i) % 4], 0, 0x3120), to[2 * i], to[2 * i + 1]);
        }
    } else if (WEIGHTS == INT8) {
        for (u32 i = 0; i < 2; ++i) widen_i8(words[(2 * unit + i) % 4], to[2 * i], to[2 * i + 1]);
    } else {
        for (u32 i = 0; i < 4; ++i) {
            // 128 + level, exactly; then minus 136.
            u32 levels = (words[unit % 4] >> 4 * i & 0x000f000fu) | 0x43004300u;
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

// The next 16 places, or fewer.
template <u32 COLUMN_TILES>
__device__ __forceinline__ void multiply(const MultiplyFew& p, u32 done, float* sums) {
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, in = lane % 4;
    // The weights of this expert.
    const u32 first_row = blockIdx.y * p.n;
    const u32 first = blockIdx.x * OUTPUTS, num_steps = (p.k + STEP - 1) / STEP;
    const u64 stride = row_bytes(p.k);
    const u8* weights = p.weights + first_row * stride + in * 16;
    const u32 place = first_place(p) + done, num_places = end_place(p) - place;
    // The start of the rows of x, in units of eight numbers.
    u32 rows[COLUMN_TILES];
#pragma unroll
    for (u32 c = 0; c < COLUMN_TILES; ++c) {
        const u32 of_tile = c * 8 + group, at = place + of_tile;
        rows[c] = of_tile < num_places ? (p.rows ? p.rows[at] : at) * (p.k / 8) : NO_ROW;
    }
    // Whether a group ends inside a step.
    const bool has_short_groups = IS_INTEGER && p.scales.group % STEP != 0;
    const bool has_zeros = IS_INTEGER && p.scales.zeros;
    float total[TILES][COLUMN_TILES][4] = {};
    uint4 next[TILES][2];
    auto load = [&](u32 step) {
#pragma unroll
        for (u32 i = 0; i < 2 * TILES; ++i) {
            u32 n = first + i * 8 + group;
            // Integers are padded to whole steps.
            bool is_inside = n < p.n && step < num_steps && (IS_INTEGER || step * STEP + numbers_at(in, 0) < p.k);
            next[i / 2][i % 2] = make_uint4(0, 0, 0, 0);
            if (is_inside) {
                next[i / 2][i % 2] = load_once(weights + n * stride + step * 64);
            }
        }
    };
    load(warp);
    for (u32 step = warp; step < num_steps; step += WARPS) {
        uint4 now[TILES][2];
#pragma unroll
        for (u32 i = 0; i < 2 * TILES; ++i) now[i / 2][i % 2] = next[i / 2][i % 2];
        load(step + WARPS);
        float part[TILES][COLUMN_TILES][4] = {};
        // The sums of a group's activations, for the product with its zero.
        float sum_of_x[COLUMN_TILES][4] = {};
#pragma unroll
        for (u32 unit = 0; unit < UNITS; ++unit) {
            const u32 k = step * STEP + numbers_at(in, unit);
            uint4 x[COLUMN_TILES];
#pragma unroll
            for (u32 c = 0; c < COLUMN_TILES; ++c) {
                x[c] = make_uint4(0, 0, 0, 0);
                if (rows[c] != NO_ROW && k < p.k) x[c] = *reinterpret_cast<const uint4*>(p.x + u64(rows[c] + k / 8) * 8);
                if (has_zeros) {
                    const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
                    mma_bf16(sum_of_x[c], ones, {x[c].x, x[c].y});
                    mma_bf16(sum_of_x[c], ones, {x[c].z, x[c].w});
                }
            }
#pragma unroll
            for (u32 t = 0; t < TILES; ++t) {
                u32 upper[4], lower[4];
                widen_unit(now[t][0], unit, upper);
                widen_unit(now[t][1], unit, lower);
                const u32 a[4] = {upper[0], lower[0], upper[1], lower[1]};
                const u32 b[4] = {upper[2], lower[2], upper[3], lower[3]};
#pragma unroll
                for (u32 c = 0; c < COLUMN_TILES; ++c) {
                    mma_bf16(HAS_SCALES ? part[t][c] : total[t][c], a, {x[c].x, x[c].y});
                    mma_bf16(HAS_SCALES ? part[t][c] : total[t][c], b, {x[c].z, x[c].w});
                }
            }
            if (!HAS_SCALES || (unit + 1 < UNITS && !has_short_groups)) continue;
            // Applies the scale and the zero of a group to the sums in `part`. `of_group` is one of the group's numbers.
            const u32 of_group = has_short_groups ? step * STEP + 32 * unit : step * STEP;
            if (of_group >= p.k) continue;
#pragma unroll
            for (u32 i = 0; i < 2 * TILES; ++i) {
                u32 n = first + i * 8 + group;
                if (n >= p.n) continue;
                u64 of_output = p.scales.place(first_row + n, of_group);
                float scale = p.scales.scales[of_output];
                float zero = has_zeros ? p.scales.zeros[of_output] : 0.0f;
#pragma unroll
                for (u32 c = 0; c < COLUMN_TILES; ++c) {
                    for (u32 j = 0; j < 2; ++j) {
                        float& of_tile = part[i / 2][c][i % 2 * 2 + j];
                        total[i / 2][c][i % 2 * 2 + j] += scale * (of_tile - zero * sum_of_x[c][j]);
                        of_tile = 0.0f;
                    }
                }
            }
            for (u32 c = 0; c < COLUMN_TILES; ++c) sum_of_x[c][0] = sum_of_x[c][1] = 0.0f;
        }
    }
    // [warp][row][output]
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
        for (u32 c = 0; c < COLUMN_TILES; ++c) {
            for (u32 i = 0; i < 4; ++i) {
                u32 row = c * 8 + 2 * in + i % 2, output = t * 16 + group + i / 2 * 8;
                sums[(warp * 16 + row) * OUTPUTS + output] = total[t][c][i];
            }
        }
    }
}

} // namespace OF_KIND(products)

// One block per expert and 16 outputs of bf16, or 32 outputs of smaller weights. Its warps take turns at steps of K,
// every eighth step each. For every 16 rows it reads each weight once (2, 1 or 1/2 bytes, and 4 bytes of scale per
// group): from memory the first time, mostly from the L2 cache after that, like activations. Two operations per
// weight and row, and about 1 to 2.5 more to widen a weight for 16 rows: bound by memory bandwidth. The next step's
// weights are loaded while the current ones are multiplied.
NAMED_KERNEL(OF_KIND(multiply_few), MultiplyFew, 256) {
    using namespace OF_KIND(products);
    __shared__ float sums[WARPS * 16 * OUTPUTS];
    // Registers are scarce, so both ends are read again for every 16 places.
    for (u32 done = 0;; done += 16) {
        if (first_place(p) + done >= end_place(p)) return;
        if (end_place(p) - first_place(p) - done <= 8) {
            multiply<1>(p, done, sums);
        } else {
            multiply<2>(p, done, sums);
        }
        __syncthreads();
        const u32 place = first_place(p) + done, num_places = end_place(p) - place;
        for (u32 i = threadIdx.x; i < (num_places < 16 ? num_places : 16) * OUTPUTS; i += WARPS * WARP) {
            u32 row = i / OUTPUTS, n = blockIdx.x * OUTPUTS + i % OUTPUTS;
            if (n >= p.n) continue;
            float sum = 0.0f;
            for (u32 warp = 0; warp < WARPS; ++warp) sum += sums[(warp * 16 + row) * OUTPUTS + i % OUTPUTS];
            u64 to = u64(place + row) * p.n + n;
            if (p.bias) sum += p.bias[n];
            if (p.is_f32) {
                static_cast<float*>(p.out)[to] = sum;
            } else {
                static_cast<u16*>(p.out)[to] = round_bf16(sum);
            }
        }
        __syncthreads();
    }
}

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
    const u64 idx = u64(blockIdx.x) * 256 + threadIdx.x;
    if (idx >= u64(p.n) * chunks) return;
    const u32 n = u32(idx / chunks), chunk = u32(idx % chunks), in = chunk % 4, start = chunk / 4 * STEP;
    if (start + numbers_at(in, 0) >= p.k) return;
    const u32 row = p.rows ? p.rows[n] - p.first_row : n;
    const bool is_held = row < p.num_held;
    uint4 from = make_uint4(0, 0, 0, 0);
    if (is_held) from = load_once(p.weights + row * row_bytes(p.k) + u64(chunk) * 16);
#pragma unroll
    for (u32 unit = 0; unit < UNITS; ++unit) {
        u32 k = start + numbers_at(in, unit);
        if (k >= p.k) return;
        u32 pairs[4];
        widen_unit(from, unit, pairs);
        u64 of_group = p.scales.place(row, k);
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

namespace products {

// Quantises a number of magnitude at most 448 to the nearest E4M3 number, ties to even.
__device__ __forceinline__ u32 quantise_fp8(float x) {
    u32 bits = bits_of(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffffu;
    // Below 2^-6 the steps are 2^-9, like those of floats from 2^14 on.
    if (size < 0x3c800000u) return sign | (bits_of(float_of(size) + 16384.0f) - 0x46800000u);
    return sign | ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
}

// The factor that quantises numbers of this scale. It is zero if all numbers are zero, or too small to scale.
__device__ __forceinline__ float inverse_of(float scale) { return scale > 1e-37f ? 1.0f / scale : 0.0f; }

__device__ __forceinline__ uint2 quantise_fp8(const float (&x)[8], float inverse) {
    u32 words[2] = {};
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        float scaled = min_of(max_of(x[i] * inverse, -448.0f), 448.0f);
        words[i / 4] |= quantise_fp8(scaled) << i % 4 * 8;
    }
    return make_uint2(words[0], words[1]);
}

} // namespace products

// Quantises rows of activations to E4M3. The largest number of a row becomes 448. One block per row. Reads 2 bytes
// and writes 1: bound by memory bandwidth; the second read hits a cache.
KERNEL(quantise_rows, QuantiseRows, 256) {
    using namespace products;
    __shared__ float largest[8], poisons[8];
    const u16* x = p.x + u64(blockIdx.x) * p.k;
    float max = 0.0f;
    // 0, or NaN if the row holds NaN or infinity. A product with the scale then shows it.
    float poison = 0.0f;
    for (u32 k = threadIdx.x * 8; k < p.k; k += 256 * 8) {
        float here[8];
        widen_bf16(*reinterpret_cast<const uint4*>(x + k), here);
        for (u32 i = 0; i < 8; ++i) max = max_of(max, fabsf(here[i])), poison += here[i] * 0.0f;
    }
    max = warp_max(max);
    poison = warp_sum(poison);
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = max, poisons[threadIdx.x / WARP] = poison;
    __syncthreads();
    for (u32 i = 0; i < 8; ++i) max = max_of(max, largest[i]);
    float scale = max / 448.0f;
    for (u32 i = 0; i < 8; ++i) scale += poisons[i];
    if (threadIdx.x == 0) p.scales[blockIdx.x] = scale;
    float inverse = inverse_of(scale);
    for (u32 k = threadIdx.x * 8; k < p.k; k += 256 * 8) {
        float here[8];
        widen_bf16(*reinterpret_cast<const uint4*>(x + k), here);
        *reinterpret_cast<uint2*>(p.out + u64(blockIdx.x) * p.k + k) = quantise_fp8(here, inverse);
    }
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
    using namespace products;
    u64 row = blockIdx.x;
    for (u32 first = 0; first < p.k; first += 256 * 8) {
        u32 k = first + threadIdx.x * 8;
        float here[8] = {}, max = 0.0f, poison = 0.0f;
        if (k < p.k) widen_bf16(*reinterpret_cast<const uint4*>(p.x + row * p.k + k), here);
        for (u32 i = 0; i < 8; ++i) max = max_of(max, fabsf(here[i])), poison += here[i] * 0.0f;
        for (int mask = 8; mask > 0; mask /= 2) {
            max = max_of(max, shuffle_xor(max, mask));
            poison += shuffle_xor(poison, mask);
        }
        if (k >= p.k) continue;
        float scale = max / 448.0f + poison;
        if (threadIdx.x % 16 == 0) p.scales[k / 128 * p.stride + row] = scale;
        *reinterpret_cast<uint2*>(p.out + row * p.k + k) = quantise_fp8(here, inverse_of(scale));
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
