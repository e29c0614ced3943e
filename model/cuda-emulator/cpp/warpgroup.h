// Products of warpgroups, with the interface of kernels/warpgroup.cuh. They decode the same matrix descriptors as the
// hardware.
#pragma once
#include "emulator.h"

namespace warpgroup {

inline u64 matrix_of(const void* at, u32 panel_bytes) {
    u64 offset = static_cast<const u8*>(at) - static_cast<const u8*>(emulator::dynamic_shared());
    if (offset % 128 != 0 || offset >= 1 << 18) emulator::fail("a matrix is misaligned or beyond the reach of descriptors");
    return offset >> 4 | u64(panel_bytes >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

inline void show_to_products() {
    auto& copied = emulator::block->copied[emulator::current->linear];
    for (void* at : copied) emulator::show(at);
    copied.clear();
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
    for (u32 n = 0; n < product.num_columns; ++n) {
        if (n % 8 / 2 != lane % 4) continue;
        float right[16];
        for (u32 k = 0; k < 16; ++k)
            right[k] = product.is_right_transposed ? element(product.right, k, n) : element(product.right, n, k);
        for (u32 r = 0; r < 2; ++r) {
            float& sum = product.sums[n / 8][2 * r + n % 2];
            if (!product.is_added) sum = 0.0f;
            for (u32 k = 0; k < 16; ++k) {
                u32 row = warp * 16 + lane / 4 + 8 * r;
                sum += (product.has_rows ? product.rows[r][k] : element(product.left, row, k)) * right[k];
            }
        }
    }
}

inline void begin(const WarpgroupProduct& product) {
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

inline void begin_products() {}
template <class T> inline void hold(T&) {}

inline void end_product_group() {
    auto& groups = emulator::block->products[emulator::current->linear];
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}

template <int num_groups> inline void await_products() {
    auto& groups = emulator::block->products[emulator::current->linear];
    while (groups.size() > size_t(num_groups) + 1) {
        for (auto& product : groups.front()) emulator::multiply(product);
        groups.erase(groups.begin());
    }
}

template <bool is_added, int N> inline void multiply(float (&d)[N][4], u64 a, u64 b) {
    emulator::begin({d, 8 * N, is_added, a, {}, false, b, false});
}

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
