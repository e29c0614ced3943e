// Products by a warpgroup, four neighbouring warps, on Hopper's tensor cores (`wgmma`): what is in shared memory they read by
// themselves, while the threads go on. Only sm_90a has them.
//
// A matrix in shared memory is panels of 64 columns of bf16. A row of a panel is 128 bytes, eight rows are an atom of 1024,
// which is aligned to that; of row r, piece i (16 bytes) lies at place i ^ r % 8 (the swizzle of 128 bytes), so that eight
// rows' pieces of a column are in different banks. How both sides' elements are found in it: PTX ISA, "Asynchronous Warpgroup
// Level Matrix Shared Memory Layout".
//
// The order of things: copies are waited for, `show_to_products` by whoever copied, a barrier; `begin_products` before the
// first of some products, `end_product_group` behind them, `await_products`, and only then are the sums there, which were
// not to be touched since; nor were registers of the left side, or shared memory.
#pragma once
#include "common.cuh"

namespace warpgroup {

constexpr int THREADS = 4 * WARP;
// Columns of a panel, and bytes of its rows.
constexpr int PANEL = 64, PANEL_ROW = 2 * PANEL;
constexpr int ATOM_BYTES = 8 * PANEL_ROW;

// Bytes to piece `piece` (16 bytes) of a row, in a matrix of so many rows.
template <int rows> __device__ __forceinline__ u32 piece_at(u32 row, u32 piece) {
    return piece / 8 * (rows * PANEL_ROW) + row * PANEL_ROW + ((piece ^ row) % 8) * 16;
}

} // namespace warpgroup

#ifdef BATON_EMULATED
#include "warpgroup.h"
#else

namespace warpgroup {

// How a product finds a matrix, of whose panels the next is `panel_bytes` further. Adding 1 to it is 16 bytes.
__device__ __forceinline__ u64 matrix_of(const void* at, u32 panel_bytes) {
    u64 address = __cvta_generic_to_shared(at);
    return (address & 0x3ffff) >> 4 | u64(panel_bytes >> 4) << 16 | u64(ATOM_BYTES >> 4) << 32 | u64(1) << 62;
}

__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_product_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the newest `num_groups` groups are under way.
template <int num_groups> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(num_groups) : "memory");
}

// Neither looked at before here nor given up before: the compiler knows nothing of products that are under way.
template <int N> __device__ __forceinline__ void hold(float (&d)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

template <int N> __device__ __forceinline__ void hold(u32 (&a)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
}

#define BATON_SUMS_4(d) "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3])
#define BATON_SUMS_16(d, n) BATON_SUMS_4(d[n]), BATON_SUMS_4(d[n + 1]), BATON_SUMS_4(d[n + 2]), BATON_SUMS_4(d[n + 3])
#define BATON_SUMS_32(d) BATON_SUMS_16(d, 0), BATON_SUMS_16(d, 4)
#define BATON_SUMS_64(d) BATON_SUMS_32(d), BATON_SUMS_16(d, 8), BATON_SUMS_16(d, 12)
#define BATON_NAMES_32                                                                                                 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31"
#define BATON_NAMES_64                                                                                                 \
    BATON_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
                   "%56,%57,%58,%59,%60,%61,%62,%63"

// d = a b^T, or d += a b^T: a is 64 x 16, b is 128 x 16, rows of both as they lie. Of d, 64 x 128, a warp has 16 rows, and
// of each eight columns what `mma_bf16` gives.
template <bool is_added> __device__ __forceinline__ void multiply(float (&d)[16][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" BATON_NAMES_64 "}, %64, %65, %66, 1, 1, 0, 0;"
                 : BATON_SUMS_64(d)
                 : "l"(a), "l"(b), "n"(int(is_added)));
}

// d += a b: a is 64 x 16, of which a warp has 16 rows as `mma_bf16` takes them; b is 16 rows as they lie.
__device__ __forceinline__ void add_product(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" BATON_NAMES_32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : BATON_SUMS_32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void add_product(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" BATON_NAMES_64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : BATON_SUMS_64(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

} // namespace warpgroup

#endif
