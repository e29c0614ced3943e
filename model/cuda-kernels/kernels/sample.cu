// Samples tokens from rows of logits by the rules of the host's sampler (engine/src/sampler.rs): penalties, bias and
// stop ids; then the largest logit, or a sample from what min-p, top-k and top-p leave. One block per row.
//
// No floats are added by atomics, and every sum has a fixed order: a row gives the same token in every batch and
// every run. Where the host samples in the order of ids, so does the kernel. Where the host samples the likeliest
// first, each token has a place: its distance below the largest logit, then its id. The kernel searches for the place
// at which a goal is reached (a number of tokens, or a sum of weights). It counts and weighs tokens at a few pivots
// between two ends, until the tokens between the ends fit into shared memory, and sorts those.
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
    u32 padding;
};

struct Lists {
    const TokenCount* counts;
    const TokenBias* biases;
    const u32* stops;
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

__device__ __noinline__ void change(Shared& shared, const Row& row, const Lists& lists, float* logits) {
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

// Samples from all candidates in the order of ids, with the sums of segments.
__device__ __noinline__ u32 sample_by_id(Shared& shared, const Candidates& all, float* segments, double random,
                                       u32 likeliest) {
    u32 lane = threadIdx.x % WARP, num_segments = (all.vocab + SEGMENT - 1) / SEGMENT;
    // A lane's numbers of a segment.
    float weights[LOADS];
    auto weigh_segment = [&](u32 segment) {
        u32 id = segment * SEGMENT + lane;
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k)
            weights[k] = id + k * WARP < all.vocab ? all.logits[id + k * WARP] : -SAMPLE_INFINITY;
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            float scaled = all.scaled(weights[k]);
            weights[k] = scaled >= all.lowest ? expf(scaled) : 0.0f;
        }
    };
    for (u32 segment = threadIdx.x / WARP; segment < num_segments; segment += NUM_WARPS) {
        weigh_segment(segment);
        float sum = 0.0f;
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) sum += weights[k];
        sum = warp_sum(sum);
        if (lane == 0) segments[segment] = sum;
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        // Finds the part of the segments, then the segment, the warp's row, and the lane.
        u32 num = (num_segments + WARP - 1) / WARP;
        double total = 0.0;
        for (u32 i = lane * num; i < (lane + 1) * num && i < num_segments; ++i) total += segments[i];
        shared.prefix[lane] = total;
        __syncwarp();
        total = 0.0;
        for (u32 i = 0; i < WARP; ++i) total += shared.prefix[i];
        double left = random * total;
        u32 part = 0;
        while (part < WARP - 1 && left >= shared.prefix[part]) left -= shared.prefix[part++];
        u32 segment = part * num;
        while (segment + 1 < num_segments && left >= segments[segment]) left -= segments[segment++];
        weigh_segment(segment);
        // If rounding uses up the interval: the last token of the segment with a weight.
        u32 chosen = likeliest;
        bool is_found = false;
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            float sum = warp_sum(weights[k]);
            u32 with_weight = ballot(weights[k] > 0.0f);
            if (is_found || with_weight == 0) continue;
            if (left >= sum) {
                left -= sum;
                chosen = segment * SEGMENT + k * WARP + 31 - __clz(with_weight);
                continue;
            }
            for (u32 i = 0; i < WARP && !is_found; ++i) {
                float weight = shuffle(weights[k], i);
                if (weight > 0.0f) chosen = segment * SEGMENT + k * WARP + i;
                left -= weight;
                is_found = left < 0.0;
            }
        }
        if (lane == 0) shared.id = chosen;
    }
    __syncthreads();
    return shared.id;
}

__device__ __forceinline__ u32 sample_token(Shared& shared, const Candidates& all, const Row& row, float* segments,
                                    u32 likeliest) {
    bool has_top_p = row.top_p < 1.0f;
    if (row.top_k == 0 && !has_top_p) return sample_by_id(shared, all, segments, row.random, likeliest);
    const Search everything = {0, u64(Candidates::key_of(row.lowest)) << 32 | 0xffffffffu, 0, 0.0};
    weigh(shared, all, everything, true);
    u32 num_candidates = shared.counts[NUM_PIVOTS - 1];
    double total = shared.weights[NUM_PIVOTS - 1];
    bool has_top_k = row.top_k > 0 && row.top_k < num_candidates;
    if (!has_top_k && !has_top_p) return sample_by_id(shared, all, segments, row.random, likeliest);

    Search at = everything;
    // The remaining candidates. The list is still empty.
    u32 num_left = 0;
    auto look_for = [&](const Goal& goal) {
        // A later goal is never at a later place, and mostly in the same list.
        if (num_left > 0 && !goal.is_reached(at.count, at.weight)) return find_in_list(shared, at, goal, num_left);
        if (num_left > 0) weigh(shared, all, everything, true);
        at = everything;
        return find(shared, all, at, goal);
    };
    if (has_top_k) {
        num_left = look_for(Goal{row.top_k, 0.0, false}) + 1;
        total = shared.prefix[num_left - 1];
    }
    if (has_top_p) {
        num_left = look_for(Goal{0, double(row.top_p) * total, false}) + 1;
        total = shared.prefix[num_left - 1];
    }
    u32 chosen = look_for(Goal{0, row.random * total, true});
    return u32(shared.list[chosen]);
}

