// A device that lives as long as its input: memory, kernels and products, by commands from standard input.
//
//   input:   u32 seed; u32 is_compared; then commands, each a u32 and
//     ALLOCATE  u64 bytes                      -> u64 address
//     WRITE     u64 address, u64 bytes, bytes
//     READ      u64 address, u64 bytes         -> bytes
//     LAUNCH    u32 name bytes, name, LaunchShape, u32 params bytes, params
//     MULTIPLY  Product
//     MULTIPLY_FP8  Fp8Product
//     COUNT                                    -> Work
// Addresses are those of this process. If results are compared, kernels run twice: with blocks and threads in order, and in
// a random order. A kernel whose blocks may communicate runs a third time, with stores that are visible as late as possible.
#pragma once

#include "emulator.h"

namespace emulator {

enum Command : u32 { ALLOCATE, WRITE, READ, LAUNCH, MULTIPLY, MULTIPLY_FP8, COUNT };

// The struct `Product` of device.rs.
struct Product {
    u64 left, right, out;
    u64 num_rows, num_out, num_in, left_stride, out_stride;
    u32 is_out_f32;
    float beta;
};

// The struct `Fp8Product` of device.rs.
struct Fp8Product {
    u64 left, right, out, left_scales, right_scales;
    u64 num_rows, num_out, num_in, scaling;
};

inline void read_exactly(void* to, size_t num_bytes) {
    if (num_bytes > 0 && fread(to, 1, num_bytes, stdin) != num_bytes) fail("the input ends early");
}

template <class T> inline T read_value() {
    T value;
    read_exactly(&value, sizeof value);
    return value;
}

inline void reply(const void* from, size_t num_bytes) {
    fwrite(from, 1, num_bytes, stdout);
    fflush(stdout);
}

using Copies = std::map<u8*, std::vector<u8>>;

// Each buffer is an allocation of its own, so that the sanitizer detects its ends. Aligned to 256 bytes, like
// cuMemAlloc.
struct Memory {
    Buffers buffers;
    // The buffers as they were when `save` was called.
    Copies saved;

    u8* allocate(size_t num_bytes) {
        void* memory = nullptr;
        if (posix_memalign(&memory, 256, num_bytes ? num_bytes : 1) != 0) fail("no memory");
        // NaN in every type.
        memset(memory, 0xff, num_bytes);
        buffers[static_cast<u8*>(memory)] = num_bytes;
        return static_cast<u8*>(memory);
    }

    // Most buffers are as they were at the call before, and are not copied again.
    void save() {
        for (auto& [data, num_bytes] : buffers)
            if (!is(data, saved[data])) saved[data].assign(data, data + num_bytes);
    }

    // Undoes all changes since `save`, and returns what they made.
    Copies undo() const {
        Copies changed;
        for (auto& [data, before] : saved) {
            if (is(data, before)) continue;
            changed[data].assign(data, data + before.size());
            std::copy(before.begin(), before.end(), data);
        }
        return changed;
    }

