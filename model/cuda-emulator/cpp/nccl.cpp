// A fake NCCL for machines without a GPU. Host memory stands for device memory, so that tests can inspect the
// operations and the waits of each rank. No call blocks: ranks have joined when all have called join, and an
// operation is in progress until all ranks have posted theirs, and done then.
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

enum { Success = 0, InvalidUsage = 5, InProgress = 7 };

struct Comm;

struct Group {
    int num_ranks;
    std::map<int, Comm*> comms;
    int num_joined = 0;
};

struct Posted {
    bool is_sum;
    uint16_t* numbers;
    size_t len;
};

struct Moved {
    bool is_send;
    void* at;
    size_t len;
    int peer;
};

struct Comm {
    Group* group;
    int rank;
    std::vector<Posted> posted;
    // Sends or receives that are not done.
    std::vector<Moved> moved;
};

std::mutex lock;
std::map<std::string, Group> groups;
int next_id = 0, num_alive = 0;
thread_local int group_depth = 0;

float widened(uint16_t bits) {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

// Test data is exact in bf16, so truncation is exact.
uint16_t rounded(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    return uint16_t(word >> 16);
}

bool all_have(Group& group, size_t num_posted) {
    if (group.comms.size() < size_t(group.num_ranks)) return false;
    for (auto& [_, comm] : group.comms) {
        if (comm->posted.size() < num_posted) return false;
    }
    return true;
}

// The last rank that posts a sum computes it for all ranks.
void sum_if_all(Group& group, size_t idx) {
    if (!all_have(group, idx + 1) || !group.comms[0]->posted[idx].is_sum) return;
    for (size_t i = 0; i < group.comms[0]->posted[idx].len; ++i) {
        float sum = 0;
        for (auto& [_, comm] : group.comms) sum += widened(comm->posted[idx].numbers[i]);
        for (auto& [_, comm] : group.comms) comm->posted[idx].numbers[i] = rounded(sum);
    }
}

// The last rank that posts copies the data of all ranks. Each receive has a matching send.
void move_if_all(Group& group, size_t idx) {
    if (!all_have(group, idx + 1)) return;
    for (auto& [rank, comm] : group.comms) {
        for (Moved& to : comm->moved) {
            if (to.is_send) continue;
            for (Moved& from : group.comms[to.peer]->moved) {
                bool is_it = from.is_send && from.peer == rank && from.len == to.len;
                if (is_it) std::memcpy(to.at, from.at, to.len);
            }
        }
    }
    for (auto& [_, comm] : group.comms) comm->moved.clear();
}

// A group is one operation. The first rank's group has the operations with all other ranks, in their order; another
// rank's group has the operation with the first rank.
int post(Moved moved, int type, Comm* comm) {
    int last = comm->rank == 0 ? comm->group->num_ranks - 1 : 0;
    if (type != 1 || (moved.peer == 0) != (comm->rank != 0) || group_depth != 1) return InvalidUsage;
    std::lock_guard guard(lock);
    comm->moved.push_back(moved);
    if (moved.peer != last) return InProgress;
    comm->posted.push_back({false, nullptr, moved.len});
    return move_if_all(*comm->group, comm->posted.size() - 1), InProgress;
}

} // namespace

extern "C" {

int ncclGetVersion(int* version) { return *version = 22000, Success; }

int ncclGetUniqueId(char* id) {
    std::lock_guard guard(lock);
    std::memset(id, 0, 128);
    std::string name = std::to_string(++next_id);
    std::memcpy(id, name.data(), name.size());
    return Success;
}

struct Id { char bytes[128]; };

int ncclCommInitRankConfig(Comm** out, int num_ranks, Id id, int rank, void* config) {
    int blocking;
    std::memcpy(&blocking, static_cast<char*>(config) + 16, 4);
    if (blocking != 0 || rank < 0 || rank >= num_ranks) return InvalidUsage;
    std::lock_guard guard(lock);
    Group& group = groups[id.bytes];
    group.num_ranks = num_ranks;
    *out = group.comms[rank] = new Comm{&group, rank, {}, {}};
    ++group.num_joined, ++num_alive;
    return InProgress;
}

int ncclCommGetAsyncError(Comm* comm, int* state) {
    std::lock_guard guard(lock);
    bool is_done = comm->group->num_joined == comm->group->num_ranks && all_have(*comm->group, comm->posted.size());
    *state = is_done ? Success : InProgress;
    return Success;
}

int ncclCommAbort(Comm* comm) {
    std::lock_guard guard(lock);
    comm->group->comms.erase(comm->rank);
    delete comm;
    --num_alive;
    return Success;
}

int ncclGroupStart() { return ++group_depth, Success; }
int ncclGroupEnd() { return --group_depth, InProgress; }

int ncclAllReduce(const void* from, void* to, size_t len, int type, int op, Comm* comm, void*) {
    if (from != to || type != 9 || op != 0) return InvalidUsage;
    std::lock_guard guard(lock);
    comm->posted.push_back({true, static_cast<uint16_t*>(to), len});
    sum_if_all(*comm->group, comm->posted.size() - 1);
    return InProgress;
}

int ncclSend(const void* from, size_t len, int type, int peer, Comm* comm, void*) {
    return post({true, const_cast<void*>(from), len, peer}, type, comm);
}

int ncclRecv(void* to, size_t len, int type, int peer, Comm* comm, void*) {
    return post({false, to, len, peer}, type, comm);
}

const char* ncclGetErrorString(int) { return "refused"; }
const char* ncclGetLastError(Comm*) { return ""; }

int fake_num_alive() {
    std::lock_guard guard(lock);
    return num_alive;
}

} // extern "C"
