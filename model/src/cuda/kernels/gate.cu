// What lies between the two products of an MLP.
//
//   ACTIVATION   0 x sigmoid(x), 1 GELU by the error function, 2 GELU by its tanh approximation
#include "common.cuh"

namespace gates {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp2_fast(-LOG2_E * x)); }

__device__ __forceinline__ float activated(float x) {
#if ACTIVATION == 0
    return x * sigmoid(x);
#elif ACTIVATION == 1
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
#else
    // 0.5 x (1 + tanh(y)) = x sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3)
    return x * sigmoid(1.5957691f * (x + 0.044715f * x * x * x));
#endif
}

} // namespace gates

struct Gate {
    // [rows][2 width]: gates, then what they let through.
    const u16* gate_up;
    // [rows][width]
    u16* out;
    u32 width;
    u32 num_rows;
};

// out = activation(gate) * up, eight elements a thread.
// Reads 4 bytes an element and writes 2, some ten operations, of the error function forty; bound by memory.
KERNEL(gate, Gate, 256) {
    u32 i = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (i >= p.width) return;
    const u16* row = p.gate_up + u64(blockIdx.x) * 2 * p.width;
    float here[8], up[8];
    widen_bf16(load_once(row + i), here);
    widen_bf16(load_once(row + p.width + i), up);
    for (int k = 0; k < 8; ++k) here[k] = gates::activated(here[k]) * up[k];
    *reinterpret_cast<uint4*>(p.out + u64(blockIdx.x) * p.width + i) = pack_bf16(here);
}

struct Activate {
    // [rows][width]
    const u16* x;
    // [rows][width], may be x.
    u16* out;
    u32 width;
    u32 num_rows;
};

// out = activation(x): an MLP without a gate. Reads and writes 2 bytes an element; bound by memory.
KERNEL(activate, Activate, 256) {
    u32 i = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (i >= p.width) return;
    u64 at = u64(blockIdx.x) * p.width + i;
    float here[8];
    widen_bf16(*reinterpret_cast<const uint4*>(p.x + at), here);
    for (int k = 0; k < 8; ++k) here[k] = gates::activated(here[k]);
    *reinterpret_cast<uint4*>(p.out + at) = pack_bf16(here);
}
