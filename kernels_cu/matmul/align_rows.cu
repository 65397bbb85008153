// Copies rows of bytes at any address to rows at multiples of 16 bytes, as tensor copies (TMA) read them
// (matmul/wgmma.cu). Bytes moved per byte: 2.
//
// align_rows    consecutive rows, one per warp
// align_groups  the rows of those groups, of both operands of "k", that need it, which only the device may
//               know. Bytes past a group's size are undefined; tensor copies do not read them. Thread blocks
//               are persistent. A warp copies 128 chunks of a group's rows at a time, whatever their length.
#include "matmul/any_bytes.cuh"

constexpr int kThreads = 256;

#ifdef ENTRY_align_rows
struct AlignRowsParams {
    const u8* from;
    u8* to;                        // rows of 16 * chunks bytes; those past the source row's end become 0
    i64 rows, row_bytes, chunks;
};

extern "C" __global__ void __launch_bounds__(kThreads)
align_rows(const __grid_constant__ AlignRowsParams p) {
    const i64 row = (i64)blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    if (row >= p.rows) return;
    const u8* const from = p.from + row * p.row_bytes;
    uint4* const to = reinterpret_cast<uint4*>(p.to) + row * p.chunks;
#pragma unroll 4
    for (i64 chunk = threadIdx.x % 32; chunk < p.chunks; chunk += 32) {
        const i64 at = chunk * kChunkBytes;
        const int bytes = left_of(p.row_bytes - at, kChunkBytes);
        to[chunk] = load_16(from + at, bytes, has_neighbours(at, p.row_bytes));
    }
}
#endif

#ifdef ENTRY_align_groups
#include "matmul/problem.cuh"

constexpr int kEach = 4, kUnitChunks = 32 * kEach;     // chunks of a lane, and of a warp, at a time

// Items of a GroupWalk: units of rows of A, then of B.
struct Units {
    static __device__ __forceinline__ i64 of(const Operand& operand, const GroupStart& g, i64 rows) {
        const i64 chunks = rows * Operand::copied_chunks(g);
        return operand.is_copied(g) ? (chunks + kUnitChunks - 1) / kUnitChunks : 0;
    }
    static __device__ __forceinline__ i64 of(const Product& p, const GroupStart& g) {
        return of(p.a, g, p.m) + of(p.b, g, p.n);
    }
    static __device__ __forceinline__ bool rest(const Product&) { return false; }
};

// A lane's chunks of a unit of an operand's rows.
struct LaneChunks {
    const Operand& operand;
    const i64 rows, bytes;         // of the operand, with all groups
    i64 row;                       // of the unit's first chunk
    u32 in_row, chunks;            // of the lane's first chunk in that row; chunks per row (below 2^27)
    i64 pitch, from;               // of the group's rows; beginning of that row in the operand
    uint4* to;

    __device__ __forceinline__ LaneChunks(const Operand& of, const GroupStart& g, i64 all_rows, i64 total,
                                          i64 unit)
        : operand(of), rows(all_rows), bytes(all_rows * total), chunks((u32)Operand::copied_chunks(g)),
          pitch(of.pitch_of(g)) {
        const i64 first = unit * kUnitChunks;
        row = first / chunks;
        in_row = (u32)(first - row * chunks) + threadIdx.x % 32;
        from = of.first(g) - of.data + row * pitch;
        to = reinterpret_cast<uint4*>(of.copy_of(g, rows)) + first + threadIdx.x % 32;
    }
    // Returns true if chunk i exists. at: its place in the operand.
    __device__ __forceinline__ bool find(int i, i64& at) const {
        const u32 chunk = in_row + 32 * i, down = chunk / chunks;
        at = from + down * pitch + (i64)(chunk - down * chunks) * kChunkBytes;
        return row + down < rows;
    }
    __device__ __forceinline__ void copy() const {
        i64 at[kEach];
        bool inner = true;
#pragma unroll
        for (int i = 0; i < kEach; i++) inner &= find(i, at[i]) && has_neighbours(at[i], bytes);
        // Without branches all loads are in flight at once. The ends of the operand's memory are rare.
        if (__all_sync(~0u, inner)) {
            uint4 chunk[kEach];
#pragma unroll
            for (int i = 0; i < kEach; i++) chunk[i] = load_inner_16(operand.data + at[i]);
#pragma unroll
            for (int i = 0; i < kEach; i++) to[32 * i] = chunk[i];
            return;
        }
#pragma unroll 1
        for (int i = 0; i < kEach; i++) {
            i64 one;
            if (!find(i, one)) break;
            to[32 * i] = load_16(operand.data + one, left_of(bytes - one, kChunkBytes),
                                 has_neighbours(one, bytes));
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 4)
align_groups(const __grid_constant__ Product p) {
    constexpr int kWarps = kThreads / 32;
    GroupWalk<Units, i32> groups(p);               // 2^31 units would be 4 TiB
    for (i32 unit = blockIdx.x * kWarps + threadIdx.x / 32; groups.find(unit); unit += gridDim.x * kWarps) {
        const i32 in_group = unit - groups.first, of_a = (i32)Units::of(p.a, groups.at, p.m);
        const bool is_a = in_group < of_a;
        LaneChunks(is_a ? p.a : p.b, groups.at, is_a ? p.m : p.n, p.total,
                   is_a ? in_group : in_group - of_a).copy();
    }
}
#endif
