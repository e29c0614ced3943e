// A fake CUDA driver, libcuda.so.1, with fake devices: it runs the code that calls a driver on machines without one.
// A stream does its work as late as possible, when a thread waits for it, with kernels that g++ compiled (module.h).
// The fake is as strict as a driver: contexts of threads, operations that a capture forbids, limits of shared memory
// and grids, the sizes of allocations. The host cannot access the devices' memory while none of them works.
//
// Environment: FAKE_DEVICES, 1 by default, and FAKE_MEMORY_BYTES of each device. FAKE_CONNECTIONS: the queues of a device
// that the program must ask for before it starts the driver. FAKE_OVERLAP: 1, the default, if all launches
// must be programmatic, otherwise none may be.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

typedef uint32_t u32;
typedef uint64_t u64;

#define API extern "C" __attribute__((visibility("default"))) int

namespace {

enum Result : int {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_OUT_OF_RESOURCES = 701,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_WRONG_THREAD = 908,
};

// The limit of an H100.
constexpr int MULTIPROCESSORS = 132;
constexpr u32 SHARED_BYTES = 227 << 10;
// The limit of a block without an attribute.
constexpr u32 DEFAULT_SHARED_BYTES = 48 << 10;
constexpr u64 ALIGNMENT = 512;

[[noreturn]] void fail(const std::string& what) {
    fprintf(stderr, "fake driver: %s\n", what.c_str());
    abort();
}

// Protects everything below. Nothing here is destroyed at the end of the process: threads that a test has not waited for may
// still call.
std::recursive_mutex mutex;
bool is_initialized = false;
constexpr int MAX_DEVICES = 8;
// Primary contexts. Their addresses identify them.
int contexts[MAX_DEVICES];
thread_local int* current = nullptr;
// Captures that this thread has started and not ended, without those in relaxed mode.
thread_local int num_captures = 0;

u64 said(const char* variable, u64 otherwise) {
    const char* text = getenv(variable);
    return text ? strtoull(text, nullptr, 10) : otherwise;
}

int num_devices() {
    static int num = int(std::min(said("FAKE_DEVICES", 1), u64(MAX_DEVICES)));
    return num;
}

// A device's memory: a file, so that other processes can open it.
struct Memory {
    int fd;
    u64 base, size, num_used = 0;
    // Offsets and sizes of allocations.
    std::map<u64, u64> allocations;

    Memory() {
        size = said("FAKE_MEMORY_BYTES", u64(2) << 30);
        fd = memfd_create("fake device", 0);
        if (fd < 0 || ftruncate(fd, size) != 0) fail("no memory for a device");
        void* at = mmap(nullptr, size, PROT_NONE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) fail("no addresses for a device");
        base = reinterpret_cast<u64>(at);
    }

