// Routed experts: the choice of experts, the order of pairs, and the combination of outputs. The products are in
// expert_products.cu.
//
//   route        logits of each row        -> its experts in ascending order, and their weights
//   sort_pairs   pairs of row and expert   -> places, sorted by expert, then by row
//   combine      outputs of experts        -> the weighted sum of each row
#include "common.cuh"

namespace experts {

// For padding rows: no expert, no place.
constexpr u32 NONE = 0xffffffffu;

__device__ __forceinline__ u32 warp_sum(u32 value) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

} // namespace experts

struct RouteToExperts {
    // [rows][num_experts]
    const float* logits;
    // [rows]: NONE where a row is not wanted. Null: all rows are wanted.
    const u32* slots;
    // [rows][num_active], output.
    u32* experts;
    // [rows][num_active], output.
    float* weights;
    u32 num_rows;
    u32 num_experts;
    u32 num_active;
    // 1: weights are divided by their sum.
    u32 renormalise;
};

// Softmax over all experts, then the experts with the largest weights; the first one among equals. One warp per row
// keeps its probabilities in shared memory. Reads 4 bytes per logit: bound by the latency of ten shuffles per active
// expert.
KERNEL(route, RouteToExperts, 128) {
    DYNAMIC_SHARED(shared);
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x * (blockDim.x / WARP) + warp;
    float* chances = reinterpret_cast<float*>(shared) + warp * p.num_experts;
    // All lanes of a warp return, or none.
    if (row >= p.num_rows) return;
    u64 first = u64(row) * p.num_active;
    if (p.slots && p.slots[row] == experts::NONE) {
        if (lane < p.num_active) {
            p.experts[first + lane] = experts::NONE;
            p.weights[first + lane] = 0.0f;
        }
        return;
    }
    const float* logits = p.logits + u64(row) * p.num_experts;
    float most = -float_of(kv::INFINITE), total = 0.0f;
    // A lane accesses its own numbers only.
    for (u32 i = lane; i < p.num_experts; i += WARP) most = max_of(chances[i] = logits[i], most);
    most = warp_max(most);
    for (u32 i = lane; i < p.num_experts; i += WARP) total += chances[i] = expf(chances[i] - most);
    total = warp_sum(total);
    for (u32 i = lane; i < p.num_experts; i += WARP) chances[i] /= total;
    u32 mine = experts::NONE;
    float my_chance = 0.0f, chosen = 0.0f;
    for (u32 n = 0; n < p.num_active; ++n) {
        u32 best = experts::NONE;
        float chance = 0.0f;
        for (u32 i = lane; i < p.num_experts; i += WARP) {
            // -1 marks an expert that was chosen before. NaN never equals it.
            if (chances[i] == -1.0f) continue;
            if (best == experts::NONE || chances[i] > chance) best = i, chance = chances[i];
        }
        for (int mask = WARP / 2; mask > 0; mask /= 2) {
            u32 other = shuffle_xor(best, mask);
            float others = shuffle_xor(chance, mask);
            if (other == experts::NONE) continue;
            if (best == experts::NONE || others > chance || (!(chance > others) && other < best)) {
                best = other, chance = others;
            }
        }
        if (lane == best % WARP) chances[best] = -1.0f;
        if (lane == n) mine = best, my_chance = chance;
        // Largest first, the order of the sum on processors.
        chosen += chance;
    }
    u32 rank = 0;
    for (u32 n = 0; n < p.num_active; ++n) rank += shuffle(mine, n) < mine;
    if (lane < p.num_active) {
        p.experts[first + rank] = mine;
        p.weights[first + rank] = p.renormalise ? my_chance / chosen : my_chance;
    }
}

struct SortPairs {
    // [pairs], from route: [rows][num_active].
    const u32* experts;
    // [num_experts + 1], output: each expert's first place.
    u32* offsets;
    // [pairs], output: the row of each place.
    u32* rows;
    // [pairs], output: the place of each pair, or NONE.
    u32* places;
    u32 num_pairs;
    u32 num_active;
    u32 num_experts;
    u32 unused;
};

