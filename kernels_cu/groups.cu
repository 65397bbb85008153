// Groups of consecutive rows moved to other places (docs/numerics.md, section 7): bytes move, nothing is computed.
//
// move_groups  from [from_rows, row_bytes] -> to [rows, row_bytes]. Group g has sizes[g] rows; in `from` the groups follow one another,
//              each taking its size rounded up to align_from rows; in `to` they follow one another in `order` (null: their own), each taking its
//              size rounded up to align_to rows. What of `to` is no group's row is 0: padding, and all that follows the last group.
//              pad_groups: align_to > 1; unpad_groups: align_from > 1; sort_chunks: an order. A second array of as many rows, the scales of the
//              first one's, moves with it, by blocks of threads that follow those of the first; a scale for all rows is copied.
//
// A block of threads writes up to 32 KB of neighbouring rows, or a part of one long row. Its first warp finds where each of its rows comes
// from by a scan over all sizes (with an order by two: where the chunk goes, and where it came from). Then every thread has eight 16-byte
// loads in flight; rows of 16-byte multiples at such addresses. Others are moved in words of 4 bytes, or byte by byte, and stored 16 bytes
// at a time all the same. Every byte of `to` is written once: no clearing before.
//
// Facts of the device made harmless: a negative size counts as 0; rows that would come from past the end of `from` are 0, those that would
// go past the end of `to` are left out; an index of no group is an empty chunk. Bytes moved per byte of `to`: 2 (1 where it is 0).
#include "groups.cuh"

// Rows that move, and how blocks of threads share them.
struct RowArray {
    const u8* from;              // [from_rows, row_bytes]
    u8* to;                      // [rows, row_bytes]
    i64 row_bytes;
    u32 rows_per_block;          // 1 where a row is taken by several blocks
    u32 across;                  // blocks that share a row
    u32 segment;                 // bytes of a row that a block takes: row_bytes, or where `across` is more than 1 a multiple of 16
    u32 step;                    // bytes that everything is a multiple of: 16, 4 or 1
};

struct GroupsParams {
    RowArray data, scales;
    Splits splits;
    const void* order;           // [groups] i32, or i64 where `order_wide`; null: groups keep their order
    i64 from_rows, rows;         // of from, and of to
    i64 align_from, align_to;    // powers of two
    const u32* scale;            // one word to be copied to `scale_to`, or null
    u32* scale_to;
    u32 order_wide;
    u32 exact;                   // groups are all of `from`; 0: rows may follow the last one (their number is a bound)
    u32 data_blocks;             // blocks of threads before those of `scales`

    // A group's size, between 0 and one more than any row there is: sums of it stay small.
    __device__ __forceinline__ i64 most() const { return (from_rows > rows ? from_rows : rows) + 1; }
    __device__ __forceinline__ i64 size(i64 group) const {
        const i64 given = splits.load(group);
        return given < 0 ? 0 : given < most() ? given : most();
    }
    // The group that comes `position`th in `to`; one that does not exist has size 0.
    __device__ __forceinline__ i64 group_at(i64 position) const {
        if (!order || position >= splits.groups) return position;
        const i64 group = order_wide ? load_read_only(static_cast<const i64*>(order) + position)
                                     : load_read_only(static_cast<const i32*>(order) + position);
        return group >= 0 && group < splits.groups ? group : splits.groups;
    }
};

constexpr int kThreads = 256, kUnits = 8, kMostRows = 256;
constexpr int kPerLane = 4, kRound = 32 * kPerLane;                  // groups of a round of a scan
constexpr int kWindow = 1024;                                        // groups whose starts are known at a time
using Unit = Chunk<e8m0fnu, 16>;

struct Shared {
    i64 source[kMostRows];       // the row that each of the block's rows comes from; -1: zeros
    i64 group[kMostRows];        // with an order: the group of a row, whose start is still to be added
    i64 start[kWindow];          // with an order: where groups start in `from`
};

