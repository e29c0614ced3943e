// Rows of logits: how to sample from them, their largest number, and what penalties, bias and stop ids make of them.
#pragma once
#include "common.cuh"

#ifndef SAMPLE_THREADS
#define SAMPLE_THREADS 512
#endif

namespace sampling {

struct TokenCount {
    // INVALID for no token.
    u32 token;
    // How often the output contains the token. 0: only the prompt contains it.
    u32 num_output;
};

struct TokenBias {
    u32 token;
    float bias;
};

struct Row {
    // In [0, 1).
    double random;
    // Ranges in the lists of all rows: tokens to penalise, tokens with a bias, tokens to mask. A token occurs once in
    // a range.
    u32 first_count, num_counts;
    u32 first_bias, num_biases;
    u32 first_stop, num_stops;
    // The place of num_counts + num_biases original logits, if log-probabilities are wanted.
    u32 first_saved;
    float repetition, presence, frequency;
    // 0: takes the largest logit.
    float temperature;
    // Tokens with a lower scaled logit are no candidates.
    float lowest;
    // 0: off.
    u32 top_k;
    // 1: off.
    float top_p;
    // Number of likeliest tokens whose log-probabilities are wanted, besides the sampled token. NO_LOGPROBS: none at
    // all.
    u32 num_top;
    // One more than the row's place in the masks. 0: every token may come.
    u32 mask;
};

struct Lists {
    const TokenCount* counts;
    const TokenBias* biases;
    const u32* stops;
    // [masked rows][(vocab + 31) / 32]: a bit for each token that may come.
    const u32* masks;
    float* saved;
};

constexpr u32 NO_LOGPROBS = 0xffffffff;
// Instead of a token: the row holds NaN, or its maximum is not finite.
constexpr u32 INVALID = 0xffffffff;
constexpr u32 NUM_WARPS = SAMPLE_THREADS / WARP;
// Entries of a list.
constexpr u32 CAPACITY = SAMPLE_THREADS;
constexpr u32 NUM_PIVOTS = 8;
// Ids that a warp processes at a time, so that a lane has several loads in flight.
constexpr u32 LOADS = 16;
constexpr u32 SEGMENT = WARP * LOADS;
constexpr float LOWEST = -3.402823466e38f;
#define SAMPLE_INFINITY float_of(0x7f800000u)

struct Shared {
    // Tokens from place `list_from` on, in order, and the total weight up to and including each, from the very first
    // token on.
    u64 list[CAPACITY];
    double prefix[CAPACITY];
    double warp_weights[NUM_PIVOTS][NUM_WARPS];
    u32 warp_counts[NUM_PIVOTS][NUM_WARPS];
    // Number and weight of the tokens from the start of the range up to each pivot.
    double weights[NUM_PIVOTS];
    u32 counts[NUM_PIVOTS];
    float values[NUM_WARPS];
    u32 ids[NUM_WARPS];
    u32 num_listed;
    u32 is_invalid;
    u32 id;
};

// Orders by logit, the largest first, then by id, the smallest first.
__device__ __forceinline__ bool is_before(float value, u32 id, float other, u32 other_id) {
    return value > other || (value == other && id < other_id);
}

// Calls `look(id, number)` for all numbers of a row, for each thread in ascending order of ids.
template <class Look> __device__ __forceinline__ void look_at_all(const float* logits, u32 vocab, const Look& look) {
    for (u32 start = threadIdx.x / WARP * SEGMENT; start < vocab; start += NUM_WARPS * SEGMENT) {
        float here[LOADS];
        u32 id = start + threadIdx.x % WARP;
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            if (id + k * WARP < vocab) here[k] = logits[id + k * WARP];
        }
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            if (id + k * WARP < vocab) look(id + k * WARP, here[k]);
        }
    }
}

__device__ __forceinline__ void warp_best(float& value, u32& id) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        float other = shuffle_xor(value, mask);
        u32 other_id = shuffle_xor(id, mask);
        if (is_before(other, other_id, value, id)) value = other, id = other_id;
    }
}

// The best entry of all warps, in every thread.
__device__ __forceinline__ void block_best(Shared& shared, float& value, u32& id) {
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared.values[threadIdx.x / WARP] = value, shared.ids[threadIdx.x / WARP] = id;
    __syncthreads();
    u32 lane = threadIdx.x % WARP;
    value = lane < NUM_WARPS ? shared.values[lane] : -SAMPLE_INFINITY;
    id = lane < NUM_WARPS ? shared.ids[lane] : INVALID;
    warp_best(value, id);
}

