// Samples tokens from rows of logits by the rules of the host's sampler (engine/src/sampler.rs): penalties, bias and
// stop ids; then the largest logit, or a sample from what min-p, top-k and top-p leave. One block per row.
//
// No floats are added by atomics, and every sum has a fixed order: a row gives the same token in every batch and
// every run. Where the host samples the likeliest and then the others in the order of ids, so does the kernel. Where the host
// samples in the order of likelihood, the kernel searches.
#include "sample_search.cuh"

namespace sampling {

// Samples from all candidates, first the likeliest, then the others in the order of ids, with the sums of segments.
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
            bool is_other = scaled >= all.lowest && id + k * WARP != likeliest;
            weights[k] = is_other ? expf(scaled) : 0.0f;
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
        // The weight of the likeliest is 1.
        double left = random * (total + 1.0) - 1.0;
        u32 part = 0;
        while (part < WARP - 1 && left >= shared.prefix[part]) left -= shared.prefix[part++];
        u32 segment = part * num;
        while (segment + 1 < num_segments && left >= segments[segment]) left -= segments[segment++];
        weigh_segment(segment);
        // If rounding uses up the interval: the last token of the segment with a weight.
        u32 chosen = likeliest;
        bool is_found = left < 0.0;
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
    const u32* masks;
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
    const Lists lists = {p.counts, p.biases, p.stops, p.masks, p.saved};
    float* logits = p.logits + row_idx * p.vocab;
    bool is_changed = row.num_counts + row.num_biases + row.num_stops + row.mask > 0;
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
        change(shared, row, lists, logits, p.vocab);
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
