// Atomics, fences, and loads and stores with an order or a cache hint.
//
// Plain CUDA atomics are relaxed. For ThreadSanitizer the fence counts: an atomic by a thread that has
// executed __threadfence() publishes what the thread has done and seen; an atomic always sees what was
// published through its address. So "write, fence, take a ticket; the last one reads" is ordered, and the
// same without the fence is a race. (One fence counts for the rest of the thread's life: a fence forgotten
// only the second time is not found.)
#pragma once

#ifdef HOST_TSAN
#define HOST_RMW_ORDERED(call)                        \
    (host_thread->fenced ? call(__ATOMIC_ACQ_REL) : call(__ATOMIC_ACQUIRE))
#else
#define HOST_RMW_ORDERED(call) call(__ATOMIC_SEQ_CST)
#endif

HOST_INLINE void __threadfence() {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
#ifdef HOST_TSAN
    host_thread->fenced = true;
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

HOST_INLINE void __threadfence_system() { __threadfence(); }

// Flags between blocks must use ld.relaxed / st.relaxed and ld.acquire / st.release (device scope).
template <class T> HOST_INLINE T host_load_relaxed(const T* p) {
    return host_from_bits<T>(__atomic_load_n(reinterpret_cast<const host_bits_t<T>*>(p), __ATOMIC_RELAXED));
}
template <class T> HOST_INLINE T host_load_acquire(const T* p) {
    return host_from_bits<T>(__atomic_load_n(reinterpret_cast<const host_bits_t<T>*>(p), __ATOMIC_ACQUIRE));
}
template <class T> HOST_INLINE void host_store_relaxed(T* p, T value) {
    __atomic_store_n(reinterpret_cast<host_bits_t<T>*>(p), (host_bits_t<T>)host_to_bits(value),
                     __ATOMIC_RELAXED);
    host_progress();
}
template <class T> HOST_INLINE void host_store_release(T* p, T value) {
    __atomic_store_n(reinterpret_cast<host_bits_t<T>*>(p), (host_bits_t<T>)host_to_bits(value),
                     __ATOMIC_RELEASE);
    host_progress();
}

// ---- read-modify-write: `update` maps the old value to the new one; the old one is returned ----
template <class T, class Update> HOST_INLINE T host_read_modify_write(T* p, Update update) {
    using Bits = host_bits_t<T>;
    Bits* address = reinterpret_cast<Bits*>(p);
    Bits old = __atomic_load_n(address, __ATOMIC_RELAXED);
    for (;;) {
        const T before = host_from_bits<T>(old);
        const Bits after = (Bits)host_to_bits<T>(update(before));
#define HOST_EXCHANGE(order) __atomic_compare_exchange_n(address, &old, after, false, order, __ATOMIC_ACQUIRE)
        if (HOST_RMW_ORDERED(HOST_EXCHANGE)) return before;
#undef HOST_EXCHANGE
    }
}
#define HOST_ATOMIC(name, T, expression)                                                       \
    HOST_INLINE T name(T* p, T v) {                                                            \
        return host_read_modify_write(p, [v](T old) -> T { (void)old; return expression; });   \
    }
HOST_ATOMIC(atomicMax, int, old > v ? old : v)
HOST_ATOMIC(atomicMax, unsigned, old > v ? old : v)
HOST_ATOMIC(atomicOr, unsigned, old | v)
HOST_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)v))
HOST_ATOMIC(atomicAdd, unsigned, old + v)
HOST_ATOMIC(atomicAdd, unsigned long long, old + v)
HOST_ATOMIC(atomicExch, unsigned, v)
#undef HOST_ATOMIC

// cache hints have no meaning here
template <class T> HOST_INLINE T __ldg(const T* p) {
    host_check_aligned(p);
    return *p;
}
