// Encodes pieces of KV for the transfer and decodes them. The bits equal those of kv-cache/src/wire.rs, except for
// NaN.
//
//   HEAD_DIM, BLOCK_SIZE    elements of a vector, and vectors of a head in a piece
//   OWN                     element type of the pool (kv::)
#include "common.cuh"

namespace codes {

// A type in addition to those of kv::, for the transfer only: two codes per byte, and a scale for each GROUP numbers.
constexpr int INT4 = kv::INT4;
constexpr u32 GROUP = 32;

// Numbers of a vector that a lane takes at a time, and lanes per vector.
constexpr u32 CHUNK = HEAD_DIM % 8 == 0 ? 8 : HEAD_DIM % 4 == 0 ? 4 : HEAD_DIM % 2 == 0 ? 2 : 1;
constexpr u32 CHUNKS = HEAD_DIM / CHUNK;
__device__ constexpr u32 lanes(u32 num) { return num >= CHUNKS || num == WARP ? num : lanes(num * 2); }
constexpr u32 LANES = lanes(1), CHUNKS_PER_LANE = (CHUNKS + LANES - 1) / LANES;

// Bytes of a vector's elements, of its scales, and of a head. A head's scales follow its elements.
__device__ constexpr u32 element_bytes(int form) { return form == INT4 ? HEAD_DIM / 2 : HEAD_DIM * kv::size_bytes(form); }
__device__ constexpr u32 scale_bytes(int form) { return form == INT4 ? HEAD_DIM / GROUP * 2 : kv::scale_bytes(form); }
__device__ constexpr u32 head_bytes(int form) { return BLOCK_SIZE * (element_bytes(form) + scale_bytes(form)); }

// Alignment of every vector, if the first vector is aligned.
__device__ constexpr int alignment(int form) {
    int align = 16;
    while (head_bytes(form) % align != 0 || element_bytes(form) % align != 0) align /= 2;
    return align;
}

// Scales are bf16 and may be at odd addresses.
__device__ __forceinline__ float load_scale(const u8* from) { return float_of((u32(from[0]) | u32(from[1]) << 8) << 16); }

__device__ __forceinline__ void store_scale(u8* to, float scale) {
    to[0] = u8(bits_of(scale) >> 16);
    to[1] = u8(bits_of(scale) >> 24);
}

// The 4-bit codes of a chunk. The first half of a group is in the low halves of its bytes, the second half in the
// high halves.
__device__ __forceinline__ u32 nibbles_at(u32 chunk) { return chunk / 4 * (GROUP / 2) + chunk % 2 * CHUNK; }
__device__ __forceinline__ u32 nibble_shift(u32 chunk) { return chunk / 2 % 2 * 4; }

template <int form>
__device__ __forceinline__ void load(const u8* head, u32 vector, u32 chunk, float (&x)[CHUNK]) {
    const u8* from = head + vector * element_bytes(form);
    const u8* scales = head + BLOCK_SIZE * element_bytes(form) + vector * scale_bytes(form);
    if constexpr (form == INT4) {
        float scale = load_scale(scales + chunk / 4 * 2);
        kv::Elements<kv::INT8, CHUNK> codes;
        kv::load<alignment(form)>(from + nibbles_at(chunk), codes);
#pragma unroll
        for (u32 i = 0; i < CHUNK; ++i) {
            u32 code = codes.words[i / 4] >> (i % 4 * 8 + nibble_shift(chunk)) & 15;
            x[i] = __fmul_rn(float(code) - 8.0f, scale);
        }
    } else {
        kv::Elements<form, CHUNK> elements;
        kv::load<alignment(form)>(from + chunk * CHUNK * kv::size_bytes(form), elements);
        float scale = 1.0f;
        if constexpr (scale_bytes(form) > 0) scale = load_scale(scales);
        kv::dequantise(elements, scale, x);
    }
}

// All lanes of a warp call this. Lanes without a chunk pass zeros and store nothing.
template <int form>
__device__ __forceinline__ void store(u8* head, u32 vector, bool is_wanted, const float (&x)[CHUNKS_PER_LANE][CHUNK]) {
    u8* to = head + vector * element_bytes(form);
    u8* scales = head + BLOCK_SIZE * element_bytes(form) + vector * scale_bytes(form);
    u32 lane = threadIdx.x % LANES;
    u32 largest[CHUNKS_PER_LANE];
#pragma unroll
    for (u32 i = 0; i < CHUNKS_PER_LANE; ++i) {
        largest[i] = 0;
        for (u32 k = 0; k < CHUNK; ++k) {
            u32 bits = bits_of(x[i][k]) & 0x7fffffffu;
            largest[i] = largest[i] > bits ? largest[i] : bits;
        }
    }
    // The number of lanes that share a scale.
    constexpr u32 sharing = form == INT4 ? 4 : LANES;
    if constexpr (form != INT4) {
        for (u32 i = 1; i < CHUNKS_PER_LANE; ++i) largest[0] = largest[0] > largest[i] ? largest[0] : largest[i];
    }
#pragma unroll
    for (u32 i = 0; i < CHUNKS_PER_LANE; ++i) {
        u32 chunk = lane + i * LANES, group = form == INT4 ? i : 0;
        bool is_there = is_wanted && chunk < CHUNKS;
        float scale = 1.0f;
        if constexpr (scale_bytes(form) > 0) {
            u32 most = largest[group];
            for (u32 mask = sharing / 2; mask > 0; mask /= 2) {
                u32 other = shuffle_xor(most, mask);
                most = most > other ? most : other;
            }
            scale = kv::scale_of<form>(most);
            bool is_first = form == INT4 ? chunk % 4 == 0 : chunk == 0;
            if (is_there && is_first) store_scale(scales + chunk / 4 * 2, scale);
        }
        float inverse = 1.0f / scale;
        if constexpr (form == INT4) {
            kv::Elements<kv::INT8, CHUNK> codes = {};
#pragma unroll
            for (u32 k = 0; k < CHUNK; ++k) {
                // The sum has steps of one, so it ends in the rounded number plus eight.
                u32 code = bits_of(__fadd_rn(__fmul_rn(x[i][k], inverse), 12582920.0f)) & 15;
                codes.words[k / 4] |= code << k % 4 * 8;
            }
            for (u32& word : codes.words) word |= shuffle_xor(word, 2) << 4;
            if (is_there && nibble_shift(chunk) == 0) kv::store<alignment(form)>(to + nibbles_at(chunk), codes);
        } else if (is_there) {
            kv::store<alignment(form)>(to + chunk * CHUNK * kv::size_bytes(form), kv::quantise<form>(x[i], inverse));
        }
    }
}

template <int from, int to> __device__ __forceinline__ void recode(const u8* from_head, u8* to_head) {
    u32 lane = threadIdx.x % LANES, groups = blockDim.x / LANES;
    // All lanes of a warp run the same number of iterations, because they exchange data.
    for (u32 first = blockIdx.z * groups; first < BLOCK_SIZE; first += gridDim.z * groups) {
        u32 vector = first + threadIdx.x / LANES;
        bool is_wanted = vector < BLOCK_SIZE;
        float x[CHUNKS_PER_LANE][CHUNK];
#pragma unroll
        for (u32 i = 0; i < CHUNKS_PER_LANE; ++i) {
            u32 chunk = lane + i * LANES;
            for (float& number : x[i]) number = 0.0f;
            if (is_wanted && chunk < CHUNKS) load<from>(from_head, vector, chunk, x[i]);
        }
        store<to>(to_head, vector, is_wanted, x);
    }
}

} // namespace codes

