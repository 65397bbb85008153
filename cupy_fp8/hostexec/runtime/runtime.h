// Internal records of the runtime. A Worker is an operating-system thread that runs whole blocks, their CUDA
// threads as fibers. A worker's state is accessed by its own thread only, so nothing in it is atomic except
// how it is woken.
#pragma once
#include <atomic>
#include <string>
#include <vector>

#include "../shim/host_abi.h"
#include "fiber.h"

constexpr unsigned kMaxThreads = 1024, kMaxBarriers = 16;
// contents of shared memory before a block: NaN in every float format
constexpr uint64_t kUninitialised = ~0ull;

struct CopyToShared {  // cp.async
    void* shared;
    const void* global;
    unsigned bytes, source_bytes, group;
};
constexpr unsigned kNoSwizzle = ~0u;
struct BulkLoad {
    void* shared;
    const void* global;
    unsigned bytes;
    void* barrier;
    unsigned source_bytes, swizzle;  // zeros after source_bytes; where 16-byte chunks land
};
struct BulkStore {
    void* global;
    const void* shared;
    unsigned bytes, group;
    bool adds_f32;
};

struct Thread : HostThread {
    Fiber fiber;
    std::vector<CopyToShared> copies;
    std::vector<BulkStore> stores;
    unsigned copy_group = 0, store_group = 0;  // the group being filled; earlier ones are committed
};

struct HostWarp {
    unsigned live = 0;            // lanes that have not returned
    unsigned in_use = 0;          // bit mask of `operations` in use
    HostCollective operations[32];  // enough: each has at least one lane inside
    char clock[32];               // per operation, its address for ThreadSanitizer
    Thread* lanes[32];
};

struct Barrier {
    unsigned arrived = 0, expected = 0, predicates = 0, generation = 0;
    int kind = 0, result[2] = {};
    char clock[2];  // by parity of the generation
    std::vector<Thread*> waiting;
};

// Queue of the threads that can run; each is in it at most once.
struct ReadyQueue {
    Thread* entries[kMaxThreads];
    unsigned first = 0, count = 0;
    void push(Thread* thread) { entries[(first + count++) % kMaxThreads] = thread; }
    Thread* take(unsigned position) {
        Thread *&head = entries[first], *&chosen = entries[(first + position) % kMaxThreads],
               *thread = chosen;
        chosen = head;
        first = (first + 1) % kMaxThreads;
        count--;
        return thread;
    }
};

struct Worker;

struct ClusterBarrier {
    unsigned arrived = 0, generation = 0;
    char clock[2];  // by parity of the generation
};

// In exclusive mode (ThreadSanitizer, resident grids) every block of a launch has its own worker, and one
// worker runs at a time: the one whose turn it is. Only it accesses `unfinished` and what follows it.
struct Launch {
    const HostKernel* kernel;
    const HostLaunch* options;
    unsigned threads_per_block;
    const HostBlocks* ranges;                         // blocks that run
    uint64_t blocks;                                  // in all ranges
    bool exclusive;
    // Block number b runs as (b * multiplier + offset) mod blocks.
    uint64_t block_multiplier = 1, block_offset = 0;
    std::atomic<uint64_t> next_block{0};
    std::atomic<bool> failed{false};
    std::vector<Worker*> unfinished;
    std::vector<Worker*> worker_of_block;             // of a cluster; between begin and end of a block
    ClusterBarrier cluster_barrier;
    uint64_t shared_idle = 0;
};

struct HostWorker {};
struct Worker : HostWorker {
    Thread main;                    // the operating-system thread's own context
    // kept between launches; the first threads_per_block belong to the current block
    std::vector<Thread*> threads;
    std::vector<HostWarp*> warps;
    ReadyQueue ready;
    Barrier barriers[kMaxBarriers];
    std::vector<BulkLoad> loads;
    Launch* launch = nullptr;
    const void* params = nullptr;   // of the block's grid
    unsigned live = 0;
    uint64_t random_state = 1;
    uint64_t own_idle = 0, *idle = &own_idle;  // polls since the last progress
    unsigned polls_until_pass = 0;
    unsigned char *dynamic_memory = nullptr, *dynamic_shared = nullptr;
    unsigned dynamic_bytes = 0;
    char *static_shared = nullptr, *static_saved = nullptr;
    size_t static_bytes = 0;
    bool failed = false;
    std::string error;
    std::atomic<int> wake{0}, turn{0};
    unsigned index = 0;
};

inline Thread* self() { return static_cast<Thread*>(host_thread); }
inline Worker* own_worker() { return static_cast<Worker*>(host_thread->worker); }

// scheduler.cpp
void make_ready(Worker* worker, Thread* thread);
void wait_here(Worker* worker, const char* what);     // suspends the current thread until make_ready
void poll_here(Worker* worker);                       // lets other threads run
void maybe_pass_turn(Worker* worker);
uint32_t random_below(Worker* worker, uint32_t bound);
[[noreturn]] void fail_here(const char* format, ...) __attribute__((format(printf, 1, 2)));
void run_block(Worker* worker, uint64_t block);
void create_threads(Worker* worker, unsigned count);
void drop_threads(Worker* worker, unsigned keep);

// synchronisation.cpp
void reset_synchronisation(Worker* worker);
void thread_left_warp(Worker* worker, Thread* thread);

// async_copy.cpp
void reset_copies(Thread* thread);
void finish_copies(Worker* worker, Thread* thread);   // called when the thread returns
const char* unfinished_copies(Worker* worker);        // nullptr if there are none
long mbarrier_missing_bytes(const void* barrier);

// launch.cpp
void pass_turn(Worker* worker, Worker* next);
// addresses for ThreadSanitizer: "the launch has begun" and "a thread is done"
extern char launch_clock, done_clock;

#define CALLED_FROM_KERNEL() (host_thread->call_site = __builtin_return_address(0))
