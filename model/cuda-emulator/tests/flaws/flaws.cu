// Kernels with one flaw each, which the emulator must find.
#include "warpgroup.cuh"

struct Flawed {
    // 1024 bytes that are read, or written.
    u8* memory;
};

// The end of a pipeline: copies ahead are still in flight where their memory gets another use.
KERNEL(writes_over_pending_copies, Flawed, 32) {
    DYNAMIC_SHARED(shared);
    for (u32 stage = 0; stage < 2; ++stage) {
        copy_async(shared + (stage * 32 + threadIdx.x) * 16, p.memory + threadIdx.x * 16, true);
        end_copy_group();
    }
    await_copies<1>();
    __syncthreads();
    reinterpret_cast<u32*>(shared + 512)[threadIdx.x] = threadIdx.x;
}

KERNEL(reads_pending_copies, Flawed, 32) {
    DYNAMIC_SHARED(shared);
    copy_async(shared + threadIdx.x * 16, p.memory + threadIdx.x * 16, true);
    end_copy_group();
    __syncthreads();
    p.memory[threadIdx.x] = shared[threadIdx.x * 16];
}

KERNEL(copies_over_pending_copies, Flawed, 32) {
    DYNAMIC_SHARED(shared);
    for (u32 i = 0; i < 2; ++i) copy_async(shared + threadIdx.x * 16, p.memory + threadIdx.x * 16, true);
    end_copy_group();
    await_copies<0>();
}

// A block may end before its copies.
KERNEL(leaves_copies_pending, Flawed, 32) {
    DYNAMIC_SHARED(shared);
    copy_async(shared + threadIdx.x * 16, p.memory + threadIdx.x * 16, true);
}

KERNEL(leaves_shared_memory, Flawed, 32) {
    DYNAMIC_SHARED(shared);
    shared[1024 - 31 + threadIdx.x] = 1;
}

// Its tiles need an alignment that it does not declare.
KERNEL(misaligns_tiles, Flawed, 128) {
    DYNAMIC_SHARED(shared);
    p.memory[threadIdx.x] = u8(warpgroup::matrix_of(shared, 1024));
}

// Half of the threads that the barrier is for.
KERNEL(ends_in_a_phase, Flawed, 32) { warpgroup::arrive_at_barrier(1, 64); }

KERNEL(comes_twice_to_a_phase, Flawed, 32) {
    for (u32 i = 0; i < 2; ++i) warpgroup::arrive_at_barrier(1, 64);
}

KERNEL(depends_on_the_order_of_blocks, Flawed, 32) {
    if (threadIdx.x == 0) p.memory[atomicAdd(reinterpret_cast<u32*>(p.memory + 512), 1u)] = u8(blockIdx.x);
}

// The end of a product in which nothing says that its registers are ready.
KERNEL(multiplies_without_begin, Flawed, 128) {
    DYNAMIC_SHARED_ALIGNED(shared, 1024);
    float sums[16][4] = {};
    u64 matrix = warpgroup::matrix_of(shared, 1024);
    warpgroup::begin_products();
    for (u32 i = 0; i < 2; ++i) {
        warpgroup::multiply<true>(sums, matrix, matrix);
        warpgroup::end_product_group();
        warpgroup::await_products<0>();
    }
}

// The last block to finish adds what all blocks have stored, as in attention_decode.cu.
enum Fences { NONE = 0, BEFORE_COUNT = 1, AFTER_COUNT = 2, BEFORE_BARRIER = 4 };

template <int fences> __device__ __forceinline__ void add_in_last_block(const Flawed& p) {
    u32* all = reinterpret_cast<u32*>(p.memory);
    __shared__ u32 is_last;
    all[blockIdx.x * 32 + threadIdx.x] = blockIdx.x + threadIdx.x + 1;
    if (fences & BEFORE_BARRIER && threadIdx.x == 0) __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        if (fences & BEFORE_COUNT) __threadfence();
        is_last = atomicAdd(all + 128, 1u) == gridDim.x - 1;
        if (fences & AFTER_COUNT) __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    u32 sum = 0;
    for (u32 i = 0; i < gridDim.x; ++i) sum += all[i * 32 + threadIdx.x];
    all[160 + threadIdx.x] = sum;
    if (threadIdx.x == 0) all[128] = 0;
}

KERNEL(adds_with_fences, Flawed, 32) { add_in_last_block<BEFORE_COUNT | AFTER_COUNT>(p); }

KERNEL(adds_without_fences, Flawed, 32) { add_in_last_block<NONE>(p); }

KERNEL(adds_without_fence_before_count, Flawed, 32) { add_in_last_block<AFTER_COUNT>(p); }

KERNEL(adds_without_fence_after_count, Flawed, 32) { add_in_last_block<BEFORE_COUNT>(p); }

// The fence comes before the stores of the other threads.
KERNEL(adds_with_fence_before_barrier, Flawed, 32) { add_in_last_block<BEFORE_BARRIER | AFTER_COUNT>(p); }

// The kernel after it may start while the kernel ahead of it still runs.
EARLY_KERNEL(ends_before_its_wait, Flawed, 32) {
    if (threadIdx.x > 7) return;
    begin_kernel();
    p.memory[threadIdx.x] = 1;
}
