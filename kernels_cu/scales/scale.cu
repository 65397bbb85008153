// Scales of per-tensor scaling (docs/numerics.md, section 1):
//
//   compute_scale:           scale[i] = fl(target / max(amax[i], eps)), or 1 if amax[i] is 0, Inf or NaN
//   update_delayed_scaling:  scale[j] from the largest of history[:, j], which then rolls:
//                            new[i] = old[i + 1],    new[length - 1] = last,    new[0] = 0
//
// compute_scale           amax f32 [n] -> scale f32 [n], elementwise. Bytes moved per element: 8.
// update_delayed_scaling  history f32 [length, n] in place, whose row 0 is the current step; scale f32 [n];
//                         amax f32 [n] or null: `last` is the reduced amax if one is given and not 0, else
//                         old[0]. The maximum ignores NaN, which rolls like any value. Nothing is rounded but
//                         the scale. Bytes moved per element of the history: 8.
//
// A block of update_delayed_scaling has 512 threads and 2^columns_log2 whole columns of the history. A thread
// has consecutive rows of one column (ThreadRows), with eight loads in flight. Row i comes from row i + 1, so
// a thread reads only one row that another thread overwrites: the row after its last one. It reads that row
// before the barrier; after that no thread waits until the maxima are reduced. 32 columns are whole cache
// lines of every row. The op chooses fewer columns, and so fewer rows per thread, where few tensors have a
// long history. 1 x 1024 and 512 x 16 take one round of loads.
#include "memory/elementwise.cuh"
#include "scale/scale.cuh"

#ifdef ENTRY_compute_scale
struct ComputeScaleParams {
    const u32* amax;             // [n] f32
    u32* scale;                  // [n] f32
    i64 n;
    TensorScaleRule rule;
    u32 vector;                  // 1: amax and scale are 16-byte aligned
};

extern "C" __global__ void __launch_bounds__(kElementwiseThreads)
compute_scale(const __grid_constant__ ComputeScaleParams p) {
    ElementwiseChunks<f32, f32>(p.amax, p.n, p.vector).store(p.scale, [&](const Chunk<f32, 4>& amax) {
        Chunk<f32, 4> scale;
#pragma unroll
        for (int i = 0; i < 4; i++)
            scale.word[i] = as_bits(p.rule.scale_of(as_float(amax.word[i])));
        return scale;
    });
}
#endif

#ifdef ENTRY_update_delayed_scaling
struct UpdateDelayedScalingParams {
    u32* history;                // [length, n] f32
    float* scale;                // [n]
    const u32* amax;             // [n] f32, after a reduction over devices; or null
    i64 length, n;
    float target;                // fl(largest FP8 value * 2^-margin)
    u32 most_recent;             // 1: the scale follows `last` alone
    u32 columns_log2;            // 0 to 5
};

constexpr int kThreadsLog2 = 9, kThreads = 1 << kThreadsLog2;
constexpr int kInFlight = 8;                                         // loads per thread before the first use
// thread blocks per SM, with 48 KB in flight on an H200; on other GPUs the compiler allocates registers
// freely
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = 1;
#endif

// Returns the larger of an amax and a value, both as bits. Neither NaN nor negative values count.
__device__ __forceinline__ u32 raised(u32 amax, u32 bits) {
    return bits <= 0x7f800000u && bits > amax ? bits : amax;
}

// A thread's rows begin to end - 1 of one column of the history.
struct ThreadRows {
    i64 column, begin, end;
    bool has_column;             // the column exists
    bool has_rows;               // this thread has rows of it

    __device__ __forceinline__ explicit ThreadRows(const UpdateDelayedScalingParams& p) {
        const int columns = 1 << p.columns_log2, threads_log2 = kThreadsLog2 - p.columns_log2;
        column = ((i64)blockIdx.x << p.columns_log2) + (threadIdx.x & (columns - 1));
        has_column = column < p.n;
        const i64 rows = (p.length + (1 << threads_log2) - 1) >> threads_log2;
        begin = (threadIdx.x >> p.columns_log2) * rows;
        end = begin + rows < p.length ? begin + rows : p.length;
        has_rows = has_column && begin < end;
    }
};

// Moves a thread's rows up by one, all but the last.
struct RollingRows {
    const UpdateDelayedScalingParams& p;
    u32* row;                    // destination of the next value
    i64 left;                    // the thread's rows still to be moved
    u32 value[kInFlight];

    __device__ __forceinline__ void load() {
        const int count = left_of(left, kInFlight);
#pragma unroll
        for (int u = 0; u < kInFlight; u++) value[u] = u < count ? row[(u + 1) * p.n] : 0u;
    }
    // Moves the rows, of which load() has loaded the first ones. Returns their amax. Writes nothing unless
    // `changes`.
    __device__ __forceinline__ u32 roll(bool changes) {
        u32 amax = 0;
        while (left > 0) {
            const int count = left_of(left, kInFlight);
#pragma unroll
            for (int u = 0; u < kInFlight; u++) {
                amax = raised(amax, value[u]);
                if (changes && u < count) row[u * p.n] = value[u];
            }
            row += kInFlight * p.n;
            left -= kInFlight;
            if (left > 0) load();
        }
        return amax;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
update_delayed_scaling(const __grid_constant__ UpdateDelayedScalingParams p) {
    __shared__ u32 column_amax[32];
    if (threadIdx.x < 32) column_amax[threadIdx.x] = 0;
    const int columns = 1 << p.columns_log2, own = threadIdx.x & (columns - 1);
    const ThreadRows own_rows(p);
    const i64 column = own_rows.column;
    RollingRows rows{p, p.history + own_rows.begin * p.n + column,
                     own_rows.has_rows ? own_rows.end - own_rows.begin - 1 : 0, {}};
    u32* const final_row = rows.row + rows.left * p.n;

    // A short history has all its loads in flight before the first use. After the barrier, every row that
    // another thread overwrites has been read.
    const u32 current = own_rows.has_column ? p.history[column] : 0u;
    const u32 reduced = own_rows.has_column && p.amax ? p.amax[column] : 0u;
    const u32 beyond = own_rows.has_rows && own_rows.end < p.length ? final_row[p.n] : 0u;
    const bool writes_scale = own_rows.has_column && (int)threadIdx.x < columns;
    const float previous = writes_scale ? p.scale[column] : 0.0f;
    rows.load();
    __syncthreads();

    const u32 last = reduced << 1 ? reduced : current;               // the shift drops the sign
    const bool changes = own_rows.has_column && (!p.amax || last << 1);
    u32 amax_seen = rows.roll(changes);
    if (own_rows.has_rows) {
        const u32 newest = own_rows.end < p.length ? beyond : last;
        amax_seen = raised(amax_seen, newest);
        if (changes) *final_row = newest;
        if (changes && own_rows.begin == 0) p.history[column] = 0;
    }
    for (int step = columns; step < 32; step *= 2) {
        const u32 other = __shfl_xor_sync(~0u, amax_seen, step);
        amax_seen = other > amax_seen ? other : amax_seen;
    }
    if ((int)(threadIdx.x % 32) < columns) atomicMax(&column_amax[own], amax_seen);
    __syncthreads();
    if (writes_scale && changes) {
        const float amax = as_float(p.most_recent ? last : column_amax[own]), largest = as_float(kMaxF32);
        p.scale[column] = is_positive_number(amax) ? scale_to(p.target, amax, largest)
                          : is_infinite(previous)  ? largest
                                                   : previous;
    }
}
#endif
