// What several ranks have computed, put together.
#include "common.cuh"

struct JoinLogits {
    // Of each rank rows * stride numbers, of which it has [rows][its tokens].
    const float* parts;
    // [rows][vocab]
    float* out;
    // Tokens of each rank but the last ones, which have fewer.
    u32 part;
    u32 stride;
    u32 vocab;
    u32 num_rows;
};

// out[row][token] = parts[token / part][row][token % part], where rows are as long as the rank has tokens.
// Reads and writes 4 bytes a number; bound by memory.
KERNEL(join_logits, JoinLogits, 256) {
    u32 row = blockIdx.x, token = blockIdx.y * blockDim.x + threadIdx.x;
    if (token >= p.vocab) return;
    u32 rank = token / p.part, first = rank * p.part, left = p.vocab - first, width = left < p.part ? left : p.part;
    u64 from = u64(rank) * p.num_rows * p.stride + u64(row) * width + token - first;
    p.out[u64(row) * p.vocab + token] = p.parts[from];
}