// Sorts pairs by expert; pairs of one expert keep their order. The block of an expert counts the pairs of all experts
// before it, then assigns places to its own pairs. It uses no atomics, so the order is always the same. Reads 8 bytes
// per pair and expert from the L2 cache, with about ten operations each.
KERNEL(sort_pairs, SortPairs, 1024) {
    __shared__ u32 sums[32];
    __shared__ u32 counts[2][32];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, num_warps = blockDim.x / WARP, expert = blockIdx.x;
    u32 before = 0;
    for (u32 i = threadIdx.x; i < p.num_pairs; i += blockDim.x) {
        u32 other = p.experts[i];
        before += other < expert;
        if (expert == 0 && other == experts::NONE) p.places[i] = experts::NONE;
    }
    before = experts::warp_sum(before);
    if (lane == 0) sums[warp] = before;
    __syncthreads();
    u32 place = 0;
    for (u32 i = 0; i < num_warps; ++i) place += sums[i];
    if (threadIdx.x == 0) p.offsets[expert] = place;
    u32 turn = 0;
    // Four adjacent pairs per thread.
    for (u32 first = 0; first < p.num_pairs; first += blockDim.x * 4, turn ^= 1) {
        u32 pair = first + threadIdx.x * 4, found[4], below = 0, in_warp = 0;
        if (pair + 4 <= p.num_pairs) {
            uint4 four = *reinterpret_cast<const uint4*>(p.experts + pair);
            found[0] = four.x, found[1] = four.y, found[2] = four.z, found[3] = four.w;
        } else {
            for (u32 k = 0; k < 4; ++k) found[k] = pair + k < p.num_pairs ? p.experts[pair + k] : experts::NONE;
        }
        for (u32 k = 0; k < 4; ++k) {
            u32 all = ballot(found[k] == expert);
            below += __popc(all & ((1u << lane) - 1));
            in_warp += __popc(all);
        }
        if (lane == 0) counts[turn][warp] = in_warp;
        // The counts of two iterations ago are free: every thread that arrives here has read them.
        __syncthreads();
        for (u32 i = 0; i < num_warps; ++i) {
            if (i < warp) below += counts[turn][i];
        }
        for (u32 k = 0; k < 4; ++k) {
            if (found[k] != expert) continue;
            p.places[pair + k] = place + below;
            p.rows[place + below] = (pair + k) / p.num_active;
            below += 1;
        }
        for (u32 i = 0; i < num_warps; ++i) place += counts[turn][i];
    }
    if (expert + 1 == p.num_experts && threadIdx.x == 0) p.offsets[expert + 1] = place;
}

struct Combine {
    // [places][hidden]
    const u16* outputs;
    // [rows][num_active], from sort_pairs.
    const u32* places;
    // [rows][num_active], from route.
    const float* weights;
    // [rows][hidden]
    u16* out;
    u32 hidden;
    u32 num_active;
    // 1: the sum is added to `out`.
    u32 is_added;
    u32 num_rows;
};

// The weighted sum of a row's expert outputs, in the order of the experts. A thread computes eight elements. Reads 2
// bytes per element and expert and writes 2: bound by memory bandwidth.
KERNEL(combine, Combine, 256) {
    u32 i = (blockIdx.y * blockDim.x + threadIdx.x) * 8, row = blockIdx.x;
    if (i >= p.hidden) return;
    float sum[8] = {}, here[8];
    for (u32 n = 0; n < p.num_active; ++n) {
        u32 place = p.places[u64(row) * p.num_active + n];
        if (place == experts::NONE) continue;
        float weight = p.weights[u64(row) * p.num_active + n];
        widen_bf16(load_once(p.outputs + u64(place) * p.hidden + i), here);
        for (int k = 0; k < 8; ++k) sum[k] += here[k] * weight;
    }
    uint4* out = reinterpret_cast<uint4*>(p.out + u64(row) * p.hidden + i);
    if (p.is_added) {
        widen_bf16(*out, here);
        for (int k = 0; k < 8; ++k) sum[k] += here[k];
    }
    *out = pack_bf16(sum);
}
