// Copies runs of bytes between pools and staging buffers: pieces, ranges of heads, parts of heads.
// kv-cache/src/mapping.rs computes the runs.
#include "common.cuh"

namespace blocks {

template <class Unit> __device__ __forceinline__ void copy(u8* to, const u8* from, u64 num_bytes) {
    u64 step = u64(gridDim.y) * blockDim.x;
    for (u64 i = u64(blockIdx.y) * blockDim.x + threadIdx.x; i < num_bytes / sizeof(Unit); i += step) {
        reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
    }
}

} // namespace blocks

// A run of bytes that is contiguous on both sides.
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
    // Blocks that share a run.
    u32 num_parts;
};

// Reads and writes each byte once, 16 bytes at a time where everything is aligned. Bound by memory bandwidth, or by
// the link to one of the sides.
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