__device__ __forceinline__ i64 aligned_up(i64 rows, i64 align) { return (rows + align - 1) & -align; }
__device__ __forceinline__ i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// By one whole warp: the sources of `count` rows from `first` on; with an order counted from the start of their group.
__device__ __forceinline__ void find_in_groups(const GroupsParams& p, i64 first, int count, Shared& shared) {
    const int lane = threadIdx.x % 32;
    for (int r = lane; r < count; r += 32) shared.source[r] = shared.group[r] = -1;
    __syncwarp();
    i64 from = 0, to = 0;                                            // rows before this round's groups
    for (i64 round = 0; round < p.splits.groups && to < first + count; round += kRound) {
        i64 size[kPerLane], group[kPerLane], from_rows = 0, to_rows = 0;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) group[u] = p.group_at(round + lane * kPerLane + u);
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            size[u] = p.size(group[u]);
            from_rows += aligned_up(size[u], p.align_from);
            to_rows += aligned_up(size[u], p.align_to);
        }
        const i64 from_end = warp_prefix_sum(from_rows), to_end = warp_prefix_sum(to_rows);
        i64 own_from = p.order ? 0 : from + from_end - from_rows, own_to = to + to_end - to_rows;
#pragma unroll
        for (int u = 0; u < kPerLane; u++) {
            const bool here = size[u] > 0 && own_to < first + count && own_to + size[u] > first;
            for (u32 left = __ballot_sync(~0u, here); left; left &= left - 1) {
                const int owner = __ffs(left) - 1;
                const i64 begin = __shfl_sync(~0u, own_to, owner) - first, rows = __shfl_sync(~0u, size[u], owner);
                const i64 start = __shfl_sync(~0u, own_from, owner), index = __shfl_sync(~0u, group[u], owner);
                const int end = left_of(begin + rows, count);
                for (int r = left_of(begin, count) + lane; r < end; r += 32) shared.source[r] = start + r - begin, shared.group[r] = index;
            }
            if (!p.order) own_from += aligned_up(size[u], p.align_from);
            own_to += aligned_up(size[u], p.align_to);
        }
        from = smaller(from + __shfl_sync(~0u, from_end, 31), p.most());
        to = smaller(to + __shfl_sync(~0u, to_end, 31), p.most());
    }
    __syncwarp();
}

// By one whole warp, with an order: adds to each row's source where its group starts in `from`.
__device__ __forceinline__ void add_starts(const GroupsParams& p, int count, Shared& shared) {
    const int lane = threadIdx.x % 32;
    i64 before = 0;
    for (i64 window = 0; window < p.splits.groups; window += kWindow) {
        for (int round = 0; round < kWindow && window + round < p.splits.groups; round += kRound) {
            i64 size[kPerLane], rows = 0;
#pragma unroll
            for (int u = 0; u < kPerLane; u++) rows += size[u] = p.size(window + round + lane * kPerLane + u);
            const i64 end = warp_prefix_sum(rows);
            i64 at = before + end - rows;
#pragma unroll
            for (int u = 0; u < kPerLane; u++) {
                shared.start[round + lane * kPerLane + u] = at;
                at += size[u];
            }
            before = smaller(before + __shfl_sync(~0u, end, 31), p.most());
        }
        __syncwarp();
        for (int r = lane; r < count; r += 32) {
            const i64 group = shared.group[r] - window;
            if (group >= 0 && group < kWindow) shared.source[r] += shared.start[group];
        }
        __syncwarp();
    }
}

// By a whole block: notes sizes that do not fit, and an order that is no permutation.
__device__ __forceinline__ void check_groups(const GroupsParams& p, Shared& shared) {
    if (threadIdx.x < 32) {
        bool negative = false;
        i64 plain = 0, from = 0;
        for (i64 g = threadIdx.x; g < p.splits.groups; g += 32) {
            const i64 size = p.size(g);
            negative |= p.splits.load(g) < 0;
            plain = smaller(plain + size, p.most());
            from = smaller(from + aligned_up(size, p.align_from), p.most());
        }
        plain = __shfl_sync(~0u, warp_prefix_sum(plain), 31);
        from = __shfl_sync(~0u, warp_prefix_sum(from), 31);
        const bool fits = p.exact ? from == p.from_rows : from <= p.from_rows && plain <= p.rows;
        const u32 any_negative = __ballot_sync(~0u, negative);
        if (threadIdx.x == 0) report(p.splits.errors, (any_negative ? kSplitNegative : 0u) | (fits ? 0u : kSplitSum));
    }
    if (!p.order) return;
    constexpr int kBits = kWindow * 64;                              // a bit for each group, where their starts were
    u32* seen = reinterpret_cast<u32*>(shared.start);
    bool wrong = false;
    for (i64 window = 0; window < p.splits.groups; window += kBits) {
        __syncthreads();
        for (int w = threadIdx.x; w < kBits / 32; w += kThreads) seen[w] = 0;
        __syncthreads();
        for (i64 position = threadIdx.x; position < p.splits.groups; position += kThreads) {
            const i64 group = p.group_at(position), bit = group - window;
            wrong |= group == p.splits.groups;
            if (bit >= 0 && bit < kBits && group < p.splits.groups) wrong |= atomicOr(seen + bit / 32, 1u << bit % 32) >> bit % 32 & 1;
        }
    }
    if (wrong) report(p.splits.errors, kOrder);
}

