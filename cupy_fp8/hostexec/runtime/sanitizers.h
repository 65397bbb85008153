// Tells the sanitizers about the runtime's stacks. The runtime itself is never instrumented; HOST_ASAN /
// HOST_TSAN say how the kernels are.
#pragma once
#include <stddef.h>

#ifdef HOST_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* stack, size_t bytes);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_stack, size_t* old_bytes);
void __asan_unpoison_memory_region(const volatile void* memory, size_t bytes);
void* __asan_region_is_poisoned(void* memory, size_t bytes);
}
#endif

#ifdef HOST_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
constexpr bool kTsan = true;
// Only barriers order threads, never the order in which the runtime happens to run them.
constexpr unsigned kTsanSwitchWithoutOrder = 1;
inline void tsan_acquire(const void* clock) { __tsan_acquire(const_cast<void*>(clock)); }
inline void tsan_release(const void* clock) { __tsan_release(const_cast<void*>(clock)); }

// libc calls (malloc, memmove, snprintf) are intercepted even when an uninstrumented function makes them.
// Inside a fiber the runtime's own use of them would look like races between CUDA threads.
struct TsanIgnore {
    TsanIgnore() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~TsanIgnore() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__); AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};
#else
constexpr bool kTsan = false;
inline void tsan_acquire(const void*) {}
inline void tsan_release(const void*) {}
struct TsanIgnore { TsanIgnore() {} };
#endif

#ifdef HOST_ASAN
constexpr bool kAsan = true;
inline bool asan_poisoned(const void* memory, size_t bytes) {
    return __asan_region_is_poisoned(const_cast<void*>(memory), bytes);
}
#else
constexpr bool kAsan = false;
inline bool asan_poisoned(const void*, size_t) { return false; }
#endif
