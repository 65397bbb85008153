// A window is memory of a rank that the other ranks write to. A launch is one exchange: all ranks make the
// same ones in the same order, and each ends when everything for its rank has arrived.
//
// Flags of a window: flag [0, r] is the last exchange whose rows rank r has sent here, flag [1, r] the last
// one that rank r has begun. Exchanges are numbered from 1.
//
// What an exchange leaves in a window is read by later launches of its rank's stream, before the rank's next
// exchange. So a rank that has sent the rows of a later exchange no longer reads those of an earlier one, and
// a part of the windows may be written again if any exchange, of another part, lies between. If none does,
// ranks first tell each other that they have begun.
#pragma once
#include "memory/errors.cuh"
#include "moe/routes.cuh"
#include "numerics/amax.cuh"

// words of Windows::state, initially 0
constexpr int kDone = 0, kExchanges = 1, kFailed = 2, kUsed = 3;

struct Windows {
    const u64* at;               // [ranks] addresses of all ranks' windows
    u32* state;                  // this rank's: blocks done, exchanges done, whether one has failed, and the
                                 // last exchange of each direction
    u32* late;                   // [ranks] in host memory: exchange for which a rank did not come in time
    u32* errors;
    i64 flags;                   // offset of the flags [2, ranks] in a window
    u64 timeout;                 // nanoseconds
    i32 me, ranks;
    u32 direction;               // index of the part of the windows that is written
    u32 staged;                  // 1: `at` is memory of this rank, from which NCCL sends; nobody waits
};

// ---- memory that other GPUs see ----
__device__ __forceinline__ u32 load_acquire(const u32* flag) {
#ifdef CUPY_FP8_HOST
    return host_load_acquire(flag);
#else
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
#endif
}
__device__ __forceinline__ void store_release(u32* flag, u32 value) {
#ifdef CUPY_FP8_HOST
    host_store_release(flag, value);
#else
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
#endif
}
__device__ __forceinline__ u64 nanoseconds(u64 polls) {
#ifdef CUPY_FP8_HOST
    host_yield();
    return polls;
#else
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
#endif
}
__device__ __forceinline__ bool has_come(const u32* flag, u32 exchange, u64 timeout) {
    const u64 start = nanoseconds(0);
    for (u64 polls = 1; (i32)(load_acquire(flag) - exchange) < 0; polls++)
        if (nanoseconds(polls) - start > timeout) return false;
    return true;
}

// ---- an exchange ----
// Whole blocks call begin(), write rows, and call end().
class Exchange {
public:
    __device__ __forceinline__ explicit Exchange(const Windows& windows) : w(windows) {}

    // Returns true if rows may be written.
    __device__ __forceinline__ bool begin() {
        if (w.staged) return true;
        const u32 before = load_relaxed(w.state + kExchanges);
        number = before + 1;
        bool fine = !load_relaxed(w.state + kFailed);
        if (fine && before && load_relaxed(w.state + kUsed + w.direction) == before) {
            if (blockIdx.x == 0) tell(1);
            fine = all_came(1);
        }
        return __syncthreads_and(fine);
    }

    // Returns true in the one block that continues once the rows of all ranks have arrived.
    __device__ __forceinline__ bool end(bool fine) {
        if (w.staged) return false;
        __shared__ bool last;
        __threadfence_system();          // What this thread has written comes before flags.
        __syncthreads();
        if (threadIdx.x == 0) last = atomicAdd(w.state + kDone, 1u) == gridDim.x - 1;
        __syncthreads();
        if (!last) return false;
        __threadfence_system();
        // Another block may have waited for a rank in vain and sent nothing.
        fine = fine && !load_relaxed(w.state + kFailed);
        if (fine) {
            tell(0);
            fine = all_came(0);
        }
        fine = __syncthreads_and(fine);
        if (threadIdx.x == 0) {
            atomicExch(w.state + kDone, 0u);
            atomicExch(w.state + kUsed + w.direction, number);
            atomicExch(w.state + kExchanges, number);
        }
        return fine;
    }

