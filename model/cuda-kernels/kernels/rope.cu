// Rotary position embeddings, and the stores of keys and values.
//
//   HEAD_DIM, ROTARY_DIM   elements of a head, and how many of them are rotated
//   KV                     element type of the pool (kv::)
//   ALIGN                  alignment of every vector in the pool, in bytes; at most 16
#include "common.cuh"

namespace rope {

// The slot of a padding row.
constexpr u32 NONE = 0xffffffffu;

constexpr u32 HALF = ROTARY_DIM / 2, REST = HEAD_DIM - ROTARY_DIM;

// Numbers that a thread takes at a time.
__device__ constexpr bool fits(u32 num) { return HALF % num == 0 && HEAD_DIM % num == 0; }
constexpr u32 CHUNK = fits(8) ? 8 : fits(4) ? 4 : fits(2) ? 2 : 1;

// Two chunks form a pair. Rotated chunks pair up with their partners, the others with their neighbours.
constexpr u32 TURNED = HALF / CHUNK, PAIRS = TURNED + (REST / CHUNK + 1) / 2;

// Lanes of a head: a power of two, because they exchange data by shuffles.
__device__ constexpr u32 lanes(u32 num) { return num >= PAIRS || num == WARP ? num : lanes(num * 2); }
constexpr u32 LANES = lanes(1), PAIRS_PER_LANE = (PAIRS + LANES - 1) / LANES;

// Offsets of an element in the row and in the head's norm.
typedef kv::Elements<kv::BF16, CHUNK> Chunk;

__device__ __forceinline__ void load(const u16* from, float (&to)[CHUNK]) {
    Chunk chunk;
    kv::load<16>(reinterpret_cast<const u8*>(from), chunk);
    kv::dequantise(chunk, 1.0f, to);
}

__device__ __forceinline__ void load(const float* from, float (&to)[CHUNK]) {
    kv::Elements<kv::F32, CHUNK> chunk;
    kv::load<16>(reinterpret_cast<const u8*>(from), chunk);
    kv::dequantise(chunk, 1.0f, to);
}

// The reduction over the lanes of a head.
__device__ __forceinline__ float sum(float x) {
    for (u32 mask = LANES / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

__device__ __forceinline__ u32 largest(u32 x) {
    for (u32 mask = LANES / 2; mask > 0; mask /= 2) {
        u32 other = shuffle_xor(x, mask);
        x = x > other ? x : other;
    }
    return x;
}

} // namespace rope

struct PlaceRows {
    // [rows]
    const u32* positions;
    // [rows]: the row's block table, or NONE.
    const u32* sequence_of;
    // [sequences][max_blocks]
    const u32* block_tables;
    // [rows], output: block * block_size + offset of the position in the block, or NONE.
    u32* slots;
    u32 max_blocks;
    u32 block_size;
    u64 num_rows;
};

// Looks up the slots of rows in the pool, once for all layers. Moves 16 bytes per row, which is negligible beside a
// layer.
KERNEL(place_rows, PlaceRows, 256) {
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= p.num_rows) return;
    u32 sequence = p.sequence_of[row], slot = rope::NONE;
    if (sequence != rope::NONE) {
        u32 position = p.positions[row];
        u32 block = p.block_tables[u64(sequence) * p.max_blocks + position / p.block_size];
        slot = block * p.block_size + position % p.block_size;
    }
    p.slots[row] = slot;
}

struct RopeTable {
    // [rows]
    const u32* positions;
    // [ROTARY_DIM / 2]: the angle per position of each pair.
    const float* inverse_frequencies;
    // [rows][2][ROTARY_DIM / 2], output: cosines, then sines.
    float* cos_sin;
    float factor;
    u32 num_rows;
    // Read by the launch only.
    u64 rotary_dim;
};

// Cosines and sines of a batch, once for all layers. The angle is rounded to f32, as in the training code of the
// models. Its cosine and sine are computed in f64, as on processors: f32 would need many steps for long contexts.
// Writes 4 bytes per number, with some hundred f64 operations each: bound by arithmetic, and far cheaper than one
// layer.
KERNEL(rope_table, RopeTable, 256) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 row = u32(i / rope::HALF), pair = u32(i % rope::HALF);
    if (row >= p.num_rows) return;
    double sine, cosine;
    sincos(double(__fmul_rn(float(p.positions[row]), p.inverse_frequencies[pair])), &sine, &cosine);
    float* to = p.cos_sin + u64(row) * 2 * rope::HALF;
    to[pair] = __fmul_rn(float(cosine), p.factor);
    to[rope::HALF + pair] = __fmul_rn(float(sine), p.factor);
}

