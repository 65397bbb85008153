// Launches: workers, the order of blocks, and the turns that blocks take.
#include <linux/futex.h>
#include <link.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <numeric>

#include "runtime.h"

char launch_clock, done_clock;

// Workers live as long as the process, so that a launch costs neither threads nor fibers. After a fork the
// child starts with none.
struct Pool {
    std::vector<Worker*> workers;
    std::atomic<int> busy{0};
    pid_t process = getpid();
};
static Pool* pool;
static std::mutex one_launch_at_a_time;
static std::string error_text;
// A fork waits for other threads' launches; otherwise the child would find the mutex locked for ever, and the
// workspace half used. A launch needs nothing that the forking thread holds.
__attribute__((constructor)) static void let_no_launch_run_during_a_fork() {
    pthread_atfork([] { one_launch_at_a_time.lock(); }, [] { one_launch_at_a_time.unlock(); },
                   [] { one_launch_at_a_time.unlock(); });
}
extern "C" const char* host_error() { return error_text.c_str(); }

// ---- waiting ----
// A system call, because std::atomic::wait yields the processor four times before it sleeps: with other
// processes on the machine a resident launch, whose blocks take turns, then takes several times as long.
static void sleep_while(std::atomic<int>& value, int unwanted) {
    while (value == unwanted) syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, unwanted, nullptr, nullptr, 0);
}
static void wake_one(std::atomic<int>& value) {
    syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}
static void await(std::atomic<int>& flag) {
    sleep_while(flag, 0);
    flag = 0;
}
static void raise(std::atomic<int>& flag) {
    flag = 1;
    wake_one(flag);
}

// ---- turns ----
// Under AddressSanitizer static shared memory is one plain array in the library (required for red zones), so
// blocks that take turns must take its contents with them. The loop copies by hand because memcpy would
// report the red zones between the variables.
static void copy_raw(char* to, const char* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) ((volatile char*)to)[i] = from[i];
}
void pass_turn(Worker* worker, Worker* next) {
    if (next == worker) return;
    const bool save = worker->static_saved;
    if (save) copy_raw(worker->static_saved, worker->static_shared, worker->static_bytes);
    raise(next->turn);
    await(worker->turn);
    if (save) copy_raw(worker->static_shared, worker->static_saved, worker->static_bytes);
}

// ---- memory of a worker ----
struct ThreadLocals {
    uintptr_t code;
    char* begin;
    size_t bytes;
};
static int find_thread_locals(dl_phdr_info* library, size_t, void* argument) {
    ThreadLocals* wanted = (ThreadLocals*)argument;
    size_t bytes = 0;
    bool mine = false;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const auto& segment = library->dlpi_phdr[i];
        if (segment.p_type == PT_LOAD &&
            wanted->code - (library->dlpi_addr + segment.p_vaddr) < segment.p_memsz)
            mine = true;
        if (segment.p_type == PT_TLS) bytes = segment.p_memsz;
    }
    if (!mine) return 0;
    wanted->begin = (char*)library->dlpi_tls_data;
    wanted->bytes = bytes;
    return 1;
}
static void prepare_static_shared(Worker* worker) {
    const HostKernel* kernel = worker->launch->kernel;
    free(worker->static_saved);
    worker->static_saved = nullptr;
    if (kernel->shared_anchor) {
        kernel->shared_anchor();  // makes the thread's copy exist
        ThreadLocals found = {(uintptr_t)kernel->call, nullptr, 0};
        dl_iterate_phdr(find_thread_locals, &found);
        worker->static_shared = found.begin;
        worker->static_bytes = found.begin ? found.bytes : 0;
    } else {
        worker->static_shared = kernel->shared_begin;
        worker->static_bytes = (size_t)(kernel->shared_end - kernel->shared_begin);
        if (worker->launch->exclusive) worker->static_saved = (char*)malloc(worker->static_bytes + 1);
    }
}
static void prepare_dynamic_shared(Worker* worker) {
    // AddressSanitizer's malloc brings its own red zones.
    constexpr size_t alignment = 1024, margin = kAsan ? 0 : 1024;
    const unsigned bytes = worker->launch->options->shared_bytes;
    if (bytes == worker->dynamic_bytes) return;
    free(worker->dynamic_memory);
    worker->dynamic_memory = worker->dynamic_shared = nullptr;
    worker->dynamic_bytes = bytes;
    if (!bytes) return;
    if (posix_memalign((void**)&worker->dynamic_memory, alignment, bytes + 2 * margin)) abort();
    worker->dynamic_shared = worker->dynamic_memory + margin;
}

