// delay keeps the stream busy for a given number of nanoseconds, so that a benchmark can fill the queue
// behind it. One thread reads the clock; no memory is accessed. On the CPU it returns at once.

struct DelayParams {
    unsigned long long nanoseconds;
};

extern "C" __global__ void __launch_bounds__(32) delay(const __grid_constant__ DelayParams p) {
#ifndef CUPY_FP8_HOST
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < p.nanoseconds);
#endif
}