    // Whether `undo` would return this.
    bool has_changed_to(const Copies& changed) const {
        for (auto& [data, before] : saved) {
            auto found = changed.find(data);
            if (!is(data, found == changed.end() ? before : found->second)) return false;
        }
        return true;
    }

private:
    bool is(const u8* data, const std::vector<u8>& copy) const {
        if (copy.size() != buffers.at(const_cast<u8*>(data))) return false;
        return copy.empty() || memcmp(data, copy.data(), copy.size()) == 0;
    }
};

inline void launch(Memory& memory, u32 seed, bool is_compared) {
    std::string name(read_value<u32>(), ' ');
    read_exactly(name.data(), name.size());
    auto shape = read_value<LaunchShape>();
    u32 params_bytes = read_value<u32>();
    std::vector<u64> params((params_bytes + 7) / 8);
    read_exactly(params.data(), params_bytes);
    auto found = kernels().find(name);
    if (found == kernels().end()) fail("unknown kernel " + name);
    const Kernel& kernel = found->second;
    if (params_bytes != kernel.params_bytes) {
        fail(name + " takes " + std::to_string(kernel.params_bytes) + " bytes of parameters, not " +
             std::to_string(params_bytes));
    }
    if (shape.threads > kernel.max_threads) fail(name + " was compiled for fewer threads");
    auto call = [&] { kernel.call(params.data()); };
    if (!is_compared) return launch(name, shape, seed, call);
    memory.save();
    have_blocks_met = false;
    launch(name, shape, 0, call);
    auto changed = memory.undo();
    launch(name, shape, seed, call);
    if (!memory.has_changed_to(changed)) fail(name + ": the result depends on the order of blocks or threads");
    if (!have_blocks_met) return;
    memory.undo();
    Visibility late(memory.buffers);
    visibility = &late;
    launch(name, shape, seed, call);
    visibility = nullptr;
    late.end();
    if (!memory.has_changed_to(changed)) fail(name + ": a block reads what another one stored, without fences between them");
}

// `multiply` has checked whole rows with the sanitizer, so elements are not checked.
__attribute__((no_sanitize("address", "undefined"), optimize("O3"))) inline float
dot(const u16* a, const u16* b, size_t num_in) {
    float sum = 0.0f;
    for (size_t k = 0; k < num_in; ++k) {
        u32 left = u32(a[k]) << 16, right = u32(b[k]) << 16;
        float x, y;
        __builtin_memcpy(&x, &left, 4);
        __builtin_memcpy(&y, &right, 4);
        sum += x * y;
    }
    return sum;
}

inline void check(const void* at, size_t num_bytes) {
    if (__asan_region_is_poisoned(const_cast<void*>(at), num_bytes)) fail("a product leaves its buffers");
}

// out = left right^T + beta out: [rows][in] x [out][in]^T, with sums in f32.
inline void multiply(const Product& p) {
    // The alignment that cuBLASLt's fast kernels need for every row.
    if (p.left % 16 || p.right % 16 || p.out % 16 || p.num_in % 8 || p.left_stride % 8) {
        fail("rows of a product are not aligned to 16 bytes");
    }
    auto left = reinterpret_cast<const u16*>(p.left), right = reinterpret_cast<const u16*>(p.right);
    check(right, p.num_out * p.num_in * 2);
    for (u64 row = 0; row < p.num_rows; ++row) {
        const u16* from = left + row * p.left_stride;
        check(from, p.num_in * 2);
        u8* to = reinterpret_cast<u8*>(p.out) + row * p.out_stride * (p.is_out_f32 ? 4 : 2);
        check(to, p.num_out * (p.is_out_f32 ? 4 : 2));
        for (u64 column = 0; column < p.num_out; ++column) {
            float sum = dot(from, right + column * p.num_in, p.num_in);
            if (p.is_out_f32) {
                float* out = reinterpret_cast<float*>(to) + column;
                *out = p.beta == 0.0f ? sum : sum + p.beta * *out;
            } else {
                u16* out = reinterpret_cast<u16*>(to) + column;
                if (p.beta != 0.0f) sum += p.beta * bf16(*out);
                *out = u16(pack_bf16(sum, 0.0f));
            }
        }
    }
}

// E4M3 by its definition.
inline float of_e4m3(u8 code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return NAN;
    float size = exponent == 0 ? ldexpf(float(mantissa), -9) : ldexpf(float(8 + mantissa), exponent - 10);
    return code & 0x80 ? -size : size;
}

// out = left right^T of E4M3 numbers, each times its scale if there are scales.
inline void multiply_fp8(const Fp8Product& p) {
    if (p.left % 16 || p.right % 16 || p.out % 16 || p.num_in % 16 || p.num_out % 16) {
        fail("rows of an fp8 product are not aligned to 16 bytes");
    }
    auto left = reinterpret_cast<const u8*>(p.left), right = reinterpret_cast<const u8*>(p.right);
    auto out = reinterpret_cast<u16*>(p.out);
    auto left_scales = reinterpret_cast<const float*>(p.left_scales);
    auto right_scales = reinterpret_cast<const float*>(p.right_scales);
    bool are_blocks = p.scaling == 2;
    if (are_blocks && (p.num_in % 128 || p.num_rows % 4)) fail("the sizes of an fp8 product are not multiples of its blocks");
    // The scales of the sum so far.
    auto scale = [&](u64 row, u64 column, u64 k) {
        if (p.scaling == 0) return 1.0f;
        if (!are_blocks) return left_scales[row] * right_scales[column];
        u64 num_groups = (p.num_in / 128 + 3) / 4 * 4;
        return left_scales[k / 128 * p.num_rows + row] * right_scales[column / 128 * num_groups + k / 128];
    };
    u64 group = are_blocks ? 128 : p.num_in;
    float values[256];
    for (u32 code = 0; code < 256; ++code) values[code] = of_e4m3(u8(code));
    for (u64 row = 0; row < p.num_rows; ++row) {
        for (u64 column = 0; column < p.num_out; ++column) {
            float sum = 0.0f;
            for (u64 first = 0; first < p.num_in; first += group) {
                float part = 0.0f;
                for (u64 k = first; k < first + group; ++k) {
                    part += values[left[row * p.num_in + k]] * values[right[column * p.num_in + k]];
                }
                sum += part * scale(row, column, first);
            }
            out[row * p.num_out + column] = u16(pack_bf16(sum, 0.0f));
        }
    }
}

inline void serve() {
    u32 seed = read_value<u32>();
    bool is_compared = read_value<u32>();
    Memory memory;
    global_memory = &memory.buffers;
    u32 command;
    while (fread(&command, sizeof command, 1, stdin) == 1) {
        switch (command) {
        case ALLOCATE: {
            u8* at = memory.allocate(read_value<u64>());
            reply(&at, sizeof at);
            break;
        }
        case WRITE: {
            u8* to = read_value<u8*>();
            read_exactly(to, read_value<u64>());
            break;
        }
        case READ: {
            u8* from = read_value<u8*>();
            reply(from, read_value<u64>());
            break;
        }
        case LAUNCH: launch(memory, seed, is_compared); break;
        case MULTIPLY: multiply(read_value<Product>()); break;
        case MULTIPLY_FP8: multiply_fp8(read_value<Fp8Product>()); break;
        case COUNT: reply(&work, sizeof work); break;
        default: fail("unknown command " + std::to_string(command));
        }
    }
}

// What the sanitizer's report cannot know about an access: the kernel, and the copy that it comes too early for.
inline void explain_access(const void* at) {
    if (!block) return;
    std::string what = "a thread leaves its memory";
    if (Copy* copy = find_pending_copy(at)) {
        what = "shared memory is accessed while the copy of " + place_of(*copy) + " into it is pending";
    }
    fprintf(stderr, "emulator: %s%s\n", running_kernel().c_str(), what.c_str());
}

} // namespace emulator

// The sanitizer calls this before its report, which names the place of the access.
extern "C" void __asan_on_error() { emulator::explain_access(__asan_get_report_address()); }

int main() {
    emulator::serve();
    return 0;
}