// Log-probabilities of the likeliest tokens, in descending order, the smallest id first among equals. Every thread
// receives the number to subtract from a logit for its log-probability.
__device__ __noinline__ float list_likeliest(Shared& shared, const float* logits, u32 vocab, float max, u32 num_top,
                                             u32* ids, float* logprobs) {
    float sum = 0.0f;
    look_at_all(logits, vocab, [&](u32, float logit) { sum += expf(logit - max); });
    __syncthreads();
    float log_sum = logf(block_sum(sum, shared.values));
    // A warp finds the best token of its segments, and the next one when that was taken.
    float value;
    u32 id;
    auto find_after = [&](float bar, u32 bar_id) {
        value = -SAMPLE_INFINITY, id = INVALID;
        look_at_all(logits, vocab, [&](u32 here, float logit) {
            if (is_before(bar, bar_id, logit, here) && is_before(logit, here, value, id)) value = logit, id = here;
        });
        warp_best(value, id);
    };
    find_after(SAMPLE_INFINITY, INVALID);
    for (u32 i = 0; i < num_top; ++i) {
        float best = value;
        u32 best_id = id;
        block_best(shared, best, best_id);
        if (threadIdx.x == 0) ids[i] = best_id, logprobs[i] = best - max - log_sum;
        if (best_id == id) find_after(best, best_id);
    }
    return log_sum;
}

} // namespace sampling

struct SampleRows {
    // [rows][vocab]. Penalties, bias and stop ids are written into them.
    float* logits;
    // [rows]
    const sampling::Row* rows;
    const sampling::TokenCount* counts;
    const sampling::TokenBias* biases;
    const u32* stops;
    float* saved;
    // [rows]. INVALID for an unusable row.
    u32* tokens;
    // [rows], the log-probability of the token. Written only where log-probabilities are wanted.
    float* logprobs;
    // [rows][max_top]
    u32* top_ids;
    float* top_logprobs;
    u32 vocab;
    u32 max_top;
    u64 num_rows;
};

// Samples a token for each row. Reads 4 bytes per logit: once for the largest, once more to sample in the order of
// ids, three times for top-k or top-p (weigh, list; rarely more often), twice for log-probabilities, and a part of
// the row per likely token. The first read is from memory, later ones are from the L2 cache. About 10 operations per
// logit, 40 when weighing: bound by a multiprocessor's read bandwidth, not by arithmetic.
KERNEL(sample_rows, SampleRows, SAMPLE_THREADS) {
    using namespace sampling;
    __shared__ Shared shared;
    DYNAMIC_SHARED(segments);
    const u64 row_idx = blockIdx.x;
    const Row row = p.rows[row_idx];
    const Lists lists = {p.counts, p.biases, p.stops, p.saved};
    float* logits = p.logits + row_idx * p.vocab;
    bool is_changed = row.num_counts + row.num_biases + row.num_stops > 0;
    bool wants_logprobs = row.num_top != NO_LOGPROBS;
    if (threadIdx.x == 0) shared.is_invalid = 0;
    __syncthreads();

    float max, base = 0.0f;
    u32 likeliest;
    if (!is_changed || wants_logprobs) find_largest(shared, logits, p.vocab, max, likeliest);
    if (wants_logprobs && !shared.is_invalid) {
        u64 first = row_idx * p.max_top;
        base = max;
        base += list_likeliest(shared, logits, p.vocab, max, row.num_top, p.top_ids + first, p.top_logprobs + first);
    }
    if (is_changed) {
        __syncthreads();
        change(shared, row, lists, logits);
        find_largest(shared, logits, p.vocab, max, likeliest);
    }
    u32 id = INVALID;
    if (!shared.is_invalid) {
        Candidates all = {logits, p.vocab, max, row.temperature, row.lowest};
        bool is_greedy = row.temperature == 0.0f || row.top_k == 1;
        id = is_greedy ? likeliest : sample_token(shared, all, row, reinterpret_cast<float*>(segments), likeliest);
        if (wants_logprobs) {
            float logit = before_change(shared, row, lists, logits, id);
            if (threadIdx.x == 0) p.logprobs[row_idx] = logit - base;
        }
    }
    if (threadIdx.x == 0) p.tokens[row_idx] = id;
}

struct CountSampled {
    // [num_rows]
    const sampling::Row* rows;
    sampling::TokenCount* counts;
    // [num_rows]
    const u32* sources;
    const u32* sampled;
    u64 num_rows;
};

// Counts sampled[sources[row]] in the list of each row that has one. The last entry of the list is free for a new
// token. One block per row. Reads 8 bytes per token of the lists.
KERNEL(count_sampled, CountSampled, 256) {
    using namespace sampling;
    __shared__ u32 is_new;
    const Row row = p.rows[blockIdx.x];
    if (row.num_counts == 0) return;
    TokenCount* counts = p.counts + row.first_count;
    u32 token = p.sampled[p.sources[blockIdx.x]];
    if (threadIdx.x == 0) is_new = 1;
    __syncthreads();
    for (u32 i = threadIdx.x; i < row.num_counts - 1; i += blockDim.x) {
        if (counts[i].token == token) counts[i].num_output += 1, is_new = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0 && is_new) counts[row.num_counts - 1] = {token, 1};
}

struct TakeTokens {
    // [num]
    u32* tokens;
    // [num]
    const u32* sources;
    const u32* sampled;
    u64 num;
};

// tokens[i] = sampled[sources[i]].
KERNEL(take_tokens, TakeTokens, 256) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < p.num) p.tokens[i] = p.sampled[p.sources[i]];
}
