// Embedding lookup.
#include "common.cuh"

struct Embed {
    // [num_held][hidden]: the rows of tokens first_token, first_token + 1, ..
    const u16* table;
    // [rows]
    const u32* tokens;
    // [rows][hidden]
    u16* x;
    u32 hidden;
    u32 first_token;
    u32 num_held;
    float scale;
    u64 num_rows;
};

// x = table[token] * scale, one block per row. Tokens that the table does not hold become zeros. Reads and writes 2
// bytes per element, with one multiplication: bound by memory bandwidth.
KERNEL(embed, Embed, 256) {
    u32 token = p.tokens[blockIdx.x] - p.first_token;
    bool is_held = token < p.num_held;
    const u16* from = p.table + u64(is_held ? token : 0) * p.hidden;
    u16* to = p.x + u64(blockIdx.x) * p.hidden;
    for (u32 i = (blockIdx.y * blockDim.x + threadIdx.x) * 8; i < p.hidden; i += gridDim.y * blockDim.x * 8) {
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (is_held) {
            float here[8];
            widen_bf16(load_once(from + i), here);
            for (int k = 0; k < 8; ++k) here[k] *= p.scale;
            bits = pack_bf16(here);
        }
        *reinterpret_cast<uint4*>(to + i) = bits;
    }
}
