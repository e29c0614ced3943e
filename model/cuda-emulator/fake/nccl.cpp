// A fake NCCL for the devices of the fake driver. An operation on a stream blocks that stream until every rank's
// stream has reached it, and is then done. Communicators do not block, so a thread of this library queues their
// operations, as in NCCL (group.cc). Until it has done so, the communicator is in progress and rejects operations.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define API extern "C" __attribute__((visibility("default")))

enum { SUCCESS = 0, CUDA_ERROR = 1, INVALID_USAGE = 5, IN_PROGRESS = 7 };

struct Moved {
    bool is_send;
    void* at;
    size_t len;
    int peer;
};

// A sum, or the sends and receives of one group.
struct Posted {
    struct Comm* comm;
    u16* numbers;
    size_t len;
    std::vector<Moved> moved;
};

// The operation that each rank has reached. It is done when all ranks have reached it.
struct Meeting {
    std::map<int, Posted*> posted;
    int num_left = 0;
    bool is_done = false;
};

struct Group {
    int num_ranks = 0, num_joined = 0;
    std::map<u64, Meeting> meetings;
};

struct Comm {
    Group* group;
    int rank;
    // The index of the operation that its stream has reached or reaches next.
    u64 nth = 0;
    bool has_come = false;
    bool is_aborted = false;
    // Whether a thread queues an operation, and whether the driver has rejected one.
    bool is_asking = false, has_failed = false;
};

static std::mutex mutex;
// Never destroyed: threads may use it while the process ends.
static std::map<std::string, Group>& groups = *new std::map<std::string, Group>;
static int num_ids = 0;
// The open group of this thread.
static thread_local int depth = 0;
static thread_local Posted* open = nullptr;
static thread_local void* open_stream = nullptr;

static float widened(u16 bits) {
    u32 word = u32(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static u16 rounded(float value) {
    u32 word;
    memcpy(&word, &value, 4);
    return value != value ? 0x7fff : u16((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

static void meet(Meeting& meeting) {
    auto& posted = meeting.posted;
    Posted& first = *posted[0];
    for (size_t i = 0; i < first.len; ++i) {
        float sum = 0.0f;
        for (auto& [_, one] : posted) sum += widened(one->numbers[i]);
        for (auto& [_, one] : posted) one->numbers[i] = rounded(sum);
    }
    // What a rank receives from a peer is what that peer sends to it, in the order of both.
    for (auto& [rank, one] : posted) {
        std::map<int, size_t> next;
        for (Moved& to : one->moved) {
            if (to.is_send) continue;
            auto& sent = posted[to.peer]->moved;
            size_t& idx = next[to.peer];
            while (idx < sent.size() && !(sent[idx].is_send && sent[idx].peer == rank)) ++idx;
            if (idx < sent.size()) memcpy(to.at, sent[idx++].at, to.len);
        }
    }
}

// The driver calls this when the stream reaches the operation, with the devices' memory accessible. Returns whether
// the stream may continue.
static int come(void* at) {
    auto* posted = static_cast<Posted*>(at);
    Comm* comm = posted->comm;
    std::lock_guard<std::mutex> guard(mutex);
    if (comm->is_aborted) return 1;
    Meeting& meeting = comm->group->meetings[comm->nth];
    if (!comm->has_come) {
        comm->has_come = true;
        meeting.posted[comm->rank] = posted;
        if (int(meeting.posted.size()) == comm->group->num_ranks) meet(meeting), meeting.is_done = true;
    }
    if (!meeting.is_done) return 0;
    if (++meeting.num_left == comm->group->num_ranks) comm->group->meetings.erase(comm->nth);
    comm->nth += 1, comm->has_come = false;
    return 1;
}

static int fake_ask(void* stream, Posted* posted) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW);
    static void* found = library ? dlsym(library, "fake_ask") : nullptr;
    if (!found) {
        fprintf(stderr, "fake NCCL: this is not the fake driver\n");
        abort();
    }
    // A graph keeps a copy and runs it again.
    return reinterpret_cast<int (*)(void*, int (*)(void*), void*)>(found)(stream, come, posted);
}

// Queues the operation from another thread.
static int ask(Posted* posted, void* stream) {
    std::lock_guard<std::mutex> guard(mutex);
    Comm* comm = posted->comm;
    if (comm->is_asking) return INVALID_USAGE;
    comm->is_asking = true;
    std::thread([=] {
        // Late: the caller has returned.
        usleep(100);
        int result = fake_ask(stream, posted);
        std::lock_guard<std::mutex> guard(mutex);
        comm->is_asking = false;
        comm->has_failed |= result != 0;
    }).detach();
    return IN_PROGRESS;
}

static int move(Moved moved, int type, Comm* comm, void* stream) {
    if (type != 1 || depth != 1) return INVALID_USAGE;
    if (!open) open = new Posted{comm, nullptr, 0, {}};
    open->moved.push_back(moved);
    open_stream = stream;
    return IN_PROGRESS;
}

API int ncclGetVersion(int* version) { return *version = 22000, SUCCESS; }
API int ncclGetUniqueId(char* id) {
    std::lock_guard<std::mutex> guard(mutex);
    memset(id, 0, 128);
    std::string name = std::to_string(++num_ids);
    memcpy(id, name.data(), name.size());
    return SUCCESS;
}
struct Id {
    char bytes[128];
};
API int ncclCommInitRankConfig(Comm** comm, int num_ranks, Id id, int rank, void* config) {
    int blocking;
    memcpy(&blocking, static_cast<char*>(config) + 16, 4);
    if (blocking != 0 || rank < 0 || rank >= num_ranks) return INVALID_USAGE;
    std::lock_guard<std::mutex> guard(mutex);
    Group& group = groups[id.bytes];
    group.num_ranks = num_ranks, group.num_joined += 1;
    *comm = new Comm{&group, rank};
    return IN_PROGRESS;
}
API int ncclCommGetAsyncError(Comm* comm, int* state) {
    std::lock_guard<std::mutex> guard(mutex);
    bool is_ready = comm->group->num_joined == comm->group->num_ranks && !comm->is_asking;
    *state = comm->has_failed ? CUDA_ERROR : is_ready ? SUCCESS : IN_PROGRESS;
    return SUCCESS;
}
// Its operations may still be in a stream.
API int ncclCommAbort(Comm* comm) {
    for (bool is_asking = true; is_asking; usleep(100)) {
        std::lock_guard<std::mutex> guard(mutex);
        is_asking = comm->is_asking;
    }
    std::lock_guard<std::mutex> guard(mutex);
    comm->is_aborted = true;
    return SUCCESS;
}
API int ncclGroupStart() { return ++depth, SUCCESS; }
API int ncclGroupEnd() {
    depth -= 1;
    return open ? ask(std::exchange(open, nullptr), open_stream) : SUCCESS;
}
API int ncclAllReduce(const void* from, void* to, size_t len, int type, int op, Comm* comm, void* stream) {
    if (from != to || type != 9 || op != 0) return INVALID_USAGE;
    // The sum of one rank is there already.
    if (comm->group->num_ranks == 1) return SUCCESS;
    return ask(new Posted{comm, static_cast<u16*>(to), len, {}}, stream);
}
API int ncclSend(const void* from, size_t len, int type, int peer, Comm* comm, void* stream) {
    return move({true, const_cast<void*>(from), len, peer}, type, comm, stream);
}
API int ncclRecv(void* to, size_t len, int type, int peer, Comm* comm, void* stream) {
    return move({false, to, len, peer}, type, comm, stream);
}
API const char* ncclGetErrorString(int) { return "refused"; }
API const char* ncclGetLastError(Comm*) { return ""; }
