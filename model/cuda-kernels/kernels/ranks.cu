// Joins results of several ranks.
#include "common.cuh"

struct JoinLogits {
    // rows * stride numbers per rank, of which [rows][tokens of the rank] are used.
    const float* parts;
    // [rows][vocab]
    float* out;
    // Tokens of each rank. The last ranks have fewer.
    u32 part;
    u32 stride;
    u32 vocab;
    u32 num_rows;
};

// out[row][token] = parts[token / part][row][token % part]. A row is as long as its rank has tokens. Reads and writes
// 4 bytes per number: bound by memory bandwidth.
KERNEL(join_logits, JoinLogits, 256) {
    u32 row = blockIdx.x, token = blockIdx.y * blockDim.x + threadIdx.x;
    if (token >= p.vocab) return;
    u32 rank = token / p.part, first = rank * p.part, left = p.vocab - first, width = left < p.part ? left : p.part;
    u64 from = u64(rank) * p.num_rows * p.stride + u64(row) * width + token - first;
    p.out[u64(row) * p.vocab + token] = p.parts[from];
}
