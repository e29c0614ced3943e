// The activation between the two products of an MLP.
//
//   ACTIVATION   number of the activation (`activated` in common.cuh)
#include "common.cuh"

struct ApplyGate {
    // [rows][2 width]: gates, then up values.
    const u16* gate_up;
    // [rows][width]
    u16* out;
    u32 width;
    u32 num_rows;
};

// out = activation(gate) * up, eight elements per thread. Reads 4 bytes per element and writes 2, with about ten
// operations, or forty for the error function: bound by memory bandwidth.
KERNEL(gate, ApplyGate, 256) {
    u32 i = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (i >= p.width) return;
    const u16* row = p.gate_up + u64(blockIdx.x) * 2 * p.width;
    float here[8], up[8];
    widen_bf16(load_once(row + i), here);
    widen_bf16(load_once(row + p.width + i), up);
    for (int k = 0; k < 8; ++k) here[k] = activated<ACTIVATION>(here[k]) * up[k];
    *reinterpret_cast<uint4*>(p.out + u64(blockIdx.x) * p.width + i) = pack_bf16(here);
}
