// Barriers of a block and of a cluster, and collectives of a warp.
#include "runtime.h"

void reset_synchronisation(Worker* worker) {
    for (Barrier& barrier : worker->barriers) {
        barrier.arrived = barrier.expected = barrier.predicates = 0;
        barrier.waiting.clear();
    }
    const unsigned count = worker->launch->threads_per_block;
    for (unsigned w = 0; w * 32 < count; w++) {
        const unsigned lanes = count - w * 32;
        worker->warps[w]->live = lanes >= 32 ? ~0u : (1u << lanes) - 1;
        worker->warps[w]->in_use = 0;
    }
}

// ---- barriers ----
static void release_barrier(Worker* worker, Barrier& barrier) {
    barrier.result[barrier.generation % 2] = barrier.predicates == barrier.arrived;
    barrier.generation++;
    barrier.arrived = barrier.predicates = 0;
    *worker->idle = 0;
    for (Thread* thread : barrier.waiting) make_ready(worker, thread);
    barrier.waiting.clear();
}
// Counts the current thread in. Returns true for the last one.
//
// Every thread of the block counts, including those that have returned: the GPU may forgive a barrier after
// an early return, but it is undefined behaviour, which this project's kernels must avoid.
static bool arrive(Worker* worker, int id, int count, int predicate, int kind) {
    if (id < 0 || id >= (int)kMaxBarriers) fail_here("barrier id %d is not in 0..%u", id, kMaxBarriers - 1);
    Barrier& barrier = worker->barriers[id];
    const unsigned threads = worker->launch->threads_per_block, expected = count ? (unsigned)count : threads;
    if (count && (count % 32 || (unsigned)count > (threads + 31) / 32 * 32))
        fail_here("barrier %d: %d threads is not a multiple of 32 within the block's %u", id, count, threads);
    if (barrier.arrived && barrier.expected != expected)
        fail_here("barrier %d: %u threads expected here, %u by those already waiting", id, expected,
                  barrier.expected);
    if (barrier.arrived && barrier.kind != kind)
        fail_here("threads meet in different kinds of __syncthreads");
    tsan_release(&barrier.clock[barrier.generation % 2]);
    barrier.kind = kind;
    barrier.expected = expected;
    barrier.predicates += predicate != 0;
    if (++barrier.arrived < expected) return false;
    release_barrier(worker, barrier);
    return true;
}
extern "C" int host_barrier(int id, int count, int predicate, int kind) {
    CALLED_FROM_KERNEL();
    Worker* worker = own_worker();
    Barrier& barrier = worker->barriers[id & (kMaxBarriers - 1)];
    const unsigned parity = barrier.generation % 2;
    if (arrive(worker, id, count, predicate, kind)) {
        maybe_pass_turn(worker);
    } else {
        barrier.waiting.push_back(self());
        wait_here(worker, id ? "a named barrier" : "__syncthreads");
    }
    tsan_acquire(&barrier.clock[parity]);
    return barrier.result[parity];
}

// ---- clusters ----
extern "C" void host_cluster_barrier(unsigned blocks) {
    CALLED_FROM_KERNEL();
    Worker* worker = own_worker();
    Launch* launch = worker->launch;
    if (launch->options->cluster != blocks)
        fail_here("a cluster of %u blocks needs cluster=%u", blocks, blocks);
    ClusterBarrier& barrier = launch->cluster_barrier;
    const unsigned generation = barrier.generation;
    char* const clock = &barrier.clock[generation % 2];
    tsan_release(clock);
    host_progress();
    if (++barrier.arrived == blocks * launch->threads_per_block) {
        barrier.arrived = 0;
        barrier.generation++;
    }
    while (barrier.generation == generation) poll_here(worker);
    tsan_acquire(clock);
}
extern "C" void* host_shared_of_block(void* own, unsigned block) {
    CALLED_FROM_KERNEL();
    Worker* worker = own_worker();
    const uint64_t at = (uint64_t)((unsigned char*)own - worker->dynamic_shared);
    if (at >= worker->dynamic_bytes) fail_here("%p is not in dynamic shared memory", own);
    const std::vector<Worker*>& all = worker->launch->worker_of_block;
    const uint64_t in_cluster = block - worker->launch->ranges->first;
    if (in_cluster >= all.size()) fail_here("block %u is not of this cluster", block);
    if (!all[in_cluster]) fail_here("block %u has not begun or has ended", block);
    return all[in_cluster]->dynamic_shared + at;
}

