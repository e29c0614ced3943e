// Asynchronous copies to shared memory. A copy happens when its thread waits for it, or else at the end of the block,
// which is as late as the hardware may do it. Until then its target holds poison, and the address sanitizer reports
// every access to it. `explain_access` (run.h) then names the kernel and the copy.
#pragma once

#include "emulator.h"

namespace emulator {

// The copy into this address that has not happened yet.
inline Copy* find_pending_copy(const void* at) {
    auto found = block->pending_copies.find(reinterpret_cast<uintptr_t>(at) / 16);
    return found == block->pending_copies.end() ? nullptr : &found->second;
}

// "copy.cu:12 by thread 3"
inline std::string place_of(const Copy& copy) {
    const char* name = strrchr(copy.file, '/');
    return std::string(name ? name + 1 : copy.file) + ":" + std::to_string(copy.line) + " by thread " +
           std::to_string(copy.thread);
}

// 16 bytes of dynamic shared memory, made visible to products, unless a newer copy to them is pending.
inline void show(const void* at) {
    if (find_pending_copy(at)) return;
    if (block->shared->holds(at, 16)) memcpy(&block->shown_to_products[block->shared->address(at)], at, 16);
}

inline void begin_copy(const Copy& copy) {
    if (reinterpret_cast<uintptr_t>(copy.to) % 16 != 0 || (copy.is_wanted && reinterpret_cast<uintptr_t>(copy.from) % 16 != 0)) {
        fail("an asynchronous copy is not aligned to 16 bytes");
    }
    if (Copy* other = find_pending_copy(copy.to)) {
        fail("the copy of " + place_of(copy) + " has the target of the pending copy of " + place_of(*other));
    }
    auto& groups = block->copies[copy.thread];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back(copy);
    memset(copy.to, 0xff, 16);
    show(copy.to);
    block->pending_copies[reinterpret_cast<uintptr_t>(copy.to) / 16] = copy;
    ASAN_POISON_MEMORY_REGION(copy.to, 16);
}

inline void finish(const Copy& copy) {
    ASAN_UNPOISON_MEMORY_REGION(copy.to, 16);
    block->pending_copies.erase(reinterpret_cast<uintptr_t>(copy.to) / 16);
    // Without the sanitizer, this finds most writes.
    const u8* bytes = static_cast<const u8*>(copy.to);
    if (std::any_of(bytes, bytes + 16, [](u8 byte) { return byte != 0xff; })) {
        fail("the target of the pending copy of " + place_of(copy) + " was written");
    }
    if (copy.is_wanted) {
        memcpy(copy.to, copy.from, 16);
    } else {
        memset(copy.to, 0, 16);
    }
    block->unshown[copy.thread].push_back(copy.to);
}

// Finishes the copies of a thread, except those of its newest groups and of the open group.
inline void finish_copies(u32 thread, size_t num_groups) {
    auto& groups = block->copies[thread];
    while (groups.size() > num_groups + 1) {
        for (auto& copy : groups.front()) finish(copy);
        groups.erase(groups.begin());
    }
}

// At the end of a block.
inline void finish_all_copies() {
    for (u32 thread = 0; thread < block->copies.size(); ++thread) {
        for (auto& group : block->copies[thread])
            for (auto& copy : group) finish(copy);
    }
}

} // namespace emulator

inline void copy_async(void* to, const void* from, bool is_wanted, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
    emulator::begin_copy({to, from, is_wanted, emulator::current->linear, file, line});
}
inline void copy_weights_async(void* to, const void* from, bool is_wanted, const char* file = __builtin_FILE(),
                               int line = __builtin_LINE()) {
    emulator::work.loaded_bytes += is_wanted ? 16 : 0;
    copy_async(to, from, is_wanted, file, line);
}
inline void end_copy_group() {
    auto& groups = emulator::block->copies[emulator::current->linear];
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}
template <int num_groups> inline void await_copies() {
    emulator::finish_copies(emulator::current->linear, num_groups);
}
