// Schedules the threads of a block, begins and ends blocks, and reports why a block cannot continue.
#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>

#include "runtime.h"

extern "C" {
__thread HostThread* host_thread __attribute__((tls_model("initial-exec")));
__thread HostBlock host_block __attribute__((tls_model("initial-exec")));
}

#ifndef HOST_UCONTEXT
// Saves callee-saved registers, swaps the stacks, and restores.
asm(R"(
.text
.p2align 4
.globl host_switch_context
.hidden host_switch_context
.type host_switch_context,@function
host_switch_context:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size host_switch_context,.-host_switch_context
)");
#endif

uint32_t random_below(Worker* worker, uint32_t bound) {
    uint64_t& state = worker->random_state;  // xorshift64
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 32) * bound >> 32);
}

static void switch_to(Thread* next) {
    Thread* current = self();
    if (current == next) return;
    host_thread = next;
    fiber_switch(current->fiber, next->fiber);
}

void make_ready(Worker* worker, Thread* thread) {
    thread->waiting_for = nullptr;
    thread->waiting_object = nullptr;
    worker->ready.push(thread);
}

// ---- errors ----
static std::string format_text(const char* format, va_list arguments) {
    char text[700];
    vsnprintf(text, sizeof text, format, arguments);
    return text;
}
// Addresses in the kernel's library are symbolised by Python, which knows the library (and starts addr2line
// only on errors).
static std::string place(Worker* worker, const void* address) {
    Dl_info library;
    char text[40] = "?";
    if (address && dladdr((void*)worker->launch->kernel->call, &library))
        snprintf(text, sizeof text, "<pc 0x%lx>", (unsigned long)((char*)address - (char*)library.dli_fbase));
    return text;
}
static std::string index_text(uint3 index) {
    char text[48];
    snprintf(text, sizeof text, "(%u,%u,%u)", index.x, index.y, index.z);
    return text;
}
static void record_failure(Worker* worker, const std::string& message) {
    if (worker->failed) return;
    worker->failed = true;
    worker->error = message;
    worker->launch->failed = true;
}
[[noreturn]] static void abandon_block(Worker* worker) {
    switch_to(&worker->main);
    abort();
}
[[noreturn]] static void fail_thread(const std::string& message) {
    Worker* worker = own_worker();
    record_failure(worker, message + " [block " + index_text(host_block.block_index) + ", thread " +
                               index_text(self()->thread_index) + ", " + place(worker, self()->call_site) +
                               "]");
    abandon_block(worker);
}
void fail_here(const char* format, ...) {
    TsanIgnore ignore;
    va_list arguments;
    va_start(arguments, format);
    fail_thread(format_text(format, arguments));
}
extern "C" void host_fail(const char* format, ...) {
    CALLED_FROM_KERNEL();
    TsanIgnore ignore;
    va_list arguments;
    va_start(arguments, format);
    fail_thread(format_text(format, arguments));
}

// Lists which threads wait where, naming equal places once.
static void record_deadlock(Worker* worker) {
    TsanIgnore ignore;
    const unsigned count = worker->launch->threads_per_block;
    std::string message = "deadlock in block " + index_text(host_block.block_index) + ":";
    unsigned returned = 0;
    bool polls = false;
    for (unsigned i = 0; i < count; i++) {
        Thread* thread = worker->threads[i];
        if (thread->returned) { returned++; continue; }
        unsigned alike = 0;
        bool is_first = true;
        for (unsigned j = 0; j < count; j++) {
            Thread* other = worker->threads[j];
            if (other->returned || other->waiting_for != thread->waiting_for ||
                other->call_site != thread->call_site)
                continue;
            if (j < i) is_first = false;
            alike++;
        }
        if (!is_first || message.size() > 2000) continue;
        polls |= !thread->waiting_for && !thread->waiting_object;
        message += " " + std::to_string(alike) + " thread(s) " +
                   (thread->waiting_for ? std::string("wait in ") + thread->waiting_for : "poll") + " at " +
                   place(worker, thread->call_site) + " (first: thread " + index_text(thread->thread_index) +
                   ")";
        if (thread->waiting_object) {
            const long missing = mbarrier_missing_bytes(thread->waiting_object);
            if (missing)
                message += ", on an mbarrier with " + std::to_string(missing) + " announced bytes not copied";
        }
        message += ";";
    }
    if (returned) message += " " + std::to_string(returned) + " thread(s) have returned";
    if (polls && !worker->launch->options->resident)
        message += " (does it wait for another block? then launch with resident=True)";
    record_failure(worker, message);
}

