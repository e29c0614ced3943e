// When stores to global memory become visible to other blocks of a launch: as late as the hardware may do it. What a block
// stored, then a fence, then an atomic operation, is visible to a block that has an atomic operation later, and then a
// fence. Without them a block sees the memory from before the launch. All stores are visible after the launch, and atomic
// operations at once.
//
// A fence of one thread counts for all stores of its block so far: barriers order them, and a thread that comes later
// than it should is later than the fence in some order of threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

namespace emulator {

// Buffers of global memory, by address.
using Buffers = std::map<uint8_t*, size_t>;

// The buffer that holds an address.
inline const std::pair<uint8_t* const, size_t>* find_buffer(const Buffers& buffers, const void* at) {
    auto* wanted = static_cast<uint8_t*>(const_cast<void*>(at));
    auto next = buffers.upper_bound(wanted);
    if (next == buffers.begin()) return nullptr;
    auto found = std::prev(next);
    return wanted < found->first + found->second ? &*found : nullptr;
}

class Visibility {
public:
    explicit Visibility(const Buffers& buffers) : buffers(buffers) {
        for (auto& [data, num_bytes] : buffers) {
            std::vector<uint8_t> now(data, data + num_bytes);
            contents[data] = {now, now, now};
        }
    }

    // The running block has ended.
    void end_block() {
        note_stores();
        // The next block sees none of this.
        for (auto* stores : {&own, &released}) {
            for (auto& store : *stores) {
                auto& start = contents[store.data].start;
                std::vector<uint8_t> bytes(start.begin() + store.offset, start.begin() + store.offset + store.bytes.size());
                show({store.data, store.offset, bytes});
            }
        }
        own.clear();
        num_fenced = num_released = num_acquired = 0;
    }

    // A thread of the running block passes a fence.
    void fence() {
        note_stores();
        num_fenced = own.size();
        for (size_t i = 0; i < num_acquired; ++i) show(released[i]);
        // Newer than those of the blocks before.
        for (auto& store : own) show(store);
    }

    // An atomic operation has changed these bytes.
    void note_atomic(const void* at, size_t num_bytes) {
        auto* found = find_buffer(buffers, at);
        if (!found) return;
        size_t offset = static_cast<const uint8_t*>(at) - found->first;
        Contents& all = contents[found->first];
        for (auto* copy : {&all.start, &all.seen, &all.last}) memcpy(copy->data() + offset, at, num_bytes);
        released.insert(released.end(), own.begin() + num_released, own.begin() + num_fenced);
        num_released = num_fenced;
        num_acquired = released.size();
    }

    // The launch has ended.
    void end() const {
        for (auto& [data, all] : contents) memcpy(data, all.last.data(), all.last.size());
    }

private:
    struct Store {
        uint8_t* data;
        size_t offset;
        std::vector<uint8_t> bytes;
    };
    struct Contents {
        // What a block sees that has passed no fence, what the running block saw when its stores were noted, and what the
        // launch leaves.
        std::vector<uint8_t> start, seen, last;
    };

    void show(const Store& store) {
        memcpy(store.data + store.offset, store.bytes.data(), store.bytes.size());
        memcpy(contents[store.data].seen.data() + store.offset, store.bytes.data(), store.bytes.size());
    }

    // Adds what has changed since the last call to the block's own stores.
    __attribute__((no_sanitize("address", "undefined"))) void note_stores() {
        constexpr size_t PAGE = 1024;
        for (auto& [data, num_bytes] : buffers) {
            Contents& all = contents[data];
            for (size_t page = 0; page < num_bytes; page += PAGE) {
                size_t end = page + PAGE < num_bytes ? page + PAGE : num_bytes;
                if (memcmp(data + page, all.seen.data() + page, end - page) == 0) continue;
                for (size_t from = page; from < end; ++from) {
                    size_t to = from;
                    while (to < end && data[to] != all.seen[to]) ++to;
                    if (to == from) continue;
                    own.push_back({data, from, std::vector<uint8_t>(data + from, data + to)});
                    memcpy(all.seen.data() + from, data + from, to - from);
                    memcpy(all.last.data() + from, data + from, to - from);
                    from = to;
                }
            }
        }
    }

    const Buffers& buffers;
    std::map<uint8_t*, Contents> contents;
    // Stores of the running block in their order, and those stores of all blocks that a fence and an atomic operation have
    // followed.
    std::vector<Store> own, released;
    // How many of the block's own a fence has followed, how many of those were released; and how many of all that were
    // released are visible to the block after its next fence. Always the first ones.
    size_t num_fenced = 0, num_released = 0, num_acquired = 0;
};

// `nullptr`: stores are visible at once.
inline Visibility* visibility = nullptr;

// Global memory, where it is known.
inline const Buffers* global_memory = nullptr;

// Whether a kernel has had a fence, or an atomic operation in global memory.
inline bool have_blocks_met = false;

inline void note_fence() {
    have_blocks_met = true;
    if (visibility) visibility->fence();
}

inline void note_atomic(const void* at, size_t num_bytes) {
    have_blocks_met |= global_memory && find_buffer(*global_memory, at);
    if (visibility) visibility->note_atomic(at, num_bytes);
}

} // namespace emulator