// ---- a worker's thread ----
// Index in the grid of a block, from its number among those that run.
static uint64_t block_of(const Launch* launch, uint64_t number) {
    const HostBlocks* range = launch->ranges;
    while (number >= range->count) number -= range++->count;
    return range->first + number;
}
static void work(Worker* worker) {
    Launch* launch = worker->launch;
    worker->failed = false;
    worker->idle = launch->exclusive ? &launch->shared_idle : &worker->own_idle;
    if (launch->exclusive) await(worker->turn);
    create_threads(worker, launch->threads_per_block);
    prepare_static_shared(worker);
    prepare_dynamic_shared(worker);
    const auto run = [&](uint64_t number) {
        const bool descending = launch->options->order == HOST_DESCENDING;
        const uint64_t one =
            descending ? launch->blocks - 1 - number
                       : (number * launch->block_multiplier + launch->block_offset) % launch->blocks;
        const uint64_t block = block_of(launch, one);
        if (launch->options->cluster) launch->worker_of_block[one] = worker;
        run_block(worker, block);
        if (launch->options->cluster) launch->worker_of_block[one] = nullptr;
    };
    if (launch->exclusive) {
        if (!launch->failed) run(worker->index);
        std::erase(launch->unfinished, worker);
        if (!launch->unfinished.empty()) raise(launch->unfinished.front()->turn);
    } else {
        while (!launch->failed) {
            const uint64_t number = launch->next_block.fetch_add(1);
            if (number >= launch->blocks) break;
            run(number);
        }
    }
}
static void* worker_main(void* argument) {
    Worker* worker = (Worker*)argument;
    pthread_attr_t attributes;
    void* stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &worker->main.fiber.stack_bytes);
    pthread_attr_destroy(&attributes);
    worker->main.fiber.stack = (char*)stack;
#ifdef HOST_TSAN
    worker->main.fiber.tsan_fiber = __tsan_get_current_fiber();
#endif
    Pool* own_pool = pool;
    for (;;) {
        await(worker->wake);
        work(worker);
        if (own_pool->busy.fetch_sub(1) == 1) wake_one(own_pool->busy);
    }
}
static bool add_worker() {
    Worker* worker = new Worker();
    worker->index = (unsigned)pool->workers.size();
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 512 * 1024);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const bool started = !pthread_create(&thread, &attributes, worker_main, worker);
    pthread_attr_destroy(&attributes);
    if (started) pool->workers.push_back(worker);
    else delete worker;
    return started;
}

// ---- launches ----
// Every fiber is a thread to ThreadSanitizer, which supports 8128, needs 0.9 MB and most of a millisecond for
// each, and holds on to about twelve of the 65530 memory mappings that Linux allows a process. So they are
// kept between launches, up to a number that a small machine can hold.
constexpr uint64_t kTsanThreads = 4000, kTsanKeptThreads = 3000;
// Every fiber takes two memory mappings (stack and guard page), of which Linux allows 65530.
constexpr uint64_t kResidentThreads = 16384;

