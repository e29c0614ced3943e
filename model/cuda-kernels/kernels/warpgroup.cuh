// Products of a warpgroup, four adjacent warps, on Hopper's tensor cores (`wgmma`). They read shared memory
// asynchronously, while the threads continue. Only sm_90a has them.
//
// A matrix in shared memory consists of panels of 64 columns of bf16. A row of a panel has 128 bytes. Eight rows are
// an atom of 1024 bytes, aligned to 1024. Piece i (16 bytes) of row r is stored at place i ^ r % 8 (the 128-byte
// swizzle), so that the pieces of one column in eight rows are in different banks. The layout of both sides: PTX ISA,
// "Asynchronous Warpgroup Level Matrix Shared Memory Layout".
//
// The order of calls: wait for the copies, or `store_for_products`; `show_to_products` by each thread that copied or
// stored, and a barrier; `begin_products` before the first product of a group, `end_product_group` after the last, and `await_products`.
// Only then are the sums valid. Between the first and the last of these calls the sums, the registers of the left
// side and the shared memory must not be touched.
#pragma once
#include "common.cuh"

namespace warpgroup {

constexpr int THREADS = 4 * WARP;
// Columns of a panel, and bytes of its rows.
constexpr int PANEL = 64, PANEL_ROW = 2 * PANEL;
constexpr int ATOM_BYTES = 8 * PANEL_ROW;

// Bytes to piece `piece` (16 bytes) of a row, in a matrix of `num_rows` rows.
template <int rows> __device__ __forceinline__ u32 piece_at(u32 row, u32 piece) {
    return piece / 8 * (rows * PANEL_ROW) + row * PANEL_ROW + ((piece ^ row) % 8) * 16;
}

} // namespace warpgroup

#ifdef BATON_EMULATED
#include "warpgroup.h"
#else

namespace warpgroup {

// The descriptor of a matrix whose panels are `panel_bytes` apart. Adding 1 to it moves it by 16 bytes.
__device__ __forceinline__ u64 matrix_of(const void* at, u32 panel_bytes) {
    u64 address = __cvta_generic_to_shared(at);
    return (address & 0x3ffff) >> 4 | u64(panel_bytes >> 4) << 16 | u64(ATOM_BYTES >> 4) << 32 | u64(1) << 62;
}

// Stores 16 bytes of a matrix.
__device__ __forceinline__ void store_for_products(void* to, uint4 bytes) { *static_cast<uint4*>(to) = bytes; }

__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_product_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the newest `num_groups` groups are in flight.
template <int num_groups> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(num_groups) : "memory");
}

// A barrier of some warps, by number: 1 to 15, as __syncthreads is 0. `num_threads` come to each phase; those that
// arrive do not wait, those that sync wait for all. What threads did before they came is visible to those that waited.
__device__ __forceinline__ void arrive_at_barrier(u32 number, u32 num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

__device__ __forceinline__ void sync_at_barrier(u32 number, u32 num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

// Gives registers of this warpgroup to the others, or takes those that others gave. `num` for each thread.
template <int num> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(num));
}

template <int num> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(num));
}

// Marks registers as changed here: the compiler does not know about products in flight.
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
#define BATON_SUMS_128(d)                                                                                              \
    BATON_SUMS_64(d), BATON_SUMS_16(d, 16), BATON_SUMS_16(d, 20), BATON_SUMS_16(d, 24), BATON_SUMS_16(d, 28)
#define BATON_NAMES_128                                                                                                \
    BATON_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
                   "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106," \
                   "%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d = a b^T, or d += a b^T. a is 64 x 16, b is 128 x 16, both row by row in shared memory. d is 64 x 128: a warp has
// 16 rows, and eight columns at a time in the layout of `mma_bf16`.
template <bool is_added> __device__ __forceinline__ void multiply(float (&d)[16][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" BATON_NAMES_64 "}, %64, %65, %66, 1, 1, 0, 0;"
                 : BATON_SUMS_64(d)
                 : "l"(a), "l"(b), "n"(int(is_added)));
}

// d += a b^T. Like `multiply`, with b of 256 x 16.
__device__ __forceinline__ void add_product(float (&d)[32][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" BATON_NAMES_128 "}, %128, %129, 1, 1, 1, 0, 0;"
                 : BATON_SUMS_128(d)
                 : "l"(a), "l"(b));
}

// d += a b. a is 64 x 16; a warp has 16 of its rows in the layout of `mma_bf16`. b is 16 rows in shared memory.
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