// ---- choosing ----
static Thread* pick(Worker* worker) {
    ReadyQueue& ready = worker->ready;
    if (!ready.count) return nullptr;
    return ready.take(worker->launch->options->order == HOST_RANDOM ? random_below(worker, ready.count) : 0);
}
// Runs another thread; the current one is waiting, in the queue, or finished.
static void run_another(Worker* worker) {
    Thread* next = pick(worker);
    if (!next) {
        if (worker->live) record_deadlock(worker);
        next = &worker->main;
    }
    switch_to(next);
}
void wait_here(Worker* worker, const char* what) {
    self()->waiting_for = what;
    run_another(worker);
}

// ---- blocks taking turns (resident grids) ----
static Worker* other_worker(Worker* worker) {
    std::vector<Worker*>& candidates = worker->launch->unfinished;
    if (worker->launch->options->order == HOST_RANDOM)
        return candidates[random_below(worker, (uint32_t)candidates.size())];
    for (size_t i = 0; i < candidates.size(); i++)
        if (candidates[i] == worker) return candidates[(i + 1) % candidates.size()];
    return worker;
}
static void let_other_blocks_run(Worker* worker) {
    pass_turn(worker, other_worker(worker));
    if (worker->launch->failed) abandon_block(worker);
}
void maybe_pass_turn(Worker* worker) {
    const Launch* launch = worker->launch;
    if (launch->options->resident && launch->options->order == HOST_RANDOM && random_below(worker, 8) == 0)
        let_other_blocks_run(worker);
}
void poll_here(Worker* worker) {
    const Launch* launch = worker->launch;
    const uint64_t threads = launch->exclusive ? launch->threads_per_block * launch->blocks : worker->live;
    // after this many rounds everybody who can make progress has done so
    if (++*worker->idle > 2000 + 100 * threads) {
        record_deadlock(worker);
        abandon_block(worker);
    }
    worker->ready.push(self());
    if (launch->options->resident && worker->polls_until_pass-- == 0) {
        // about once per round of polls, at a moment that differs from round to round
        worker->polls_until_pass = launch->options->order == HOST_RANDOM
                                       ? random_below(worker, 2 * worker->ready.count)
                                       : worker->ready.count;
        let_other_blocks_run(worker);
    }
    run_another(worker);
}
extern "C" void host_yield() {
    CALLED_FROM_KERNEL();
    poll_here(own_worker());
}
extern "C" void host_progress() { *own_worker()->idle = 0; }

// ---- the life of a thread ----
static void thread_returned(Worker* worker, Thread* thread) {
    finish_copies(worker, thread);
    thread->returned = true;
    worker->live--;
    *worker->idle = 0;
    thread_left_warp(worker, thread);
}
static void fiber_main() {
    fiber_entered();
    for (;;) {  // one block per round
        Worker* worker = own_worker();
        tsan_acquire(&launch_clock);
        worker->launch->kernel->call(worker->params);
        tsan_release(&done_clock);
        thread_returned(worker, self());
        run_another(worker);
    }
}
void create_threads(Worker* worker, unsigned count) {
    while (worker->threads.size() < count) {
        Thread* thread = new Thread();
        fiber_create(thread->fiber, worker->launch->options->stack_bytes, fiber_main,
                     (unsigned)worker->threads.size());
        thread->worker = worker;
        worker->threads.push_back(thread);
    }
    while (worker->warps.size() < (count + 31) / 32) worker->warps.push_back(new HostWarp());
    for (Barrier& barrier : worker->barriers) barrier.waiting.reserve(count);
}
void drop_threads(Worker* worker, unsigned keep) {
    while (worker->threads.size() > keep) {
        fiber_destroy(worker->threads.back()->fiber);
        delete worker->threads.back();
        worker->threads.pop_back();
    }
}

// ---- the life of a block ----
constexpr unsigned kCanaryBytes = 64;
constexpr unsigned char kCanary = 0xA7;