    // The first free range that is large enough.
    bool allocate(u64 num_bytes, u64& offset) {
        u64 wanted = (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        offset = 0;
        for (auto& [used, len] : allocations) {
            if (used - offset >= wanted) break;
            offset = used + len;
        }
        if (offset + wanted > size) return false;
        allocations[offset] = wanted;
        num_used += wanted;
        return true;
    }
};

std::vector<Memory>& memories() {
    static auto* all = new std::vector<Memory>(num_devices());
    return *all;
}

// The memory of the thread's device.
Memory& memory() { return memories()[current - contexts]; }

// While a device works, its memory is accessible.
struct Working {
    static int num;
    Working() {
        if (num++ == 0) protect(PROT_READ | PROT_WRITE);
    }
    ~Working() {
        if (--num == 0) protect(PROT_NONE);
    }
    static void protect(int how) {
        for (Memory& memory : memories()) mprotect(reinterpret_cast<void*>(memory.base), memory.size, how);
    }
};
int Working::num = 0;

// Opened memory of other processes, and registered memory of the host.
std::map<u64, u64>& foreign = *new std::map<u64, u64>;
std::set<void*>& pinned = *new std::set<void*>;

// The contiguous range that contains `at`, if devices can access it.
bool piece(u64 at, u64& first, u64& len) {
    u64 base = 0;
    auto* pieces = &foreign;
    for (Memory& memory : memories()) {
        if (at >= memory.base && at < memory.base + memory.size) base = memory.base, pieces = &memory.allocations;
    }
    auto next = pieces->upper_bound(at - base);
    if (next == pieces->begin()) return false;
    --next;
    first = base + next->first, len = next->second;
    return at < first + len;
}

bool reaches(u64 at, u64 num_bytes) {
    u64 first, len;
    return num_bytes == 0 || (piece(at, first, len) && at + num_bytes <= first + len);
}

// Returns whether it is done. An operation with other ranks may have to wait for them.
typedef std::function<bool()> Work;

// The captured operations, in order.
struct Graph {
    // The thread that captures.
    std::thread::id thread = std::this_thread::get_id();
    // Operations of any thread are captured, and no thread is restricted.
    bool is_relaxed = false;
    std::vector<Work> work;
    bool is_valid = true;
};

struct Stream {
    // The numbered operations that are not done.
    std::deque<std::pair<u64, Work>> work;
    u64 num_asked = 0, num_done = 0;
    std::shared_ptr<Graph> capture;
    // Whether this stream started its capture.
    bool is_origin = false;
};

struct Event {
    // The place in the stream where it was recorded. Never destroyed.
    Stream* stream = nullptr;
    u64 place = 0;
    std::weak_ptr<Graph> captured;
    bool was_queried = false;
    // The milliseconds that all work before it has spent, when that is done.
    std::shared_ptr<double> time;
};

// Milliseconds of all work so far. Only products spend any.
double spent = 0;

std::set<Stream*>& streams = *new std::set<Stream*>;

// Does a stream's operations up to `place`, as far as possible. Returns whether all are done.
bool work_until(Stream* stream, u64 place) {
    auto is_left = [=] { return !stream->work.empty() && stream->work.front().first <= place; };
    if (!is_left()) return true;
    Working working;
    while (is_left()) {
        if (!stream->work.front().second()) return false;
        stream->num_done = stream->work.front().first;
        stream->work.pop_front();
    }
    return true;
}

// Polls `done`. Between two polls, other threads may queue the operations that it waits for.
template <class Done> void wait_until(Done done) {
    for (;; usleep(100)) {
        std::lock_guard<std::recursive_mutex> guard(mutex);
        if (done()) return;
    }
}

void work_off(Stream* stream) {
    wait_until([=] { return work_until(stream, stream->num_asked); });
}

void work_off_all() {
    wait_until([] {
        bool is_done = true;
        for (Stream* stream : streams) is_done &= work_until(stream, stream->num_asked);
        return is_done;
    });
}

// An operation was queued that a capture forbids.
Result spoil_captures() {
    for (Stream* stream : streams) {
        if (stream->capture) stream->capture->is_valid = false;
    }
    return CAPTURE_UNSUPPORTED;
}

// NVIDIA's manual promises only for relaxed captures that they take part in the work of several threads, such as those
// of NCCL. So the other modes reject it.
Result check_thread(const Stream* stream) {
    const auto& capture = stream->capture;
    bool is_allowed = !capture || capture->is_relaxed || capture->thread == std::this_thread::get_id();
    return is_allowed ? OK : spoil_captures();
}

Result ask(Stream* stream, Work work) {
    if (Result result = check_thread(stream)) return result;
    if (stream->capture) {
        stream->capture->work.push_back(std::move(work));
    } else {
        stream->work.emplace_back(++stream->num_asked, std::move(work));
    }
    return OK;
}

Result check_context() {
    if (!is_initialized) return NOT_INITIALIZED;
    return current ? OK : INVALID_CONTEXT;
}

struct Module {
    const void* (*find)(const char* name);
    u32 (*params_bytes)(const void* kernel);
    u32 (*max_threads)(const void* kernel);
    void (*launch)(const void* kernel, const u32* shape, const void* params);
};

struct Function {
    Module* module;
    const void* kernel;
    u32 shared_bytes;
};

} // namespace

#define LOCK std::unique_lock<std::recursive_mutex> guard(mutex)
#define IN_CONTEXT                                                                                                     \
    LOCK;                                                                                                              \
    if (Result result = check_context()) return result
#define NOT_CAPTURING                                                                                                  \
    IN_CONTEXT;                                                                                                        \
    if (num_captures > 0) return spoil_captures()
// Other threads continue meanwhile.
#define WAIT(what)                                                                                                     \
    guard.unlock();                                                                                                    \
    what;                                                                                                              \
    guard.lock()

// For the other fake libraries.
API fake_ask(void* stream, int (*work)(void*), void* argument) {
    LOCK;
    return ask(static_cast<Stream*>(stream), [=] { return work(argument) != 0; });
}
// Called by work.
API fake_spend(double milliseconds) {
    LOCK;
    spent += milliseconds;
    return OK;
}
API fake_reaches(u64 at, u64 num_bytes) {
    LOCK;
    return reaches(at, num_bytes);
}

API cuInit(unsigned) {
    LOCK;
    u64 wanted = said("FAKE_CONNECTIONS", 0), found = said("CUDA_DEVICE_MAX_CONNECTIONS", 8);
    if (wanted && found != wanted) fail("the program asks for " + std::to_string(found) + " queues");
    is_initialized = true;
    return OK;
}
API cuDriverGetVersion(int* version) {
    *version = 12090;
    return OK;
}
API cuDeviceGetCount(int* count) {
    *count = num_devices();
    return is_initialized ? OK : NOT_INITIALIZED;
}
API cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < num_devices() ? OK : INVALID_DEVICE;
}
API cuDeviceGetName(char* name, int len, int) {
    snprintf(name, len, "a fake H100");
    return OK;
}
API cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case 16: *value = MULTIPROCESSORS; return OK;
    // Compute capability.
    case 75: *value = 9; return OK;
    case 76: *value = 0; return OK;
    case 97: *value = SHARED_BYTES; return OK;
    // Support of memory pools.
    case 115: *value = 0; return OK;
    default: fail("unknown device attribute " + std::to_string(attribute));
    }
}
API cuDevicePrimaryCtxRetain(int** context, int device) {
    *context = &contexts[device];
    return is_initialized ? OK : NOT_INITIALIZED;
}
API cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API cuCtxGetCurrent(int** context) {
    *context = current;
    return OK;
}
API cuCtxSetCurrent(int* context) {
    current = context;
    return OK;
}
// Invalid while any stream of the device is captured, whatever the mode and the thread.
API cuCtxSynchronize() {
    IN_CONTEXT;
    if (std::any_of(streams.begin(), streams.end(), [](Stream* stream) { return stream->capture != nullptr; })) {
        return spoil_captures();
    }
    WAIT(work_off_all());
    return OK;
}
API cuGetErrorName(int error, const char** name) {
    static thread_local char text[32];
    snprintf(text, sizeof text, "CUDA_ERROR_%d", error);
    *name = text;
    return OK;
}
API cuGetErrorString(int error, const char** name) { return cuGetErrorName(error, name); }

