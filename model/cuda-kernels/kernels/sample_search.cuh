// A search among the candidates of a row, the likeliest first. Each token has a place: its distance below the largest logit,
// then its id. The search is for the place at which a goal is reached (a number of tokens, or a sum of weights). It counts and
// weighs tokens at a few pivots between two ends, until the tokens between the ends fit into shared memory, and sorts those.
#pragma once
#include "sample_rows.cuh"

namespace sampling {

// The order of a row's candidates, the likeliest first.
struct Candidates {
    const float* logits;
    u32 vocab;
    float max, temperature, lowest;

    // 0, then minus 0, then the smaller numbers.
    __device__ __forceinline__ static u32 key_of(float scaled) {
        u32 bits = bits_of(scaled);
        return bits ? bits - 0x7fffffffu : 0;
    }
    __device__ __forceinline__ static float scaled_of(u64 place) {
        u32 key = u32(place >> 32);
        return float_of(key ? key + 0x7fffffffu : 0);
    }
    __device__ __forceinline__ float scaled(float logit) const { return (logit - max) / temperature; }

    // Calls `look(place, weight)` for the candidates of a range, both ends included.
    template <class Look> __device__ __forceinline__ void look_at(u64 from, u64 to, const Look& look) const {
        look_at_all(logits, vocab, [&](u32 id, float logit) {
            float here = scaled(logit);
            u64 place = u64(key_of(here)) << 32 | id;
            if (here >= lowest && place >= from && place <= to) look(place, here);
        });
    }
};

// The state of the search. `count` and `weight` are those of the places before `from`.
struct Search {
    u64 from, to;
    u32 count;
    double weight;
};

// Pivot j of a range. The last pivot is the end of the range.
__device__ __forceinline__ u64 pivot_of(const Search& at, u32 j, bool is_first) {
    if (j == NUM_PIVOTS - 1) return at.to;
    // 1/8, 1/2, 1, 2, 4, 8, 16 below the largest, a typical spacing of logits.
    if (is_first) return u64(Candidates::key_of(j == 0 ? -0.125f : -float(1u << j) * 0.25f)) << 32 | 0xffffffffu;
    u64 step = (at.to - at.from) / NUM_PIVOTS;
    return at.from + step * (j + 1);
}

// Counts and weighs the candidates up to each pivot. Reads the row once, with about 30 operations per number.
__device__ __noinline__ void weigh(Shared& shared, const Candidates& all, const Search& at, bool is_first) {
    u64 pivots[NUM_PIVOTS];
    u32 counts[NUM_PIVOTS] = {};
    float weights[NUM_PIVOTS] = {};
#pragma unroll
    for (u32 j = 0; j < NUM_PIVOTS; ++j) pivots[j] = pivot_of(at, j, is_first);
    all.look_at(at.from, at.to, [&](u64 place, float scaled) {
        float weight = expf(scaled);
#pragma unroll
        for (u32 j = 0; j < NUM_PIVOTS; ++j) {
            if (place <= pivots[j]) counts[j] += 1, weights[j] += weight;
        }
    });
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (u32 j = 0; j < NUM_PIVOTS; ++j) {
        float weight = warp_sum(weights[j]);
        u32 count = counts[j];
        for (int mask = WARP / 2; mask > 0; mask /= 2) count += shuffle_xor(count, mask);
        if (lane == 0) shared.warp_weights[j][warp] = weight, shared.warp_counts[j][warp] = count;
    }
    __syncthreads();
    if (threadIdx.x < NUM_PIVOTS) {
        double weight = 0.0;
        u32 count = 0;
        for (u32 i = 0; i < NUM_WARPS; ++i) {
            weight += shared.warp_weights[threadIdx.x][i];
            count += shared.warp_counts[threadIdx.x][i];
        }
        shared.weights[threadIdx.x] = weight;
        shared.counts[threadIdx.x] = count;
    }
    __syncthreads();
}

// Sorts the candidates of a range, at most CAPACITY, and sums up their weights.
__device__ __noinline__ void list(Shared& shared, const Candidates& all, const Search& at) {
    u32 mine = threadIdx.x;
    __syncthreads();
    shared.list[mine] = ~u64(0);
    if (mine == 0) shared.num_listed = 0;
    __syncthreads();
    all.look_at(at.from, at.to, [&](u64 place, float) { shared.list[atomicAdd(&shared.num_listed, 1u)] = place; });
    __syncthreads();
    // Bitonic sort.
    for (u32 size = 2; size <= CAPACITY; size *= 2) {
        for (u32 stride = size / 2; stride > 0; stride /= 2) {
            u32 other = mine ^ stride;
            if (other > mine) {
                u64 a = shared.list[mine], b = shared.list[other];
                if ((a > b) == ((mine & size) == 0)) shared.list[mine] = b, shared.list[other] = a;
            }
            __syncthreads();
        }
    }
    double sum = mine < shared.num_listed ? double(expf(Candidates::scaled_of(shared.list[mine]))) : 0.0;
    if (mine == 0) sum += at.weight;
    shared.prefix[mine] = sum;
    for (u32 distance = 1; distance < CAPACITY; distance *= 2) {
        __syncthreads();
        double before = mine >= distance ? shared.prefix[mine - distance] : 0.0;
        __syncthreads();
        shared.prefix[mine] = sum += before;
    }
    __syncthreads();
}

// The goal of a search: the first place up to which there are this many tokens, or this much weight, or more than
// this weight.
struct Goal {
    // Used if not 0.
    u32 count;
    double weight;
    bool is_exceeded;

    __device__ __forceinline__ bool is_reached(u32 count_here, double weight_here) const {
        if (count) return count_here >= count;
        return is_exceeded ? weight_here > weight : weight_here >= weight;
    }
};

// The first of the first `num` entries of the list that reaches the goal. If rounding hides it: the last one.
__device__ __forceinline__ u32 find_in_list(const Shared& shared, const Search& at, const Goal& goal, u32 num) {
    u32 low = 0, high = num - 1;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (goal.is_reached(at.count + middle + 1, shared.prefix[middle])) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// Lists the tokens around the goal and returns which of them reaches it. `at` moves to the start of the list. All
// candidates must have been weighed by the last call.
__device__ __noinline__ u32 find(Shared& shared, const Candidates& all, Search& at, const Goal& goal) {
    for (bool is_first = true;; is_first = false) {
        if (!is_first) weigh(shared, all, at, false);
        u32 j = 0;
        while (j < NUM_PIVOTS - 1 && !goal.is_reached(at.count + shared.counts[j], at.weight + shared.weights[j])) ++j;
        // No token reaches the goal because of rounding: take the last tokens.
        while (j > 0 && shared.counts[j - 1] == shared.counts[j]) --j;
        Search next = {at.from, pivot_of(at, j, is_first), at.count, at.weight};
        u32 num = shared.counts[j];
        if (num > CAPACITY && j > 0) {
            next.from = pivot_of(at, j - 1, is_first) + 1;
            next.count += shared.counts[j - 1];
            next.weight += shared.weights[j - 1];
            num -= shared.counts[j - 1];
        }
        at = next;
        // All threads have read the values that are overwritten next.
        __syncthreads();
        if (num <= CAPACITY) break;
    }
    list(shared, all, at);
    return find_in_list(shared, at, goal, shared.num_listed);
}

} // namespace sampling
