// Moves runs of KV between pools and staging buffers, as kv-cache/src/mapping.rs finds them: pieces, ranges of heads, parts
// of heads; as they are, or from one type to another.
//
//   HEAD_DIM, FROM, TO      of vectors, and the two types (kv::)
//   FROM_ALIGN, TO_ALIGN    of every vector, in bytes; at most 16
#include "common.cuh"

namespace blocks {

// Numbers of a vector that a lane takes at a time, and lanes of a vector.
constexpr u32 CHUNK = HEAD_DIM % 8 == 0 ? 8 : HEAD_DIM % 4 == 0 ? 4 : HEAD_DIM % 2 == 0 ? 2 : 1;
constexpr u32 CHUNKS = HEAD_DIM / CHUNK;
__device__ constexpr u32 lanes(u32 num) { return num >= CHUNKS || num == WARP ? num : lanes(num * 2); }
constexpr u32 LANES = lanes(1), CHUNKS_PER_LANE = (CHUNKS + LANES - 1) / LANES;

// The scale is bf16, perhaps at an odd place.
__device__ __forceinline__ float load_scale(const u8* from) { return float_of((u32(from[0]) | u32(from[1]) << 8) << 16); }

template <class Unit> __device__ __forceinline__ void copy(u8* to, const u8* from, u64 num_bytes) {
    u64 step = u64(gridDim.y) * blockDim.x;
    for (u64 i = u64(blockIdx.y) * blockDim.x + threadIdx.x; i < num_bytes / sizeof(Unit); i += step) {
        reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
    }
}

} // namespace blocks

// Bytes that lie together on both sides.
struct ByteRun {
    u64 from;
    u64 to;
    u64 num_bytes;
};

struct CopyRuns {
    const u8* from;
    u8* to;
    // [runs]
    const ByteRun* runs;
    u32 num_runs;
    // That share a run.
    u32 num_parts;
};

// Reads and writes each byte once, 16 at a time where all is aligned; bound by memory, or by the link that one side is
// behind.
KERNEL(copy_runs, CopyRuns, 256) {
    ByteRun run = p.runs[blockIdx.x];
    const u8* from = p.from + run.from;
    u8* to = p.to + run.to;
    u64 odd = reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to) | run.num_bytes;
    if (odd % 16 == 0) {
        blocks::copy<uint4>(to, from, run.num_bytes);
    } else if (odd % 4 == 0) {
        blocks::copy<u32>(to, from, run.num_bytes);
    } else {
        blocks::copy<u8>(to, from, run.num_bytes);
    }
}

// One head's vectors of consecutive tokens.
struct VectorRun {
    u64 from;
    u64 to;
    // Of the first one's scale, where a type has scales.
    u64 from_scales;
    u64 to_scales;
    u64 num_vectors;
};

struct ConvertRuns {
    const u8* from;
    u8* to;
    // [runs]
    const VectorRun* runs;
    u32 num_runs;
    // That share a run.
    u32 num_parts;
};

// Widens vectors and rounds them again, a few lanes each: of 128 numbers sixteen.
// Reads and writes each element once, some ten operations for each; bound by memory.
KERNEL(convert_runs, ConvertRuns, 128) {
    using namespace blocks;
    VectorRun run = p.runs[blockIdx.x];
    u32 lane = threadIdx.x % LANES, groups = blockDim.x / LANES;
    // All lanes of a warp go round as often: they meet.
    for (u64 first = u64(blockIdx.y) * groups; first < run.num_vectors; first += u64(gridDim.y) * groups) {
        u64 vector = first + threadIdx.x / LANES;
        bool is_wanted = vector < run.num_vectors;
        const u8* from = p.from + run.from + vector * HEAD_DIM * kv::size_bytes(FROM);
        u8* to = p.to + run.to + vector * HEAD_DIM * kv::size_bytes(TO);
        float scale = 1.0f;
        if constexpr (kv::scale_bytes(FROM) > 0) {
            if (is_wanted) scale = load_scale(p.from + run.from_scales + vector * 2);
        }
        float x[CHUNKS_PER_LANE][CHUNK];
        u32 most = 0;
#pragma unroll
        for (u32 i = 0; i < CHUNKS_PER_LANE; ++i) {
            u32 chunk = lane + i * LANES;
            for (u32 k = 0; k < CHUNK; ++k) x[i][k] = 0.0f;
            if (!is_wanted || chunk >= CHUNKS) continue;
            kv::Elements<FROM, CHUNK> elements;
            kv::load<FROM_ALIGN>(from + chunk * CHUNK * kv::size_bytes(FROM), elements);
            kv::widen(elements, scale, x[i]);
            for (u32 k = 0; k < CHUNK; ++k) {
                u32 bits = bits_of(x[i][k]) & 0x7fffffffu;
                most = most > bits ? most : bits;
            }
        }
        float inverse = 1.0f;
        if constexpr (kv::scale_bytes(TO) > 0) {
            for (u32 mask = LANES / 2; mask > 0; mask /= 2) {
                u32 other = shuffle_xor(most, mask);
                most = most > other ? most : other;
            }
            scale = kv::scale_of<TO>(most);
            inverse = 1.0f / scale;
            if (is_wanted && lane == 0) {
                u8* scales = p.to + run.to_scales + vector * 2;
                scales[0] = u8(bits_of(scale) >> 16);
                scales[1] = u8(bits_of(scale) >> 24);
            }
        }
#pragma unroll
        for (u32 i = 0; i < CHUNKS_PER_LANE; ++i) {
            u32 chunk = lane + i * LANES;
            if (!is_wanted || chunk >= CHUNKS) continue;
            kv::store<TO_ALIGN>(to + chunk * CHUNK * kv::size_bytes(TO), kv::round<TO>(x[i], inverse));
        }
    }
}