// Rows of any length at any address: kStep bytes are read at a time, 16 aligned ones written.
template <int kStep>
__device__ __forceinline__ void copy_pieces(const RowArray& a, const Shared& shared, u8* to, i64 column, int width, int bytes) {
    const int lead = (int)(reinterpret_cast<u64>(to) % 16);
    if (width == 0) return;
    for (int at = (int)threadIdx.x * 16 - lead; at < bytes; at += kThreads * 16) {
        const int first = at > 0 ? at : 0;
        int row = first / width, in_row = first - row * width;
        Unit unit{};
#pragma unroll
        for (int i = 0; i < 16; i += kStep) {
            if (at + i < 0 || at + i >= bytes) continue;
            const i64 source = shared.source[row];
            if (source >= 0) {
                const u8* from = a.from + source * a.row_bytes + column + in_row;
                if (kStep == 4) unit.word[i / 4] = load_read_only(reinterpret_cast<const u32*>(from));
                else unit.word[i / 4] |= (u32)load_read_only(from) << 8 * (i % 4);
            }
            in_row += kStep;
            if (in_row == width) in_row = 0, row++;
        }
        if (at >= 0 && at + 16 <= bytes) {
            unit.store_whole(to + at);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (at + i >= 0 && at + i < bytes) to[at + i] = (u8)(unit.word[i / 4] >> 8 * (i % 4));
    }
}

#ifdef ENTRY_move_groups
extern "C" __global__ void __launch_bounds__(kThreads, 4) move_groups(const __grid_constant__ GroupsParams p) {
    __shared__ Shared shared;
    __shared__ RowArray a;                                           // not in registers, of which the loads need all
    const bool second = blockIdx.x >= p.data_blocks;
    if (threadIdx.x == 0) a = second ? p.scales : p.data;
    __syncthreads();
    const u32 block = second ? blockIdx.x - p.data_blocks : blockIdx.x, run = block / a.across;
    const i64 first = (i64)run * a.rows_per_block, column = (i64)(block - run * a.across) * a.segment;
    const int count = left_of(p.rows - first, a.rows_per_block), width = left_of(a.row_bytes - column, a.segment), bytes = count * width;
    if (threadIdx.x < 32) {
        find_in_groups(p, first, count, shared);
        if (p.order) add_starts(p, count, shared);
        for (int r = threadIdx.x; r < count; r += 32)
            if (shared.source[r] >= p.from_rows) shared.source[r] = -1;
    }
    __syncthreads();
    u8* const to = a.to + first * a.row_bytes + column;
    const u8* const from = a.from + column;
    const i64 row_bytes = a.row_bytes;
    if (a.step == 16) {
        for (int base = (int)threadIdx.x * 16; base < bytes; base += kUnits * kThreads * 16) {
            Unit unit[kUnits];
#pragma unroll
            for (int u = 0; u < kUnits; u++) {
                const int at = base + u * kThreads * 16, row = at < bytes ? at / width : 0;
                const i64 source = at < bytes ? shared.source[row] : -1;
                if (source >= 0) unit[u] = Unit::load(from + source * row_bytes + (at - row * width));
                else unit[u] = {};
            }
#pragma unroll
            for (int u = 0; u < kUnits; u++)
                if (base + u * kThreads * 16 < bytes) unit[u].store_whole(to + base + u * kThreads * 16);
        }
    } else if (a.step == 4) {
        copy_pieces<4>(a, shared, to, column, width, bytes);
    } else {
        copy_pieces<1>(a, shared, to, column, width, bytes);
    }
    if (blockIdx.x > 0) return;
    if (p.scale && threadIdx.x == 0) *p.scale_to = *p.scale;
    check_groups(p, shared);
}
#endif
