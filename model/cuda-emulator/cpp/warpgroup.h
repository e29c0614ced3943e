// Products of warpgroups, with the interface of kernels/warpgroup.cuh. They decode the same matrix descriptors as the
// hardware.
#pragma once
#include "emulator.h"

namespace warpgroup {

inline u64 matrix_of(const void* at, u32 panel_bytes) {
    u64 address = emulator::block->shared->address(at);
    // The swizzle is a function of the address.
    if (address % 1024 != 0) emulator::fail("a matrix is not aligned to 1024 bytes");
    if (address >= 1 << 18) emulator::fail("a matrix is beyond the reach of descriptors");
    return address >> 4 | u64(panel_bytes >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

inline void show_to_products() {
    auto& unshown = emulator::block->unshown[emulator::current->linear];
    for (void* at : unshown) emulator::show(at);
    unshown.clear();
}

// Products see the old 16 bytes until the thread shows the new ones.
inline void store_for_products(void* to, uint4 bytes) {
    memcpy(to, &bytes, 16);
    emulator::block->unshown[emulator::current->linear].push_back(to);
}

} // namespace warpgroup

namespace emulator {

// An element of a matrix with the 128-byte swizzle. `row` is in units of 128 bytes, `column` in units of two bytes.
inline float element(u64 matrix, u32 row, u32 column) {
    u32 panel_bytes = u32(matrix >> 16 & 0x3fff) << 4, atom_bytes = u32(matrix >> 32 & 0x3fff) << 4;
    u32 at = (u32(matrix & 0x3fff) << 4) + column / 64 * panel_bytes + column % 64 * 2 + row / 8 * atom_bytes + row % 8 * 128;
    at ^= (at >> 7 & 7) << 4;
    if (at + 2 > block->shown_to_products.size()) fail("a product reads beyond shared memory");
    u16 bits;
    memcpy(&bits, &block->shown_to_products[at], 2);
    return bf16(bits);
}

inline void multiply(const WarpgroupProduct& product) {
    u32 warp = current->linear / 32 % 4, lane = current->linear % 32;
    float left[2][16];
    for (u32 r = 0; r < 2; ++r)
        for (u32 k = 0; k < 16; ++k)
            left[r][k] = product.has_rows ? product.rows[r][k] : element(product.left, warp * 16 + lane / 4 + 8 * r, k);
    for (u32 n = 0; n < product.num_columns; ++n) {
        if (n % 8 / 2 != lane % 4) continue;
        float right[16];
        for (u32 k = 0; k < 16; ++k)
            right[k] = product.is_right_transposed ? element(product.right, k, n) : element(product.right, n, k);
        for (u32 r = 0; r < 2; ++r) {
            float& sum = product.sums[n / 8][2 * r + n % 2];
            if (!product.is_added) sum = 0.0f;
            for (u32 k = 0; k < 16; ++k) sum += left[r][k] * right[k];
        }
    }
}

// Comes to a barrier. Returns the generation of the phase that this thread belongs to.
inline u64 come_to(u32 number, u32 num_threads) {
    if (number == 0 || number >= block->numbered.size() || num_threads % 32 != 0) fail("a barrier that does not exist");
    NumberedBarrier& barrier = block->numbered[number];
    u64 generation = barrier.generation;
    if (barrier.come.empty()) barrier.expected = num_threads;
    std::string name = "barrier " + std::to_string(number);
    if (barrier.expected != num_threads) fail(name + " is for different numbers of threads in one phase");
    if (!barrier.come.insert(current->linear).second) fail("a thread comes twice to a phase of " + name);
    block->num_events += 1;
    if (barrier.come.size() == num_threads) barrier.come.clear(), barrier.generation += 1;
    return generation;
}

inline void begin(const WarpgroupProduct& product) {
    if (!block->may_multiply[current->linear]) fail("a product begins without begin_products since the last wait");
    // All four warps take part.
    arrive(block->warpgroups[current->linear / 128], 128);
    auto& groups = block->products[current->linear];
    if (groups.empty()) groups.emplace_back();
    if (block->are_products_late) {
        groups.back().push_back(product);
    } else {
        multiply(product);
    }
}

} // namespace emulator

namespace warpgroup {

inline void arrive_at_barrier(u32 number, u32 num_threads) { emulator::come_to(number, num_threads); }

inline void sync_at_barrier(u32 number, u32 num_threads) {
    u64 generation = emulator::come_to(number, num_threads);
    emulator::wait_for_end_of(emulator::block->numbered[number].generation, generation);
}

template <int num> inline void give_registers() {}
template <int num> inline void take_registers() {}

inline void begin_products() { emulator::block->may_multiply[emulator::current->linear] = true; }
template <class T> inline void hold(T&) {}

inline void end_product_group() {
    auto& groups = emulator::block->products[emulator::current->linear];
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}

// The registers of products may be touched from here on, which takes another `begin_products`.
template <int num_groups> inline void await_products() {
    emulator::block->may_multiply[emulator::current->linear] = false;
    auto& groups = emulator::block->products[emulator::current->linear];
    while (groups.size() > size_t(num_groups) + 1) {
        for (auto& product : groups.front()) emulator::multiply(product);
        groups.erase(groups.begin());
    }
}

template <bool is_added, int N> inline void multiply(float (&d)[N][4], u64 a, u64 b) {
    emulator::begin({d, 8 * N, is_added, a, {}, false, b, false});
}

inline void add_product(float (&d)[32][4], u64 a, u64 b) { multiply<true>(d, a, b); }

template <int N> inline void add_product(float (&d)[N][4], const u32 (&a)[4], u64 b) {
    emulator::WarpgroupProduct product = {d, 8 * N, true, 0, {}, true, b, true};
    auto& shown = emulator::block->shown;
    u32 linear = emulator::current->linear, first = linear - linear % 4;
    for (int i = 0; i < 4; ++i) shown[linear][i] = a[i];
    emulator::sync_warp();
    for (u32 r = 0; r < 2; ++r)
        for (u32 k = 0; k < 16; ++k)
            product.rows[r][k] = emulator::bf16(shown[first + k % 8 / 2][r + 2 * (k / 8)] >> k % 2 * 16 & 0xffff);
    emulator::sync_warp();
    emulator::begin(product);
}

} // namespace warpgroup