    __device__ __forceinline__ u8* window(int rank) const { return reinterpret_cast<u8*>(w.at[rank]); }

private:
    const Windows& w;
    u32 number = 0;

    __device__ __forceinline__ u32* flag(int window_of, int kind, int rank) const {
        return reinterpret_cast<u32*>(window(window_of) + w.flags) + kind * w.ranks + rank;
    }
    __device__ __forceinline__ void tell(int kind) const {
        for (int rank = threadIdx.x; rank < w.ranks; rank += blockDim.x)
            store_release(flag(rank, kind, w.me), number);
    }
    __device__ __forceinline__ bool all_came(int kind) const {
        bool all = true;
        for (int rank = threadIdx.x; rank < w.ranks; rank += blockDim.x) {
            if (has_come(flag(w.me, kind, rank), number, w.timeout)) continue;
            all = false;
            atomicExch(w.late + rank, number);
            atomicExch(w.state + kFailed, 1u);
            report(w.errors, kRankLate);
        }
        return all;
    }
};

// ---- work of a warp ----
// items per lane, items per piece of a row
constexpr int kItems = 4, kPieceItems = 32 * kItems;

// Work units are pieces of rows; warps take every n-th one. There are fewer than 2^31 rows.
class WarpUnits {
public:
    u32 row, piece;

    __device__ __forceinline__ explicit WarpUnits(u32 pieces_of_row) : pieces(pieces_of_row) {
        const u32 warps = blockDim.x / 32;
        const u32 first = blockIdx.x * warps + threadIdx.x / 32, step = gridDim.x * warps;
        row = first / pieces, piece = first - row * pieces;
        row_step = step / pieces, piece_step = step - row_step * pieces;
    }
    __device__ __forceinline__ void next() {
        row += row_step, piece += piece_step;
        if (piece >= pieces) piece -= pieces, row++;
    }

private:
    u32 pieces, row_step, piece_step;
};

// Ranks take turns in receiving rows, beginning with the one after this rank, while they have any left.
struct Turn {
    int to;
    u32 i;                       // index of the row for that rank

    __device__ __forceinline__ Turn(const Windows& w, u32 row) {
        const u32 ranks = (u32)w.ranks;
        i = row / ranks;
        const u32 after = w.me + 1 + row - i * ranks;
        to = (int)(after < ranks ? after : after - ranks);
    }
};
// Returns the number of turns.
__device__ __forceinline__ u32 turns(const Windows& w, const i32* sizes) {
    i32 most = 0;
    for (int rank = 0; rank < w.ranks; rank++) {
        const i32 size = load_read_only(sizes + rank);
        most = size > most ? size : most;
    }
    return (u32)most * w.ranks;
}
// Returns the row of another rank's window for the i-th row from this rank.
__device__ __forceinline__ i64 landing(const Windows& w, i64 region, const Turn& turn) {
    return (w.staged ? turn.to : w.me) * region + turn.i;
}

template <class T>
__device__ __forceinline__ void copy_items(u8* to, const u8* from, i64 item_step, int items) {
    T item[kItems];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < kItems; u++)
        if (lane + 32 * u < items) item[u] = load_piece<T>(from + (lane + 32 * u) * item_step);
#pragma unroll
    for (int u = 0; u < kItems; u++)
        if (lane + 32 * u < items) *reinterpret_cast<T*>(to + (lane + 32 * u) * sizeof(T)) = item[u];
}
// Copies a piece of a row by one warp: items of `step` bytes, item_step apart in `from`.
__device__ __forceinline__ void copy_piece(u8* to, const u8* from, i64 row_bytes, u32 step, i64 item_step,
                                           u32 piece) {
    const i64 first = (i64)piece * kPieceItems;
    const int items = left_of(row_bytes / step - first, kPieceItems);
    to += first * step;
    from += first * item_step;
    if (step == 16) copy_items<uint4>(to, from, item_step, items);
    else if (step == 4) copy_items<u32>(to, from, item_step, items);
    else if (step == 2) copy_items<u16>(to, from, item_step, items);
    else copy_items<u8>(to, from, item_step, items);
}