static void trim_fibers(uint64_t workers, unsigned threads) {
    uint64_t total = pool->workers.size() + workers;
    for (size_t i = 0; i < pool->workers.size(); i++)
        total += std::max<uint64_t>(pool->workers[i]->threads.size(), i < workers ? threads : 0);
    for (size_t i = pool->workers.size(); i < workers; i++) total += threads;
    if (total <= kTsanKeptThreads) return;
    for (size_t i = 0; i < pool->workers.size(); i++)
        drop_threads(pool->workers[i], i < workers ? threads : 0);
}
// Multiplies by a number coprime to the number of blocks: a cheap permutation.
static void permute_blocks(Launch& launch) {
    if (launch.options->order != HOST_RANDOM || launch.blocks < 3) return;
    uint64_t multiplier = (launch.options->seed * 2654435761ull + 12345) % launch.blocks | 1;
    while (std::gcd(multiplier, launch.blocks) != 1) multiplier++;
    launch.block_multiplier = multiplier;
    launch.block_offset = launch.options->seed * 40503ull % launch.blocks;
}
static int refuse(const std::string& reason) {
    error_text = reason;
    return 1;
}

// Runs the blocks of a launch on this many workers, and waits for them. Returns 1 if one of them failed.
static int run_workers(Launch& launch, uint64_t workers) {
    tsan_release(&launch_clock);
    pool->busy = (int)workers;
    for (uint64_t i = 0; i < workers; i++) pool->workers[i]->launch = &launch;
    if (launch.exclusive)
        launch.unfinished.assign(pool->workers.begin(), pool->workers.begin() + (long)workers);
    for (uint64_t i = 0; i < workers; i++) raise(pool->workers[i]->wake);
    if (launch.exclusive) raise(pool->workers[0]->turn);
    for (int busy; (busy = pool->busy) != 0;) sleep_while(pool->busy, busy);
    tsan_acquire(&done_clock);

    for (uint64_t i = 0; i < workers; i++)
        if (pool->workers[i]->failed) return refuse(pool->workers[i]->error);
    return 0;
}

// Runs the blocks of the ranges: the chosen ones of the grid, or a cluster's.
static int launch_blocks(const HostKernel* kernel, const HostLaunch* options, const HostBlocks* blocks,
                         unsigned ranges) {
    Launch launch = {};
    launch.ranges = blocks;
    for (unsigned i = 0; i < ranges; i++) launch.blocks += blocks[i].count;
    launch.kernel = kernel;
    launch.options = options;
    launch.threads_per_block = options->block[0] * options->block[1] * options->block[2];
    launch.exclusive = kTsan || options->resident;
    if (options->cluster) launch.worker_of_block.resize(launch.blocks);
    permute_blocks(launch);

    const uint64_t threads = launch.blocks * (launch.threads_per_block + 1);
    if (kTsan && threads > kTsanThreads)
        return refuse("tsan mode runs at most " + std::to_string(kTsanThreads) +
                      " threads (blocks included) in a grid, not " + std::to_string(threads));
    if (options->resident && threads > kResidentThreads)
        return refuse("a resident grid has at most " + std::to_string(kResidentThreads) +
                      " threads (blocks included) here, not " + std::to_string(threads));

    if (!pool || pool->process != getpid()) pool = new Pool();
    // Without thread_local shared memory (AddressSanitizer) only one block can run at a time.
    const uint64_t workers = launch.exclusive        ? launch.blocks
                             : kernel->shared_anchor ? std::min<uint64_t>(options->workers, launch.blocks)
                                                     : 1;
    if (kTsan) trim_fibers(workers, launch.threads_per_block);
    while (pool->workers.size() < workers)
        if (!add_worker())
            return refuse("the system refuses to start thread number " +
                          std::to_string(pool->workers.size()));
    return run_workers(launch, workers);
}

extern "C" int host_launch(const HostKernel* kernel, const HostLaunch* options) {
    std::lock_guard<std::mutex> lock(one_launch_at_a_time);
    if (!options->cluster) return launch_blocks(kernel, options, options->blocks, options->ranges);
    const uint64_t grid = (uint64_t)options->grid[0] * options->grid[1] * options->grid[2];
    if (grid % options->cluster) return refuse("a grid of clusters needs a multiple of their blocks");
    for (HostBlocks cluster = {0, options->cluster}; cluster.first < grid; cluster.first += cluster.count)
        if (launch_blocks(kernel, options, &cluster, 1)) return 1;
    return 0;
}