API cuMemGetInfo_v2(size_t* num_free, size_t* num_all) {
    IN_CONTEXT;
    *num_all = memory().size, *num_free = memory().size - memory().num_used;
    return OK;
}
API cuMemAlloc_v2(u64* address, size_t num_bytes) {
    NOT_CAPTURING;
    u64 offset;
    if (num_bytes == 0) return INVALID_VALUE;
    if (!memory().allocate(num_bytes, offset)) return OUT_OF_MEMORY;
    *address = memory().base + offset;
    return OK;
}
API cuMemFree_v2(u64 address) {
    NOT_CAPTURING;
    WAIT(work_off_all());
    auto found = memory().allocations.find(address - memory().base);
    if (found == memory().allocations.end()) return INVALID_VALUE;
    memory().num_used -= found->second;
    memory().allocations.erase(found);
    return OK;
}
API cuMemGetAddressRange_v2(u64* base, size_t* size, u64 address) {
    IN_CONTEXT;
    u64 first, len;
    if (!piece(address, first, len)) return INVALID_VALUE;
    if (base) *base = first;
    if (size) *size = len;
    return OK;
}
API cuMemHostAlloc(void** at, size_t num_bytes, unsigned) {
    NOT_CAPTURING;
    if (num_bytes == 0) return INVALID_VALUE;
    if (posix_memalign(at, 4096, num_bytes) != 0) return OUT_OF_MEMORY;
    memset(*at, 0xff, num_bytes);
    pinned.insert(*at);
    return OK;
}
API cuMemFreeHost(void* at) {
    NOT_CAPTURING;
    WAIT(work_off_all());
    if (!pinned.erase(at)) return INVALID_VALUE;
    free(at);
    return OK;
}
API cuMemHostRegister_v2(void* at, size_t num_bytes, unsigned) {
    NOT_CAPTURING;
    foreign[reinterpret_cast<u64>(at)] = num_bytes;
    return OK;
}
API cuMemHostUnregister(void* at) {
    NOT_CAPTURING;
    WAIT(work_off_all());
    return foreign.erase(reinterpret_cast<u64>(at)) ? OK : INVALID_VALUE;
}
API cuMemHostGetDevicePointer_v2(u64* address, void* at, unsigned) {
    IN_CONTEXT;
    *address = reinterpret_cast<u64>(at);
    return OK;
}

