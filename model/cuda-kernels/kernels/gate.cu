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

namespace gates {

// out = activation(gate) * up of eight numbers from `i` on.
__device__ __forceinline__ uint4 apply(const ApplyGate& p, u64 row_idx, u32 i) {
    const u16* row = p.gate_up + row_idx * 2 * p.width;
    float here[8], up[8];
    widen_bf16(load_once(row + i), here);
    widen_bf16(load_once(row + p.width + i), up);
    for (int k = 0; k < 8; ++k) here[k] = activated<ACTIVATION>(here[k]) * up[k];
    uint4 rounded = pack_bf16(here);
    *reinterpret_cast<uint4*>(p.out + row_idx * p.width + i) = rounded;
    return rounded;
}

} // namespace gates

// out = activation(gate) * up, eight elements per thread. Reads 4 bytes per element and writes 2, with about ten
// operations, or forty for the error function: bound by memory bandwidth.
KERNEL(gate, ApplyGate, 256) {
    u32 i = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (i < p.width) gates::apply(p, blockIdx.x, i);
}

struct GateQuantise {
    ApplyGate gate;
    // [rows][width], E4M3.
    u8* quantised;
    // [rows], or [width / 128][stride]: the factors that restore the numbers.
    float* scales;
    // At least the number of rows. 0 for gate_rows.
    u32 stride;
    u32 unused;
};

// gate, then quantise_rows (products.cu) of its output, with the same bits, one block per row. It saves a launch and a
// read of 2 bytes per element.
KERNEL(gate_rows, GateQuantise, 1024) {
    __shared__ float scratch[2][32];
    const ApplyGate& g = p.gate;
    u64 row = u64(blockIdx.x) * g.width;
    fp8::Range range = {0.0f, 0.0f};
    for (u32 i = threadIdx.x * 8; i < g.width; i += blockDim.x * 8) {
        float here[8];
        widen_bf16(gates::apply(g, blockIdx.x, i), here);
        range.take(here);
    }
    fp8::quantise_row(g.out + row, g.width, range, scratch, p.quantised + row, p.scales + blockIdx.x);
}

// The same with quantise_groups: 16 lanes share a group of 128.
KERNEL(gate_groups, GateQuantise, 256) {
    const ApplyGate& g = p.gate;
    u32 i = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    float here[8] = {};
    if (i < g.width) widen_bf16(gates::apply(g, blockIdx.x, i), here);
    u8* to = p.quantised + u64(blockIdx.x) * g.width + i;
    fp8::quantise_group(here, i < g.width, to, p.scales + i / 128 * p.stride + blockIdx.x);
}