struct StoreQkv {
    // [rows][(num_heads + 2 num_kv_heads) * HEAD_DIM]: queries, keys, values. Queries are rotated in place.
    u16* qkv;
    // [rows], from place_rows.
    const u32* slots;
    // [rows][2][ROTARY_DIM / 2], from rope_table.
    const float* cos_sin;
    // [HEAD_DIM], the norms of query and key heads. Null: the model has none.
    const float* query_norm;
    const float* key_norm;
    // [(num_heads + 2 num_kv_heads) * HEAD_DIM], of the projection. Null: the model has none.
    const float* bias;
    // The layer's piece of block 0.
    u8* layer;
    u64 block_bytes;
    u32 num_rows;
    u32 num_heads;
    u32 num_kv_heads;
    u32 block_size;
    float eps;
    // Read by the launch only: LANES.
    u32 lanes;
};

// Adds the bias, norms and rotates query and key heads, writes queries back, and stores keys and values in their
// blocks. A few lanes share a head: eight lanes with 16 elements each for 128 elements. Reads the row (2 bytes per
// element) and its cosines and sines, writes queries (2) and KV (1 to 4): bound by memory bandwidth.
KERNEL(store_qkv, StoreQkv, 128) {
    using namespace rope;
    u32 width = p.num_heads + 2 * p.num_kv_heads;
    u64 unit = u64(blockIdx.x) * (blockDim.x / LANES) + threadIdx.x / LANES;
    u32 row = u32(unit / width), head = u32(unit % width), lane = threadIdx.x % LANES;
    u32 slot = row < p.num_rows ? p.slots[row] : NONE;
    // No lane returns early: the lanes of a warp exchange data, whatever their rows are.
    bool is_wanted = slot != NONE;
    bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
    u16* from = p.qkv + (u64(row) * width + head) * HEAD_DIM;
    // The start of each chunk of a pair. The last pair of unrotated chunks may have only one.
    auto first_of = [&](u32 pair) { return pair < TURNED ? pair * CHUNK : ROTARY_DIM + (pair - TURNED) * 2 * CHUNK; };
    auto second_of = [&](u32 pair) { return pair < TURNED ? HALF + pair * CHUNK : first_of(pair) + CHUNK; };
    float x[PAIRS_PER_LANE][2][CHUNK];
#pragma unroll
    for (u32 i = 0; i < PAIRS_PER_LANE; ++i) {
        u32 pair = lane + i * LANES;
        for (u32 k = 0; k < CHUNK; ++k) x[i][0][k] = x[i][1][k] = 0.0f;
        if (!is_wanted || pair >= PAIRS) continue;
        load(from + first_of(pair), x[i][0]);
        if (second_of(pair) < HEAD_DIM) load(from + second_of(pair), x[i][1]);
        if (!p.bias) continue;
        const float* bias = p.bias + u64(head) * HEAD_DIM;
        float more[CHUNK];
        load(bias + first_of(pair), more);
        for (u32 k = 0; k < CHUNK; ++k) x[i][0][k] += more[k];
        if (second_of(pair) < HEAD_DIM) {
            load(bias + second_of(pair), more);
            for (u32 k = 0; k < CHUNK; ++k) x[i][1][k] += more[k];
        }
    }
    const float* norm = is_value ? nullptr : is_query ? p.query_norm : p.key_norm;
    float squares = 0.0f;
    for (auto& pair : x) {
        for (auto& chunk : pair) {
            for (float number : chunk) squares += number * number;
        }
    }
    float scale = rsqrtf(sum(squares) / float(HEAD_DIM) + p.eps);
#pragma unroll
    for (u32 i = 0; i < PAIRS_PER_LANE; ++i) {
        u32 pair = lane + i * LANES;
        if (!is_wanted || pair >= PAIRS) continue;
        float more[CHUNK];
        if (norm) {
            load(norm + first_of(pair), more);
            for (u32 k = 0; k < CHUNK; ++k) x[i][0][k] *= scale * more[k];
            if (second_of(pair) < HEAD_DIM) {
                load(norm + second_of(pair), more);
                for (u32 k = 0; k < CHUNK; ++k) x[i][1][k] *= scale * more[k];
            }
        }
        if (!is_value && pair < TURNED) {
            const float* table = p.cos_sin + u64(row) * 2 * HALF + pair * CHUNK;
            float cosine[CHUNK], sine[CHUNK];
            load(table, cosine);
            load(table + HALF, sine);
            // Rounds after each step, as on processors.
            for (u32 k = 0; k < CHUNK; ++k) {
                float a = x[i][0][k], b = x[i][1][k];
                x[i][0][k] = __fadd_rn(__fmul_rn(a, cosine[k]), -__fmul_rn(b, sine[k]));
                x[i][1][k] = __fadd_rn(__fmul_rn(b, cosine[k]), __fmul_rn(a, sine[k]));
            }
        }
    }
    float kv_scale = 1.0f;
    if constexpr (kv::scale_bytes(KV) > 0) {
        // Magnitudes have the order of their bits.
        u32 most = 0;
        for (auto& pair : x) {
            for (auto& chunk : pair) {
                for (float number : chunk) {
                    u32 bits = bits_of(number) & 0x7fffffffu;
                    most = most > bits ? most : bits;
                }
            }
        }
        kv_scale = kv::scale_of<KV>(largest(most));
    }
    if (!is_wanted) return;
    if (is_query) {
#pragma unroll
        for (u32 i = 0; i < PAIRS_PER_LANE; ++i) {
            u32 pair = lane + i * LANES;
            if (pair >= PAIRS) continue;
            u8 *first = reinterpret_cast<u8*>(from + first_of(pair)), *second = reinterpret_cast<u8*>(from + second_of(pair));
            kv::store<16>(first, kv::quantise<kv::BF16>(x[i][0], 1.0f));
            if (second_of(pair) < HEAD_DIM) kv::store<16>(second, kv::quantise<kv::BF16>(x[i][1], 1.0f));
        }
        return;
    }
    constexpr u32 size = kv::size_bytes(KV);
    u32 block = slot / p.block_size, token = slot % p.block_size;
    // Heads of K, then heads of V.
    u8* place = p.layer + u64(block) * p.block_bytes +
                u64(head - p.num_heads) * p.block_size * (HEAD_DIM * size + kv::scale_bytes(KV));
    if constexpr (kv::scale_bytes(KV) > 0) {
        u8* scales = place + u64(p.block_size) * HEAD_DIM;
        u16 bits = u16(bits_of(kv_scale) >> 16);
        // Scales may be at odd addresses.
        if (lane == 0) {
            scales[token * 2] = u8(bits);
            scales[token * 2 + 1] = u8(bits >> 8);
        }
    }
    float inverse = 1.0f / kv_scale;
    place += u64(token) * HEAD_DIM * size;
#pragma unroll
    for (u32 i = 0; i < PAIRS_PER_LANE; ++i) {
        u32 pair = lane + i * LANES;
        if (pair >= PAIRS) continue;
        kv::store<ALIGN>(place + first_of(pair) * size, kv::quantise<KV>(x[i][0], inverse));
        if (second_of(pair) < HEAD_DIM) kv::store<ALIGN>(place + second_of(pair) * size, kv::quantise<KV>(x[i][1], inverse));
    }
}