// A handle of an allocation for other processes.
struct Handle {
    int pid, fd;
    u64 offset, size;
    char rest[40];
};
API cuIpcGetMemHandle(Handle* handle, u64 address) {
    IN_CONTEXT;
    auto found = memory().allocations.find(address - memory().base);
    if (found == memory().allocations.end()) return INVALID_VALUE;
    *handle = {getpid(), memory().fd, found->first, found->second, {}};
    return OK;
}
API cuIpcOpenMemHandle_v2(u64* address, Handle handle, unsigned) {
    IN_CONTEXT;
    // The process that allocated the memory must not open it.
    if (handle.pid == getpid()) return INVALID_CONTEXT;
    std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
    int fd = open(path.c_str(), O_RDWR);
    if (fd < 0) return INVALID_VALUE;
    u64 page = handle.offset / 4096 * 4096, size = handle.size + handle.offset - page;
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, page);
    close(fd);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    *address = reinterpret_cast<u64>(at) + handle.offset - page;
    foreign[*address] = handle.size;
    return OK;
}
API cuIpcCloseMemHandle(u64 address) {
    NOT_CAPTURING;
    WAIT(work_off_all());
    return foreign.erase(address) ? OK : INVALID_VALUE;
}

static int copy(u64 to, u64 from, size_t len, void* stream, bool is_to_device, bool is_from_device) {
    IN_CONTEXT;
    if ((is_to_device && !reaches(to, len)) || (is_from_device && !reaches(from, len))) {
        fail("a copy of " + std::to_string(len) + " bytes leaves the device's memory");
    }
    auto work = [=] { return memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), len), true; };
    return ask(static_cast<Stream*>(stream), work);
}
API cuMemcpyHtoDAsync_v2(u64 to, u64 from, size_t len, void* stream) { return copy(to, from, len, stream, true, false); }
API cuMemcpyDtoHAsync_v2(u64 to, u64 from, size_t len, void* stream) { return copy(to, from, len, stream, false, true); }
API cuMemcpyAsync(u64 to, u64 from, size_t len, void* stream) { return copy(to, from, len, stream, true, true); }
API cuMemsetD8Async(u64 to, unsigned char byte, size_t len, void* stream) {
    IN_CONTEXT;
    if (!reaches(to, len)) fail("a fill leaves the device's memory");
    return ask(static_cast<Stream*>(stream), [=] { return memset(reinterpret_cast<void*>(to), byte, len), true; });
}

