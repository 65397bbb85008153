// cp.async, mbarriers and bulk copies. When each copy lands: shim/async_copy.h.
#include <string.h>

#include "runtime.h"

static bool lands_at_once(Worker* worker) { return worker->launch->options->order == HOST_DESCENDING; }

static void check_range(const char* what, const void* memory, unsigned bytes) {
    if (asan_poisoned(memory, bytes)) fail_here("%s: %u bytes at %p leave the array", what, bytes, memory);
}
static void check_aligned(const char* what, const void* memory, unsigned alignment) {
    if ((uintptr_t)memory % alignment)
        fail_here("%s: address %p is not a multiple of %u", what, memory, alignment);
}

// ---- cp.async ----
// memcpy shows the sanitizers an access by the thread that waits for the copy.
static void land(const CopyToShared& copy) {
    memcpy(copy.shared, copy.global, copy.source_bytes);
    if (copy.bytes > copy.source_bytes)
        memset((char*)copy.shared + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}
template <class Copy> static void append(std::vector<Copy>& queue, const Copy& copy) {
    TsanIgnore ignore;
    queue.push_back(copy);
}
// Lands the copies in groups older than the `keep` newest committed ones (keep == ~0: all of them). The rest
// stays in the queue.
template <class Copy, class Land>
static void land_groups(std::vector<Copy>& queue, unsigned filling, unsigned keep, Land land) {
    size_t left = 0;
    for (size_t i = 0; i < queue.size(); i++) {
        const Copy copy = queue[i];
        if (keep == ~0u || copy.group + (uint64_t)keep < filling) land(copy);
        else queue[left++] = copy;
    }
    queue.resize(left);
}
extern "C" void host_cp_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes) {
    CALLED_FROM_KERNEL();
    if ((bytes != 4 && bytes != 8 && bytes != 16) || source_bytes > bytes)
        fail_here("cp.async of %u bytes, %u of them from memory", bytes, source_bytes);
    check_aligned("cp.async", shared, bytes);
    check_aligned("cp.async", global, bytes);
    check_range("cp.async writes", shared, bytes);
    check_range("cp.async reads", global, source_bytes);
    const CopyToShared copy = {shared, global, bytes, source_bytes, self()->copy_group};
    if (lands_at_once(own_worker())) land(copy);
    else append(self()->copies, copy);
}
extern "C" void host_cp_async_commit() { self()->copy_group++; }
extern "C" void host_cp_async_wait(unsigned pending_groups) {
    land_groups(self()->copies, self()->copy_group, pending_groups, land);
}

// ---- mbarrier ----
struct MBarrier {
    uint16_t expected, pending;   // arrivals per phase, and those still to come
    // twice the bytes announced and not yet copied, plus the parity of the current phase
    int32_t bytes_and_phase;
    int32_t bytes() const { return bytes_and_phase >> 1; }
    unsigned phase() const { return bytes_and_phase & 1; }
};
static_assert(sizeof(MBarrier) == 8, "an mbarrier has 8 bytes");

static MBarrier* checked_mbarrier(void* barrier) {
    uint64_t bits;
    check_aligned("mbarrier", barrier, 8);
    check_range("mbarrier", barrier, 8);
    __builtin_memcpy(&bits, barrier, 8);
    if (bits == kUninitialised) fail_here("mbarrier used before it was initialised");
    return (MBarrier*)barrier;
}
static void end_phase_if_complete(MBarrier* barrier) {
    if (barrier->pending || barrier->bytes()) return;
    barrier->pending = barrier->expected;
    barrier->bytes_and_phase = (int32_t)barrier->phase() ^ 1;
    host_progress();
}
long mbarrier_missing_bytes(const void* barrier) { return ((const MBarrier*)barrier)->bytes(); }

extern "C" void host_mbarrier_init(void* barrier, unsigned arrivals) {
    CALLED_FROM_KERNEL();
    if (!arrivals || arrivals > kMaxThreads) fail_here("mbarrier for %u arrivals", arrivals);
    check_aligned("mbarrier", barrier, 8);
    check_range("mbarrier", barrier, 8);
    *(MBarrier*)barrier = {(uint16_t)arrivals, (uint16_t)arrivals, 0};
}
extern "C" void host_mbarrier_complete_tx(void* barrier, unsigned bytes) {
    CALLED_FROM_KERNEL();
    MBarrier* state = checked_mbarrier(barrier);
    tsan_release(barrier);
    state->bytes_and_phase -= (int32_t)bytes * 2;
    end_phase_if_complete(state);
}
extern "C" void host_mbarrier_arrive(void* barrier, unsigned expect_bytes) {
    CALLED_FROM_KERNEL();
    MBarrier* state = checked_mbarrier(barrier);
    if (!state->pending)
        fail_here("more arrivals at an mbarrier than the %u it was initialised for", state->expected);
    tsan_release(barrier);
    state->bytes_and_phase += (int32_t)expect_bytes * 2;
    state->pending--;
    host_progress();
    end_phase_if_complete(state);
}

