// Appended to a kernel file that was compiled for processors: the functions that the fake driver calls.
#pragma once
#include "emulator.h"

#define API extern "C" __attribute__((visibility("default")))

API const void* fake_find(const char* name) {
    auto found = emulator::kernels().find(name);
    return found == emulator::kernels().end() ? nullptr : &found->second;
}
API u32 fake_params_bytes(const void* kernel) { return static_cast<const emulator::Kernel*>(kernel)->params_bytes; }
API u32 fake_max_threads(const void* kernel) { return static_cast<const emulator::Kernel*>(kernel)->max_threads; }
API void fake_launch(const void* kernel, const u32* shape, const void* params) {
    static u32 seed = 0;
    emulator::LaunchShape launched = {{shape[0], shape[1], shape[2]}, shape[3], shape[4]};
    auto called = static_cast<const emulator::Kernel*>(kernel);
    emulator::launch(called->name, launched, ++seed, [&] { called->call(params); });
}