struct CodePieces {
    u8* pool;
    // [pieces]: the start of each piece in the pool.
    const u64* offsets;
    // [pieces][heads of K, then of V].
    u8* coded;
    u32 num_pieces;
    // Heads of a piece, of K and V together.
    u32 num_heads;
    // Selects the kernel on the host's side.
    u32 form;
    u32 direction;
};

// Dequantises vectors and quantises them again, with a few lanes per vector: 16 for 128 numbers. Reads and writes
// each element once, with about ten operations per element: bound by memory bandwidth.
#define CODERS(form, encoder, decoder)                                                                                 \
    KERNEL(encoder, CodePieces, 128) {                                                                                 \
        const u8* piece = p.pool + p.offsets[blockIdx.x];                                                              \
        u64 nth = u64(blockIdx.x) * p.num_heads + blockIdx.y;                                                          \
        codes::recode<OWN, form>(piece + u64(blockIdx.y) * codes::head_bytes(OWN), p.coded + nth * codes::head_bytes(form)); \
    }                                                                                                                  \
    KERNEL(decoder, CodePieces, 128) {                                                                                 \
        u8* piece = p.pool + p.offsets[blockIdx.x];                                                                    \
        u64 nth = u64(blockIdx.x) * p.num_heads + blockIdx.y;                                                          \
        codes::recode<form, OWN>(p.coded + nth * codes::head_bytes(form), piece + u64(blockIdx.y) * codes::head_bytes(OWN)); \
    }

CODERS(kv::INT8, encode_int8, decode_int8)
#if HEAD_DIM % 32 == 0
CODERS(codes::INT4, encode_int4, decode_int4)
#endif