// ---- bulk copies ----
static void check_bulk(const char* what, const void* shared, const void* global, unsigned bytes) {
    check_aligned(what, shared, 16);
    check_aligned(what, global, 16);
    if (bytes % 16) fail_here("%s of %u bytes: not a multiple of 16", what, bytes);
    check_range(what, shared, bytes);
    check_range(what, global, bytes);
}
// The waiting thread does the copying; by then everything that the copy's starter has seen has happened.
static void land_load(const BulkLoad& load) {
    tsan_acquire(load.barrier);
    if (load.swizzle == kNoSwizzle) memcpy(load.shared, load.global, load.bytes);
    else
        for (unsigned at = 0; at < load.bytes; at += 16) {
            char* const chunk = (char*)load.shared + (at / 16 ^ load.swizzle) * 16;
            const unsigned left = load.source_bytes > at ? load.source_bytes - at : 0;
            const unsigned bytes = left < 16 ? left : 16;
            memcpy(chunk, (const char*)load.global + at, bytes);
            memset(chunk + bytes, 0, 16 - bytes);
        }
    MBarrier* barrier = (MBarrier*)load.barrier;
    tsan_release(barrier);
    barrier->bytes_and_phase -= (int32_t)load.bytes * 2;
    end_phase_if_complete(barrier);
}
// The block whose shared memory has the barrier: with clusters not always the one that starts the copy.
static Worker* owner_of(const void* barrier) {
    Worker* worker = own_worker();
    for (Worker* other : worker->launch->worker_of_block)
        if (other && (uint64_t)((const unsigned char*)barrier - other->dynamic_shared) < other->dynamic_bytes)
            return other;
    return worker;
}
static void start_load(const BulkLoad& load) {
    tsan_release(load.barrier);
    if (lands_at_once(own_worker())) land_load(load);
    else append(owner_of(load.barrier)->loads, load);
}
extern "C" void host_bulk_load(void* shared, const void* global, unsigned bytes, void* barrier) {
    CALLED_FROM_KERNEL();
    checked_mbarrier(barrier);
    check_bulk("bulk load", shared, global, bytes);
    start_load({shared, global, bytes, barrier, bytes, kNoSwizzle});
}
extern "C" void host_bulk_load_row(void* shared, const void* global, unsigned bytes, unsigned source_bytes,
                                   unsigned swizzle, void* barrier) {
    CALLED_FROM_KERNEL();
    checked_mbarrier(barrier);
    check_aligned("tensor copy", shared, bytes);
    check_aligned("tensor copy", global, 16);
    if (bytes != 128 || source_bytes > bytes || swizzle > 7)
        fail_here("tensor copy of %u bytes, %u of them from memory, swizzle %u", bytes, source_bytes,
                  swizzle);
    check_range("tensor copy writes", shared, bytes);
    check_range("tensor copy reads", global, source_bytes);
    start_load({shared, global, bytes, barrier, source_bytes, swizzle});
}
extern "C" int host_mbarrier_try_wait(void* barrier, unsigned parity) {
    CALLED_FROM_KERNEL();
    Worker* worker = own_worker();
    MBarrier* state = checked_mbarrier(barrier);
    if (state->phase() == parity && !state->pending) {
        std::vector<BulkLoad>& loads = worker->loads;
        size_t left = 0;
        for (size_t i = 0; i < loads.size(); i++) {
            const BulkLoad load = loads[i];
            if (load.barrier == barrier) land_load(load);
            else loads[left++] = load;
        }
        loads.resize(left);
    }
    if (state->phase() != parity) {
        tsan_acquire(barrier);
        return 1;
    }
    self()->waiting_object = barrier;
    poll_here(worker);
    self()->waiting_object = nullptr;
    return 0;
}
extern "C" void host_bulk_store(void* global, const void* shared, unsigned bytes) {
    CALLED_FROM_KERNEL();
    check_bulk("bulk store", shared, global, bytes);
    append(self()->stores, BulkStore{global, shared, bytes, self()->store_group, false});
}
extern "C" void host_bulk_add_f32(void* global, const void* shared, unsigned bytes) {
    CALLED_FROM_KERNEL();
    check_bulk("bulk addition", shared, global, bytes);
    append(self()->stores, BulkStore{global, shared, bytes, self()->store_group, true});
}
static void land_store(const BulkStore& store) {
    if (!store.adds_f32) {
        memcpy(store.global, store.shared, store.bytes);
        return;
    }
    float* const to = (float*)store.global;
    for (unsigned i = 0; i < store.bytes / 4; i++) to[i] += ((const float*)store.shared)[i];
}
extern "C" void host_bulk_commit() { self()->store_group++; }
extern "C" void host_bulk_wait(unsigned pending_groups) {
    land_groups(self()->stores, self()->store_group, pending_groups, land_store);
}

// ---- ends of threads and blocks ----
void reset_copies(Thread* thread) {
    thread->copies.clear();
    thread->stores.clear();
    thread->copy_group = thread->store_group = 0;
}
void finish_copies(Worker*, Thread* thread) {
    if (!thread->copies.empty()) host_cp_async_wait(~0u);
    if (!thread->stores.empty())
        fail_here(
            "the thread returned with %zu bulk store(s) not waited for: shared memory may be gone before it "
            "is read",
            thread->stores.size());
}
const char* unfinished_copies(Worker* worker) {
    return worker->loads.empty() ? nullptr : "a bulk load into shared memory was never waited for";
}