API cuStreamCreate(Stream** stream, unsigned) {
    NOT_CAPTURING;
    streams.insert(*stream = new Stream);
    return OK;
}
// Work of all priorities is done in one order.
API cuStreamCreateWithPriority(Stream** stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }
API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    IN_CONTEXT;
    *least = 0, *greatest = -5;
    return OK;
}
API cuStreamDestroy_v2(Stream* stream) {
    IN_CONTEXT;
    WAIT(work_off(stream));
    return streams.erase(stream) ? OK : INVALID_VALUE;
}
API cuStreamSynchronize(Stream* stream) {
    NOT_CAPTURING;
    if (stream->capture) return spoil_captures();
    WAIT(work_off(stream));
    return OK;
}
API cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    IN_CONTEXT;
    if (Result result = check_thread(stream)) return result;
    if (auto graph = event->captured.lock()) {
        if (stream->capture && stream->capture != graph) return CAPTURE_UNMATCHED;
        stream->capture = graph;
        return OK;
    }
    if (stream->capture) return spoil_captures();
    if (!event->stream) return OK;
    return ask(stream, [from = event->stream, place = event->place] { return work_until(from, place); });
}
API cuEventCreate(Event** event, unsigned) {
    IN_CONTEXT;
    *event = new Event;
    return OK;
}
API cuEventDestroy_v2(Event* event) {
    LOCK;
    delete event;
    return OK;
}
API cuEventRecord(Event* event, Stream* stream) {
    IN_CONTEXT;
    if (Result result = check_thread(stream)) return result;
    event->captured = stream->capture;
    if (stream->capture) return OK;
    event->time = std::make_shared<double>();
    ask(stream, [time = event->time] { return *time = spent, true; });
    event->stream = stream, event->place = stream->num_asked, event->was_queried = false;
    return OK;
}
API cuEventQuery(Event* event) {
    LOCK;
    if (num_captures > 0 || event->captured.lock()) return spoil_captures();
    if (!event->stream || event->stream->num_done >= event->place) return OK;
    // An event is never complete at the first query.
    if (!std::exchange(event->was_queried, true)) return NOT_READY;
    return work_until(event->stream, event->place) ? OK : NOT_READY;
}
API cuEventSynchronize(Event* event) {
    LOCK;
    if (num_captures > 0 || event->captured.lock()) return spoil_captures();
    if (event->stream) {
        WAIT(wait_until([=] { return work_until(event->stream, event->place); }));
    }
    return OK;
}
API cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    LOCK;
    // A millisecond for all other work.
    *milliseconds = float(1.0 + (from->time && to->time ? *to->time - *from->time : 0.0));
    return OK;
}

