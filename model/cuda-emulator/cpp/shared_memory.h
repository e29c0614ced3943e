// The dynamic shared memory of a launch's blocks, one after the other. The address sanitizer guards both ends.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

// Nothing without the sanitizer.
#include <sanitizer/asan_interface.h>

namespace emulator {

[[noreturn]] void fail(const std::string& what);

class SharedMemory {
public:
    // The largest alignment that a kernel can declare.
    static constexpr size_t MAX_ALIGNMENT = 1024;

    explicit SharedMemory(size_t num_bytes) : num_bytes(num_bytes) {
        size_t room = (num_bytes + 3 * MAX_ALIGNMENT - 1) / (2 * MAX_ALIGNMENT) * (2 * MAX_ALIGNMENT);
        if (posix_memalign(&memory, 2 * MAX_ALIGNMENT, room) != 0) fail("no memory for a block");
        window_bytes = room;
    }
    ~SharedMemory() {
        ASAN_UNPOISON_MEMORY_REGION(memory, window_bytes);
        free(memory);
    }
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    // As a block finds it: undeclared, and NaN in every type.
    void clear() {
        ASAN_UNPOISON_MEMORY_REGION(memory, window_bytes);
        declared = 0;
        memset(memory, 0xff, window_bytes);
    }

    // The kernel's memory. Its address has the alignment that the kernel declares and no larger one.
    uint8_t* aligned(size_t alignment) {
        if (declared == 0) {
            declared = alignment;
            ASAN_POISON_MEMORY_REGION(memory, alignment);
            ASAN_POISON_MEMORY_REGION(begin() + alignment + num_bytes, window_bytes - alignment - num_bytes);
        }
        if (alignment != declared) fail("shared memory is declared twice, with different alignments");
        return begin() + alignment;
    }

    // The address that the hardware would use, of a pointer into this memory.
    size_t address(const void* at) const {
        size_t offset = static_cast<const uint8_t*>(at) - begin();
        if (offset >= window_bytes) fail("an address is not in dynamic shared memory");
        return offset;
    }

    // Whether `num_bytes` bytes at `at` are in this memory.
    bool holds(const void* at, size_t num_bytes) const {
        size_t offset = static_cast<const uint8_t*>(at) - begin();
        return offset < window_bytes && offset + num_bytes <= window_bytes;
    }

    // Addresses are smaller than this.
    size_t num_addresses() const { return window_bytes; }

private:
    uint8_t* begin() const { return static_cast<uint8_t*>(memory); }

    void* memory = nullptr;
    size_t num_bytes, window_bytes;
    // 0: not declared yet.
    size_t declared = 0;
};

} // namespace emulator
