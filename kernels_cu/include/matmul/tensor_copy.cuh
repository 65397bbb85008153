// Bulk copies of boxes of a matrix of bytes to shared memory (TMA), for sm_90 and later, with the 128-byte
// swizzle: chunk c (16 bytes) of row r lies at c ^ r % 8, where warpgroup products expect it.
#pragma once
#include "memory/barriers.cuh"

constexpr int kBoxBytes = 128;     // bytes per row of a box: the width of the swizzle

// Tensor map of a matrix, encoded by the driver. Kernels on the CPU read the first members.
struct alignas(64) TensorMap {
    u8 bytes[128];
};
struct TensorMapOnHost {
    u64 address, columns, rows, pitch;     // the pitch in bytes
    u32 box_rows, matrices;        // matrices follow one another
    u32 element_bytes;             // columns are counted in elements
};

// Arrives and announces the bytes of this thread's copies.
__device__ __forceinline__ void arrive_expecting(PhaseBarrier* barrier, u32 bytes) {
#ifdef CUPY_FP8_HOST
    host_mbarrier_arrive(barrier, bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)),
                 "r"(bytes) : "memory");
#endif
}

// Starts the copy of the box whose first element is (row, column). What lies outside the matrix becomes 0,
// and its bytes count too. Call from one thread.
__device__ __forceinline__ void copy_box(u8* shared, const TensorMap* map, int row, int column,
                                         PhaseBarrier* barrier) {
#ifdef CUPY_FP8_HOST
    const TensorMapOnHost& m = *reinterpret_cast<const TensorMapOnHost*>(map);
    for (u32 r = 0; r < m.box_rows; r++) {
        const i64 at = (i64)row + r, left = (i64)m.columns - column;
        const bool exists = at >= 0 && at < (i64)m.rows && left > 0;
        const u8* from = reinterpret_cast<const u8*>(m.address) + (exists ? at * (i64)m.pitch + column : 0);
        host_bulk_load_row(shared + r * kBoxBytes, from, kBoxBytes,
                           !exists ? 0 : left < kBoxBytes ? (u32)left : kBoxBytes, r % 8, barrier);
    }
#else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 :: "r"(shared_address(shared)), "l"(map), "r"(column), "r"(row),
                    "r"(shared_address(barrier)) : "memory");
#endif
}

// Like copy_box(), from one of a map's matrices; the L2 evicts the data first.
__device__ __forceinline__ void copy_box_of(u8* shared, const TensorMap* map, int matrix, int row, int column,
                                            PhaseBarrier* barrier) {
#ifdef CUPY_FP8_HOST
    const TensorMapOnHost& m = *reinterpret_cast<const TensorMapOnHost*>(map);
    for (u32 r = 0; r < m.box_rows; r++) {
        const i64 left = ((i64)m.columns - column) * m.element_bytes;
        const bool exists = (u64)row + r < m.rows && (u32)matrix < m.matrices && left > 0;
        const u64 at = ((u64)matrix * m.rows + row + r) * m.pitch + (u64)column * m.element_bytes;
        host_bulk_load_row(shared + r * kBoxBytes,
                           reinterpret_cast<const u8*>(m.address) + (exists ? at : 0), kBoxBytes,
                           !exists ? 0 : left < kBoxBytes ? (u32)left : kBoxBytes, r % 8, barrier);
    }
#else
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;"
                 :: "r"(shared_address(shared)), "l"(map), "r"(column), "r"(row), "r"(matrix),
                    "r"(shared_address(barrier)), "l"(policy) : "memory");
#endif
}

// Starts a copy of a multiple of 16 bytes; both ends are 16-byte aligned.
__device__ __forceinline__ void copy_bytes(void* shared, const void* global, u32 bytes,
                                           PhaseBarrier* barrier) {
#ifdef CUPY_FP8_HOST
    host_bulk_load(shared, global, bytes, barrier);
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#endif
}

