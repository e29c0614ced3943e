// XXH3-64 of pieces, the checksum of the handoff (kv-transfer/transfer/src/checksum).
//
// Implements https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md for inputs of more than 240 bytes. Eight
// accumulators add stripes of 64 bytes and are scrambled after every 16 stripes, which are 1 KiB. The contribution of
// a stripe does not depend on earlier stripes, so all KiB of a piece are summed in parallel. Only the scrambles form
// a chain: eight independent steps of a few operations per KiB.
#include "common.cuh"

namespace checksum {

constexpr u32 STRIPE = 64, STRIPES = 16;
// KiB that are summed between two walks along the chain.
constexpr u32 KIBS = 64;

constexpr u64 PRIME32_1 = 0x9E3779B1ull, PRIME32_2 = 0x85EBCA77ull, PRIME32_3 = 0xC2B2AE3Dull;
constexpr u64 PRIME64_1 = 0x9E3779B185EBCA87ull, PRIME64_2 = 0xC2B2AE3D27D4EB4Full, PRIME64_3 = 0x165667B19E3779F9ull;
constexpr u64 PRIME64_4 = 0x85EBCA77C2B2AE63ull, PRIME64_5 = 0x27D4EB2F165667C5ull;

__device__ __forceinline__ u64 load(const u8* from, bool is_aligned) {
    if (is_aligned) return *reinterpret_cast<const u64*>(from);
    u64 x = 0;
    for (u32 i = 0; i < 8; ++i) x |= u64(from[i]) << 8 * i;
    return x;
}

// The contribution of one of a stripe's eight numbers to its own accumulator. The number itself is added to the
// neighbour's.
__device__ __forceinline__ u64 product(u64 data, u64 secret) {
    u64 key = data ^ secret;
    return (key & 0xffffffffull) * (key >> 32);
}

} // namespace checksum

struct ChecksumPieces {
    const u8* base;
    // [pieces]: the start of each piece.
    const u64* offsets;
    // [pieces], output.
    u64* sums;
    // Bytes of a piece, more than 240.
    u64 num_bytes;
    u64 num_pieces;
    // The seeded secret: its words, the words from byte 121, and the words from byte 11.
    u64 secret[24];
    u64 last_secret[8];
    u64 merge_secret[8];
};

// One block per piece. Reads each byte once, with about two operations per byte. With pieces for all multiprocessors
// it is bound by memory bandwidth: the chain takes about forty cycles per KiB, which other blocks hide.
KERNEL(checksum_pieces, ChecksumPieces, 256) {
    using namespace checksum;
    __shared__ u64 added[KIBS][8];
    __shared__ u64 all[8];
    const u8* piece = p.base + p.offsets[blockIdx.x];
    bool is_aligned = reinterpret_cast<u64>(piece) % 8 == 0;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP;
    // The last 64 bytes are a stripe of their own. It may overlap the stripe before.
    u64 num_stripes = (p.num_bytes - 1) / STRIPE, num_kibs = (num_stripes + STRIPES - 1) / STRIPES;
    // Four lanes share a stripe with two numbers each. A lane has two stripes of a KiB.
    u32 pair = lane % 4 * 2, stripe = lane / 4;
    u64 secret[2][2];
    for (u32 i = 0; i < 2; ++i) {
        for (u32 k = 0; k < 2; ++k) secret[i][k] = p.secret[stripe + 8 * i + pair + k];
    }
    const u64 first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    u64 sum = 0, scramble = 0;
    if (threadIdx.x < 8) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            if (threadIdx.x == i) sum = first[i], scramble = p.secret[16 + i];
        }
    }
    for (u64 begin = 0; begin < num_kibs; begin += KIBS) {
        u32 kibs = u32(num_kibs - begin < KIBS ? num_kibs - begin : KIBS);
        for (u32 kib = warp; kib < kibs; kib += num_warps) {
            u64 low = 0, high = 0;
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                u64 at = (begin + kib) * STRIPES + stripe + 8 * i;
                if (at >= num_stripes) continue;
                const u8* from = piece + at * STRIPE + pair * 8;
                u64 x = load(from, is_aligned), y = load(from + 8, is_aligned);
                low += product(x, secret[i][0]) + y;
                high += product(y, secret[i][1]) + x;
            }
            for (int mask = 4; mask < WARP; mask *= 2) {
                low += shuffle_xor(low, mask);
                high += shuffle_xor(high, mask);
            }
            if (lane < 4) added[kib][pair] = low, added[kib][pair + 1] = high;
        }
        __syncthreads();
        if (threadIdx.x < 8) {
            for (u32 kib = 0; kib < kibs; ++kib) {
                sum += added[kib][threadIdx.x];
                // The last KiB may be partial.
                if ((begin + kib + 1) * STRIPES <= num_stripes) sum = (sum ^ sum >> 47 ^ scramble) * PRIME32_1;
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < 8) {
        const u8* last = piece + p.num_bytes - STRIPE;
        bool is_last_aligned = reinterpret_cast<u64>(last) % 8 == 0;
        sum += product(load(last + threadIdx.x * 8, is_last_aligned), p.last_secret[threadIdx.x]);
        sum += load(last + (threadIdx.x ^ 1) * 8, is_last_aligned);
        all[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    u64 merged = p.num_bytes * PRIME64_1;
    for (u32 i = 0; i < 8; i += 2) {
        u64 left = all[i] ^ p.merge_secret[i], right = all[i + 1] ^ p.merge_secret[i + 1];
        merged += left * right ^ __umul64hi(left, right);
    }
    merged = (merged ^ merged >> 37) * 0x165667919E3779F9ull;
    p.sums[blockIdx.x] = merged ^ merged >> 32;
}