// ---- warp collectives ----
static const char* collective_name(int kind) {
    switch (kind) {
        case HOST_SYNCWARP: return "__syncwarp";
        case HOST_SHUFFLE: return "__shfl_sync";
        case HOST_BALLOT: return "__ballot_sync";
        case HOST_REDUCE: return "__reduce_sync";
        default: return "__match_sync";
    }
}
static void complete_if_all_here(Worker* worker, HostWarp* warp, HostCollective& op, unsigned caller) {
    if (op.complete || (op.mask & warp->live & ~op.arrived)) return;
    op.complete = true;
    *worker->idle = 0;
    for (unsigned waiting = op.arrived & ~caller; waiting; waiting &= waiting - 1)
        make_ready(worker, warp->lanes[__builtin_ctz(waiting)]);
}
void thread_left_warp(Worker* worker, Thread* thread) {
    HostWarp* warp = thread->warp;
    warp->live &= ~(1u << thread->lane);
    for (unsigned used = warp->in_use; used; used &= used - 1)
        complete_if_all_here(worker, warp, warp->operations[__builtin_ctz(used)], 0);
}
// Returns the operation that the current lane joins: the one with its mask that still waits for it, or a new
// one.
static unsigned join(HostWarp* warp, unsigned mask, unsigned caller, int kind) {
    for (unsigned used = warp->in_use; used; used &= used - 1) {
        const unsigned slot = (unsigned)__builtin_ctz(used);
        const HostCollective& op = warp->operations[slot];
        if (op.complete || (op.arrived & caller)) continue;
        if (op.mask == mask) {
            if (op.kind != kind)
                fail_here("lanes of one warp meet in different collectives: %s and %s",
                          collective_name(op.kind), collective_name(kind));
            return slot;
        }
        if (op.mask & caller)
            fail_here("%s with mask %08x, but lanes of this warp wait for this one in %s with mask %08x",
                      collective_name(kind), mask, collective_name(op.kind), op.mask);
    }
    const unsigned slot = (unsigned)__builtin_ctz(~warp->in_use);
    HostCollective& op = warp->operations[slot];
    warp->in_use |= 1u << slot;
    op.mask = mask;
    op.kind = kind;
    op.arrived = op.departed = 0;
    op.complete = false;
    return slot;
}
extern "C" const HostCollective* host_collective(unsigned mask, int kind, uint64_t value) {
    CALLED_FROM_KERNEL();
    Worker* worker = own_worker();
    HostWarp* warp = host_thread->warp;
    const unsigned lane = host_thread->lane, caller = 1u << lane;
    if (!(mask & caller))
        fail_here("%s: the calling lane %u is not in the mask %08x", collective_name(kind), lane, mask);
    const unsigned slot = join(warp, mask, caller, kind);
    HostCollective& op = warp->operations[slot];
    if (kind == HOST_SYNCWARP) tsan_release(&warp->clock[slot]);  // the others order no memory
    op.value[lane] = value;
    op.arrived |= caller;
    complete_if_all_here(worker, warp, op, caller);
    if (!op.complete) wait_here(worker, collective_name(kind));
    if (kind == HOST_SYNCWARP) tsan_acquire(&warp->clock[slot]);
    op.departed |= caller;
    // nobody else runs before the caller has read the operation
    if (op.departed == op.arrived) warp->in_use &= ~(1u << slot);
    return &op;
}