// The largest logit and its id, in every thread. Notes whether the row holds an unusable number.
__device__ __noinline__ void find_largest(Shared& shared, const float* logits, u32 vocab, float& max, u32& id) {
    bool has_nan = false;
    max = -SAMPLE_INFINITY, id = INVALID;
    look_at_all(logits, vocab, [&](u32 here, float logit) {
        has_nan |= logit != logit;
        if (logit > max) max = logit, id = here;
    });
    warp_best(max, id);
    has_nan = ballot(has_nan) != 0;
    // Must come before the barriers of block_best.
    if (has_nan && threadIdx.x % WARP == 0) shared.is_invalid = 1;
    block_best(shared, max, id);
    if (!(max < SAMPLE_INFINITY && max > -SAMPLE_INFINITY)) shared.is_invalid = 1;
    __syncthreads();
}

// A request's bias or penalty can exceed the finite numbers, so the result is clamped. Tokens that the model itself
// excludes stay excluded.
__device__ __forceinline__ float bounded(float logit, float before) {
    if (before == -SAMPLE_INFINITY) return before;
    return min_of(max_of(logit, LOWEST), -LOWEST);
}

__device__ __noinline__ void change(Shared& shared, const Row& row, const Lists& lists, float* logits, u32 vocab) {
    auto check = [&](float logit) {
        if (!(logit < SAMPLE_INFINITY)) shared.is_invalid = 1;
    };
    float* saved = row.num_top != NO_LOGPROBS ? lists.saved + row.first_saved : nullptr;
    for (u32 i = threadIdx.x; i < row.num_counts; i += SAMPLE_THREADS) {
        TokenCount count = lists.counts[row.first_count + i];
        if (count.token == INVALID) continue;
        float logit = logits[count.token];
        check(logit);
        if (saved) saved[i] = logit;
        float penalised = logit > 0.0f ? logit / row.repetition : __fmul_rn(logit, row.repetition);
        // Not fused, to round like the host.
        float price = __fadd_rn(row.presence, __fmul_rn(row.frequency, float(count.num_output)));
        if (count.num_output > 0) penalised -= price;
        logits[count.token] = bounded(penalised, logit);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.num_biases; i += SAMPLE_THREADS) {
        TokenBias bias = lists.biases[row.first_bias + i];
        float logit = logits[bias.token];
        check(logit);
        if (saved) saved[row.num_counts + i] = logit;
        logits[bias.token] = bounded(logit + bias.bias, logit);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.num_stops; i += SAMPLE_THREADS) {
        u32 token = lists.stops[row.first_stop + i];
        check(logits[token]);
        logits[token] = -SAMPLE_INFINITY;
    }
    __syncthreads();
    if (row.mask == 0) return;
    u32 num_words = (vocab + 31) / 32, lane = threadIdx.x % WARP;
    const u32* mask = lists.masks + u64(row.mask - 1) * num_words;
    for (u32 start = threadIdx.x / WARP * SEGMENT; start < vocab; start += NUM_WARPS * SEGMENT) {
        u32 word_idx = start / 32 + lane;
        u32 word = lane < LOADS && word_idx < num_words ? mask[word_idx] : 0;
        float here[LOADS];
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            u32 id = start + k * WARP + lane;
            here[k] = id < vocab ? logits[id] : 0.0f;
        }
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            u32 id = start + k * WARP + lane;
            bool may_come = shuffle(word, k) >> lane & 1;
            check(here[k]);
            if (!may_come && id < vocab) logits[id] = -SAMPLE_INFINITY;
        }
    }
    __syncthreads();
}

// The original logit of a token, in every thread.
__device__ __forceinline__ float before_change(Shared& shared, const Row& row, const Lists& lists, const float* logits,
                                               u32 id) {
    __syncthreads();
    if (threadIdx.x == 0) shared.values[0] = logits[id];
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.num_biases; i += SAMPLE_THREADS) {
        if (lists.biases[row.first_bias + i].token == id)
            shared.values[0] = lists.saved[row.first_saved + row.num_counts + i];
    }
    // A token with both a penalty and a bias was penalised first.
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.num_counts; i += SAMPLE_THREADS) {
        if (lists.counts[row.first_count + i].token == id) shared.values[0] = lists.saved[row.first_saved + i];
    }
    __syncthreads();
    return shared.values[0];
}

} // namespace sampling
