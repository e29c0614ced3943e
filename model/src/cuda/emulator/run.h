// Reads buffers and launches from standard input, runs them, and writes the buffers to standard output.
//
//   input:  u32 seed; u32 num_buffers, each: u64 bytes, the bytes;
//           u32 num_launches, each: u32 name bytes, name, LaunchShape, u32 params bytes, params
//   An address in parameters is 0xba7 << 52 | buffer_idx << 40 | offset.
#pragma once

#include "emulator.h"

namespace emulator {

inline void read_exactly(void* to, size_t num_bytes) {
    if (fread(to, 1, num_bytes, stdin) != num_bytes) fail("the input ends early");
}

inline u32 read_u32() {
    u32 value;
    read_exactly(&value, 4);
    return value;
}

} // namespace emulator

int main() {
    using namespace emulator;
    u32 seed = read_u32();
    // Each an allocation of its own, so that the sanitizer sees its ends; 256 bytes aligned, as cuMemAlloc's are.
    std::vector<std::pair<u8*, size_t>> buffers(read_u32());
    for (auto& [data, num_bytes] : buffers) {
        u64 size;
        read_exactly(&size, 8);
        num_bytes = size;
        void* memory = nullptr;
        if (posix_memalign(&memory, 256, num_bytes ? num_bytes : 1) != 0) fail("no memory");
        data = static_cast<u8*>(memory);
        read_exactly(data, num_bytes);
    }
    for (u32 num_launches = read_u32(); num_launches > 0; --num_launches) {
        std::string name(read_u32(), ' ');
        read_exactly(name.data(), name.size());
        LaunchShape shape;
        read_exactly(&shape, sizeof shape);
        u32 params_bytes = read_u32();
        std::vector<u64> params((params_bytes + 7) / 8);
        auto found = kernels().find(name);
        if (found == kernels().end()) fail("no kernel " + name);
        const Kernel& kernel = found->second;
        if (params_bytes != kernel.params_bytes) {
            fail(name + " takes " + std::to_string(kernel.params_bytes) + " bytes of parameters, not " +
                 std::to_string(params_bytes));
        }
        if (shape.threads > kernel.max_threads) fail(name + " was compiled for fewer threads");
        read_exactly(params.data(), kernel.params_bytes);
        for (u64& word : params) {
            if (word >> 52 != 0xba7) continue;
            size_t idx = word >> 40 & 0xfff, offset = word & ((u64(1) << 40) - 1);
            if (idx >= buffers.size() || offset > buffers[idx].second) fail("an address outside of all buffers");
            word = reinterpret_cast<u64>(buffers[idx].first + offset);
        }
        launch(shape, seed, [&] { kernel.call(params.data()); });
    }
    for (auto& [data, num_bytes] : buffers) fwrite(data, 1, num_bytes, stdout);
    return 0;
}