// A loop, because the sanitizers watch memset and memcpy, and would report these bytes (red zones among
// them).
static void fill(char* memory, size_t bytes, char value) {
    volatile char* p = memory;
    for (; bytes && (uintptr_t)p % 8; bytes--) *p++ = value;
    for (; bytes >= 8; bytes -= 8, p += 8)
        *(volatile uint64_t*)p = 0x0101010101010101ull * (unsigned char)value;
    while (bytes--) *p++ = value;
}
static bool canaries_intact(const Worker* worker) {
    if (kAsan || !worker->dynamic_shared) return true;
    for (unsigned i = 0; i < kCanaryBytes; i++)
        if (worker->dynamic_shared[-1 - (int)i] != kCanary ||
            worker->dynamic_shared[worker->dynamic_bytes + i] != kCanary)
            return false;
    return true;
}
static void prepare_memory(Worker* worker) {
    if (worker->dynamic_shared) {
        if (!kAsan)
            fill((char*)worker->dynamic_shared - kCanaryBytes, worker->dynamic_bytes + 2 * kCanaryBytes,
                 (char)kCanary);
        fill((char*)worker->dynamic_shared, worker->dynamic_bytes, (char)kUninitialised);
    }
    fill(worker->static_shared, worker->static_bytes, (char)kUninitialised);
    host_block.dynamic_shared = worker->dynamic_shared;
}

// ---- the phases of a block's run ----
static void set_index(const HostLaunch* options, uint64_t block) {
    const unsigned *grid = options->grid, *dim = options->block;
    block %= (uint64_t)grid[0] * grid[1] * grid[2];  // of its rank
    host_block.block_index = {(unsigned)(block % grid[0]), (unsigned)(block / grid[0] % grid[1]),
                              (unsigned)(block / ((uint64_t)grid[0] * grid[1]))};
    host_block.block_dim = {dim[0], dim[1], dim[2]};
    host_block.grid_dim = {grid[0], grid[1], grid[2]};
}
static void reset_worker(Worker* worker, uint64_t block) {
    const Launch* launch = worker->launch;
    const HostLaunch* options = launch->options;
    const uint64_t grid = (uint64_t)options->grid[0] * options->grid[1] * options->grid[2];
    worker->params = (const char*)options->params + block / grid * options->params_stride;
    // The state depends on the block, not on the worker, so that the same seed gives the same schedule with
    // any number of workers.
    worker->random_state =
        ((launch->options->seed * 0x9E3779B97F4A7C15ull) ^ ((block + 1) * 0xD1B54A32D192ED03ull)) | 1;
    worker->live = launch->threads_per_block;
    worker->own_idle = 0;
    worker->polls_until_pass = 0;
    worker->ready.first = worker->ready.count = 0;
    worker->loads.clear();
    worker->main.worker = worker;
}
static void reset_threads(Worker* worker) {
    const unsigned *dim = worker->launch->options->block, count = worker->launch->threads_per_block;
    for (unsigned i = 0; i < count; i++) {
        Thread* thread = worker->threads[i];
        thread->linear = i;
        thread->lane = i % 32;
        thread->warp = worker->warps[i / 32];
        thread->warp->lanes[i % 32] = thread;
        thread->thread_index = {i % dim[0], i / dim[0] % dim[1], i / (dim[0] * dim[1])};
        thread->fenced = thread->returned = false;
        thread->waiting_for = nullptr;
        thread->waiting_object = thread->call_site = nullptr;
        reset_copies(thread);
    }
}
// Makes all threads ready and runs them until each has returned, or the block is abandoned.
static void run_threads(Worker* worker) {
    const Launch* launch = worker->launch;
    const unsigned count = launch->threads_per_block;
    for (unsigned i = 0; i < count; i++)
        worker->ready.push(worker->threads[launch->options->order == HOST_DESCENDING ? count - 1 - i : i]);
    tsan_release(&launch_clock);

    host_thread = &worker->main;
    switch_to(pick(worker));
}
// Checks after the end of a block: writes outside shared memory, and copies in flight.
static void check_ended_block(Worker* worker) {
    if (!canaries_intact(worker))
        record_failure(worker, "write outside dynamic shared memory (" +
                                   std::to_string(worker->dynamic_bytes) + " bytes) in block " +
                                   index_text(host_block.block_index));
    else if (const char* copies = unfinished_copies(worker))
        record_failure(worker, std::string(copies) + " in block " + index_text(host_block.block_index));
}
void run_block(Worker* worker, uint64_t block) {
    const Launch* launch = worker->launch;
    set_index(launch->options, block);
    reset_worker(worker, block);
    prepare_memory(worker);
    reset_synchronisation(worker);
    reset_threads(worker);
    run_threads(worker);
    if (!worker->failed && !launch->failed) check_ended_block(worker);
    if (worker->live)  // the block was abandoned in the middle
        for (Thread* thread : worker->threads) fiber_restart(thread->fiber, fiber_main, thread->linear);
}
