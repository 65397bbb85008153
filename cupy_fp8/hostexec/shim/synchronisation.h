// Barriers of a block, warp collectives, and polling.
#pragma once

HOST_INLINE void __syncthreads() { host_barrier(0, 0, 0, HOST_BARRIER_PLAIN); }
HOST_INLINE int __syncthreads_and(int predicate) { return host_barrier(0, 0, predicate, HOST_BARRIER_AND); }

// bar.sync id, count: a barrier of `count` threads, a multiple of 32; 0: the whole block.
HOST_INLINE void host_named_barrier(int id, int count) { host_barrier(id, count, 0, HOST_BARRIER_PLAIN); }

// A polling loop must call host_yield() (or __nanosleep) each time round: fibers are not preempted.
HOST_INLINE void __nanosleep(unsigned) { host_yield(); }

HOST_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { host_collective(mask, HOST_SYNCWARP, 0); }

// ---- shuffles: they move registers and order no memory, exactly as on the GPU ----
template <class T> HOST_INLINE T host_shuffle(unsigned mask, T value, unsigned source) {
    const HostCollective* op = host_collective(mask, HOST_SHUFFLE, host_to_bits(value));
    if (!(op->arrived >> source & 1))
        host_fail("shuffle reads lane %u, which takes no part in it (mask %08x, took part %08x)", source,
                  mask, op->arrived);
    return host_from_bits<T>(op->value[source]);
}
template <class T> HOST_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned lane = host_thread->lane, segment = lane & ~(unsigned)(width - 1);
    return host_shuffle(mask, value, segment | ((unsigned)source & (unsigned)(width - 1)));
}
template <class T> HOST_INLINE T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    const unsigned lane = host_thread->lane, source = lane ^ (unsigned)lane_mask,
                   last = lane | (unsigned)(width - 1);
    return host_shuffle(mask, value, source > last ? lane : source);
}
template <class T> HOST_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = host_thread->lane, source = lane + delta, last = lane | (unsigned)(width - 1);
    return host_shuffle(mask, value, source > last ? lane : source);
}
template <class T> HOST_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = host_thread->lane, first = lane & ~(unsigned)(width - 1);
    return host_shuffle(mask, value, lane < first + delta ? lane : lane - delta);
}

// ---- votes, reductions, matches ----
HOST_INLINE unsigned __ballot_sync(unsigned mask, int predicate) {
    const HostCollective* op = host_collective(mask, HOST_BALLOT, predicate != 0);
    unsigned result = 0;
    for (int lane = 0; lane < 32; lane++)
        if (op->arrived >> lane & 1) result |= (unsigned)op->value[lane] << lane;
    return result;
}
HOST_INLINE int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
HOST_INLINE int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

template <class T, class Combine> HOST_INLINE T host_reduce(unsigned mask, T value, Combine combine) {
    const HostCollective* op = host_collective(mask, HOST_REDUCE, host_to_bits(value));
    bool first = true;
    T result = value;
    for (int lane = 0; lane < 32; lane++) {
        if (!(op->arrived >> lane & 1)) continue;
        const T other = host_from_bits<T>(op->value[lane]);
        result = first ? other : combine(result, other);
        first = false;
    }
    return result;
}
#define HOST_REDUCTION(name, T, expression)                                                       \
    HOST_INLINE T name(unsigned mask, T value) {                                                  \
        return host_reduce(mask, value, [](T a, T b) -> T { return expression; });                \
    }
HOST_REDUCTION(__reduce_max_sync, unsigned, a > b ? a : b)
HOST_REDUCTION(__reduce_max_sync, int, a > b ? a : b)
HOST_REDUCTION(__reduce_min_sync, unsigned, a < b ? a : b)
HOST_REDUCTION(__reduce_min_sync, int, a < b ? a : b)
HOST_REDUCTION(__reduce_add_sync, unsigned, a + b)
HOST_REDUCTION(__reduce_add_sync, int, (int)((unsigned)a + (unsigned)b))
HOST_REDUCTION(__reduce_or_sync, unsigned, a | b)
#undef HOST_REDUCTION

template <class T> HOST_INLINE unsigned __match_any_sync(unsigned mask, T value) {
    const uint64_t bits = host_to_bits(value);
    const HostCollective* op = host_collective(mask, HOST_MATCH, bits);
    unsigned result = 0;
    for (int lane = 0; lane < 32; lane++)
        if ((op->arrived >> lane & 1) && op->value[lane] == bits) result |= 1u << lane;
    return result;
}