// Starts the copy of a box from shared memory to the matrices of a map, with first element (matrix, row,
// column), or its addition to the f32 there (kAdds). Parts outside the matrix are skipped. The thread commits
// and waits separately. The L2 evicts the data first: operands are worth more there.
template <bool kAdds>
__device__ __forceinline__ void copy_box_out(const TensorMap* map, const u8* shared, int matrix, int row,
                                             int column) {
#ifdef CUPY_FP8_HOST
    const TensorMapOnHost& m = *reinterpret_cast<const TensorMapOnHost*>(map);
    const u64 first = (u64)column * m.element_bytes, end = m.columns * m.element_bytes;
    for (u32 r = 0; r < m.box_rows && (u64)row + r < m.rows && (u32)matrix < m.matrices; r++)
        for (u32 chunk = 0; chunk < kBoxBytes / 16 && first + chunk * 16 < end; chunk++) {
            const u64 at = ((u64)matrix * m.rows + row + r) * m.pitch + first + chunk * 16;
            u8* const to = reinterpret_cast<u8*>(m.address) + at;
            const u8* const from = shared + r * kBoxBytes + (chunk ^ r % 8) * 16;
            if (kAdds) host_bulk_add_f32(to, from, 16);
            else host_bulk_store(to, from, 16);
        }
#else
    const u32 from = shared_address(shared);
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    if (kAdds)
        asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group.L2::cache_hint "
                     "[%0, {%1, %2, %3}], [%4], %5;"
                     :: "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(from), "l"(policy) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint "
                     "[%0, {%1, %2, %3}], [%4], %5;"
                     :: "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(from), "l"(policy) : "memory");
#endif
}
// Starts the addition of f32 to those in global memory: a multiple of 16 bytes, both ends 16-byte aligned.
__device__ __forceinline__ void add_bytes_out(float* global, const u8* shared, u32 bytes) {
#ifdef CUPY_FP8_HOST
    host_bulk_add_f32(global, shared, bytes);
#else
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :: "l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void copy_out_commit() {
#ifdef CUPY_FP8_HOST
    host_bulk_commit();
#else
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Waits until all but this thread's last kLeft commits have read shared memory.
template <int kLeft>
__device__ __forceinline__ void copy_out_wait_read() {
#ifdef CUPY_FP8_HOST
    host_bulk_wait(kLeft);
#else
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(kLeft) : "memory");
#endif
}
__device__ __forceinline__ void copy_out_wait() {
#ifdef CUPY_FP8_HOST
    host_bulk_wait(0);
#else
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
// Orders stores to shared memory that this thread made, or saw by a barrier, before the copies that it
// starts.
__device__ __forceinline__ void publish_to_copies() {
#ifndef CUPY_FP8_HOST
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Writes the map of a group's matrix to global memory, made from that of all groups, which has the same box.
// Call from one whole warp; `scratch` is its own, in shared memory.
__device__ __forceinline__ void write_map(TensorMap* map, TensorMap* scratch, const TensorMap& all,
                                          const u8* address, i64 columns, i64 rows, i64 pitch) {
    const int lane = threadIdx.x % 32;
    reinterpret_cast<u32*>(scratch)[lane] = reinterpret_cast<const u32*>(&all)[lane];
    __syncwarp();
#ifdef CUPY_FP8_HOST
    if (lane == 0) {
        TensorMapOnHost& m = *reinterpret_cast<TensorMapOnHost*>(scratch);
        m = {reinterpret_cast<u64>(address), (u64)columns, (u64)rows, (u64)pitch, m.box_rows, 1, 1};
    }
    __syncwarp();
    reinterpret_cast<u32*>(map)[lane] = reinterpret_cast<const u32*>(scratch)[lane];
    __syncwarp();
#else
    const u32 at = shared_address(scratch);
    if (lane == 0) {
        asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                     :: "r"(at), "l"(address) : "memory");
        asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;"
                     :: "r"(at), "r"((u32)columns) : "memory");
        asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;"
                     :: "r"(at), "r"((u32)rows) : "memory");
        asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;"
                     :: "r"(at), "l"(pitch) : "memory");
    }
    __syncwarp();
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
                 "[%0], [%1], 128;" :: "l"(map), "r"(at) : "memory");
#endif
}
// Call before copying by a map in global memory that another thread has written.
__device__ __forceinline__ void acquire_map(const TensorMap* map) {
#ifndef CUPY_FP8_HOST
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory");
#endif
}