API cuStreamBeginCapture_v2(Stream* stream, int mode) {
    IN_CONTEXT;
    // CU_STREAM_CAPTURE_MODE_GLOBAL: other threads must not allocate meanwhile, which those of handoffs do.
    if (mode == 0) fail("a capture must not restrict other threads");
    if (stream->capture) return INVALID_VALUE;
    stream->capture = std::make_shared<Graph>();
    // CU_STREAM_CAPTURE_MODE_RELAXED
    stream->capture->is_relaxed = mode == 2;
    stream->is_origin = true;
    num_captures += mode != 2;
    return OK;
}
API cuStreamEndCapture(Stream* stream, std::shared_ptr<Graph>** graph) {
    IN_CONTEXT;
    if (!stream->capture || !stream->is_origin) return INVALID_VALUE;
    auto captured = stream->capture;
    if (!captured->is_relaxed && captured->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
    for (Stream* joined : streams) {
        if (joined->capture == captured) joined->capture = nullptr;
    }
    stream->is_origin = false;
    num_captures -= !captured->is_relaxed;
    *graph = captured->is_valid ? new std::shared_ptr<Graph>(captured) : nullptr;
    return captured->is_valid ? OK : CAPTURE_INVALIDATED;
}
API cuGraphInstantiateWithFlags(std::shared_ptr<Graph>** executable, std::shared_ptr<Graph>* graph, u64) {
    NOT_CAPTURING;
    *executable = new std::shared_ptr<Graph>(*graph);
    return OK;
}
API cuGraphLaunch(std::shared_ptr<Graph>* executable, Stream* stream) {
    IN_CONTEXT;
    if (stream->capture) return spoil_captures();
    for (auto& work : (*executable)->work) {
        if (Result result = ask(stream, work)) return result;
    }
    return OK;
}
API cuGraphExecDestroy(std::shared_ptr<Graph>* executable) {
    LOCK;
    delete executable;
    return OK;
}
API cuGraphDestroy(std::shared_ptr<Graph>* graph) {
    LOCK;
    delete graph;
    return OK;
}

// Code is a shared library for processors, from the fake NVRTC.
API cuModuleLoadData(Module** module, const char* image) {
    NOT_CAPTURING;
    if (memcmp(image, ELFMAG, SELFMAG) != 0) return INVALID_IMAGE;
    auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
    u64 size = header->e_shoff + u64(header->e_shnum) * header->e_shentsize;
    // The library and the file stay open: a later one with the same name would be mistaken for it.
    int fd = memfd_create("code", 0);
    if (write(fd, image, size) != ssize_t(size)) fail("cannot write the code");
    void* library = dlopen(("/proc/self/fd/" + std::to_string(fd)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) fail(dlerror());
    auto find = [&](const char* name, auto& function) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
        if (!function) fail(std::string("code without ") + name);
    };
    *module = new Module;
    find("fake_find", (*module)->find);
    find("fake_params_bytes", (*module)->params_bytes);
    find("fake_max_threads", (*module)->max_threads);
    find("fake_launch", (*module)->launch);
    return OK;
}
API cuModuleUnload(Module* module) {
    LOCK;
    WAIT(work_off_all());
    delete module;
    return OK;
}
API cuModuleGetFunction(Function** function, Module* module, const char* name) {
    IN_CONTEXT;
    const void* kernel = module->find(name);
    if (!kernel) return NOT_FOUND;
    *function = new Function{module, kernel, DEFAULT_SHARED_BYTES};
    return OK;
}
API cuFuncSetAttribute(Function* function, int attribute, int value) {
    IN_CONTEXT;
    // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if (attribute != 8 || value < 0 || u32(value) > SHARED_BYTES) return INVALID_VALUE;
    function->shared_bytes = value;
    return OK;
}

struct LaunchAttribute {
    u32 id;
    char pad[4];
    union {
        char bytes[64];
        int number;
    };
};
struct LaunchConfig {
    u32 x, y, z, threads, threads_y, threads_z, shared_bytes;
    Stream* stream;
    const LaunchAttribute* attributes;
    u32 num_attributes;
};

// A kernel that may start early still waits for the kernels before it, so the order stays the same here.
API cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** params, void** extra) {
    IN_CONTEXT;
    auto [x, y, z, threads, threads_y, threads_z, shared_bytes, stream, attributes, num_attributes] = *config;
    bool is_overlapped = num_attributes > 0;
    // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    if (is_overlapped && (num_attributes > 1 || attributes[0].id != 6 || attributes[0].number != 1)) return INVALID_VALUE;
    if (is_overlapped != said("FAKE_OVERLAP", 1)) fail("a launch overlaps others, or not, against the wish of the test");
    auto [module, kernel, most_shared_bytes] = *function;
    if (!x || !y || !z || x > 0x7fffffff || y > 65535 || z > 65535 || threads_y != 1 || threads_z != 1 || extra) {
        return INVALID_VALUE;
    }
    if (shared_bytes > most_shared_bytes) return INVALID_VALUE;
    if (threads == 0 || threads > module->max_threads(kernel)) return LAUNCH_OUT_OF_RESOURCES;
    u32 num_bytes = module->params_bytes(kernel);
    std::vector<u64> copied((num_bytes + 7) / 8);
    memcpy(copied.data(), params[0], num_bytes);
    std::vector<u32> shape = {x, y, z, threads, shared_bytes};
    return ask(stream, [=, module = module, kernel = kernel] {
        return module->launch(kernel, shape.data(), copied.data()), true;
    });
}
