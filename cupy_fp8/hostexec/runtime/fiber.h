// A fiber: a stack, and where its execution was suspended. On x86-64 switching costs about as much as a
// function call; other processors (or -DHOST_UCONTEXT) use the slower portable ucontext.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sanitizers.h"

#if !defined(__x86_64__)
#define HOST_UCONTEXT
#endif

#ifdef HOST_UCONTEXT
#include <ucontext.h>
#else
extern "C" void host_switch_context(void** saved_stack_pointer, void* stack_pointer);
#endif

struct Fiber {
    char* stack = nullptr;  // lowest usable address; a guard page lies below
    size_t stack_bytes = 0;
    void* asan_fake_stack = nullptr;
    void* tsan_fiber = nullptr;
#ifdef HOST_UCONTEXT
    ucontext_t context;
#else
    void* stack_pointer = nullptr;
#endif
};

inline size_t page_bytes() {
    static const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    return bytes;
}

// Resets the fiber to the start of `entry`. `slot` staggers the stacks: all of them start on a page boundary,
// and otherwise the busiest cache lines of every fiber would fall into the same few sets of the cache.
inline void fiber_restart(Fiber& fiber, void (*entry)(), unsigned slot) {
#ifdef HOST_ASAN
    __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
#endif
#ifdef HOST_TSAN
    if (fiber.tsan_fiber) __tsan_destroy_fiber(fiber.tsan_fiber);
    fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
    const size_t usable = fiber.stack_bytes - slot * 7 % 61 * 64;
#ifdef HOST_UCONTEXT
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = usable;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
#else
    // host_switch_context pops six registers, then the address it returns to. The stack is then
    // 8 mod 16, as after a call.
    void** top = reinterpret_cast<void**>(((uintptr_t)(fiber.stack + usable) & ~(uintptr_t)15) - 8);
    *top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int saved_register = 0; saved_register < 6; saved_register++) *--top = nullptr;
    fiber.stack_pointer = top;
#endif
}

inline void fiber_create(Fiber& fiber, size_t stack_bytes, void (*entry)(), unsigned slot) {
    const size_t guard = page_bytes();
    void* memory = mmap(nullptr, stack_bytes + guard, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE)) {
        perror("cupy_fp8 host executor: no memory for a fiber's stack");
        abort();
    }
    fiber.stack = (char*)memory + guard;
    fiber.stack_bytes = stack_bytes;
    fiber_restart(fiber, entry, slot);
}

inline void fiber_destroy(Fiber& fiber) {
#ifdef HOST_TSAN
    __tsan_destroy_fiber(fiber.tsan_fiber);
#endif
    munmap(fiber.stack - page_bytes(), fiber.stack_bytes + page_bytes());
}

inline void fiber_switch(Fiber& from, Fiber& to) {
#ifdef HOST_ASAN
    __sanitizer_start_switch_fiber(&from.asan_fake_stack, to.stack, to.stack_bytes);
#endif
#ifdef HOST_TSAN
    __tsan_switch_to_fiber(to.tsan_fiber, kTsanSwitchWithoutOrder);
#endif
#ifdef HOST_UCONTEXT
    swapcontext(&from.context, &to.context);
#else
    host_switch_context(&from.stack_pointer, to.stack_pointer);
#endif
#ifdef HOST_ASAN
    __sanitizer_finish_switch_fiber(from.asan_fake_stack, nullptr, nullptr);
#endif
}

// To be called first by a fiber's entry function.
inline void fiber_entered() {
#ifdef HOST_ASAN
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}
