// Groups of consecutive rows moved to other places (docs/numerics.md, section 7): bytes move, nothing is computed.
//
// move_groups  from [from_rows, row_bytes] -> to [rows, row_bytes]. Group g has sizes[g] rows; in `from` the groups follow one another,
//              each taking its size rounded up to align_from rows; in `to` they follow one another in `order` (null: their own), each taking its
//              size rounded up to align_to rows. What of `to` is no group's row is 0: padding, and all that follows the last group.
//              pad_groups: align_to > 1; unpad_groups: align_from > 1; sort_chunks: an order. A second array of as many rows, the scales of the
//              first one's, moves with it, by blocks of threads that follow those of the first; a scale for all rows is copied.
//
// A block of threads writes up to 32 KB of neighbouring rows, or a part of one long row. Its first warp finds where each of its rows comes
// from by a scan over all sizes (with an order by two: where the chunk goes, and where it came from). Then every thread has up to eight
// 16-byte loads in flight; rows of 16-byte multiples at such addresses. Others are stored 16 aligned bytes at a time all the same, cut out of the
// two times 16 aligned bytes where they come from; at the ends of rows they are put together from words of 4 bytes, or bytes. Every byte of
// `to` is written once: no clearing before.
//
// Facts of the device made harmless: a negative size counts as 0; rows that would come from past the end of `from` are 0, those that would
// go past the end of `to` are left out; an index of no group is an empty chunk. Bytes moved per byte of `to`: 2 (1 where it is 0).
#include "groups/row_groups.cuh"

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

constexpr int kThreads = 256, kMostUnits = 8, kMostRows = 2048;
constexpr int kShifted = 2;                                          // units in flight that are cut out of two
constexpr int kPerLane = 4, kRound = 32 * kPerLane;                  // groups of a round of a scan
constexpr int kWindow = 1024;                                        // groups whose starts are known at a time
using Unit = Chunk<e8m0fnu, 16>;

struct Shared {
    i64 source[kMostRows];       // the row that each of the block's rows comes from, then where that is, in bytes; -1: zeros
    i32 group[kMostRows];        // with an order: the group of a row, whose start is still to be added
    i64 start[kWindow];          // with an order: where groups start in `from`
};

__device__ __forceinline__ i64 aligned_up(i64 rows, i64 align) { return (rows + align - 1) & -align; }
__device__ __forceinline__ i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// Sums over the lanes before and including this one, of both at once.
template <class T>
__device__ __forceinline__ void warp_prefix_sums(T& a, T& b) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T other_a = __shfl_up_sync(~0u, a, step), other_b = __shfl_up_sync(~0u, b, step);
        if ((int)(threadIdx.x % 32) >= step) a += other_a, b += other_b;
    }
}

// value[u] = from[index[u]], one of `count` i32 or i64; -1 where there is no such one. All loads are in flight at once: the address of
// one that does not exist is that of the first.
template <class Stored, int kCount>
__device__ __forceinline__ void load_stored(const void* from, const i64 (&index)[kCount], i64 count, i64 (&value)[kCount]) {
    Stored given[kCount];
#pragma unroll
    for (int u = 0; u < kCount; u++) given[u] = load_read_only(static_cast<const Stored*>(from) + (index[u] < count ? index[u] : 0));
#pragma unroll
    for (int u = 0; u < kCount; u++) value[u] = index[u] < count ? given[u] : -1;
}
template <int kCount>
__device__ __forceinline__ void load_all(const void* from, u32 wide, const i64 (&index)[kCount], i64 count, i64 (&value)[kCount]) {
    if (wide) load_stored<i64, kCount>(from, index, count, value);
    else load_stored<i32, kCount>(from, index, count, value);
}

// The sizes of a lane's groups of a round. There is at least one group.
template <class T, int kCount>
struct LaneGroups {
    T size[kCount];

    __device__ __forceinline__ void load(const GroupsParams& p, i64 round, bool ordered) {
        const i64 groups = p.splits.groups;
        i64 index[kCount], given[kCount];
#pragma unroll
        for (int u = 0; u < kCount; u++) index[u] = round + threadIdx.x % 32 * kCount + u;
        if (ordered) {
            load_all(p.order, p.order_wide, index, groups, given);
#pragma unroll
            for (int u = 0; u < kCount; u++) index[u] = given[u] >= 0 && given[u] < groups ? given[u] : groups;
        }
        load_all(p.splits.sizes, p.splits.wide, index, groups, given);
#pragma unroll
        for (int u = 0; u < kCount; u++) size[u] = (T)(given[u] < 0 ? 0 : given[u] < p.most() ? given[u] : p.most());
    }
};

// Where T is u32: rows of both arrays, at most, so that no sum of a round's groups overflows.
constexpr i64 kFewRows = 1 << 24;

// By one whole warp: the sources of `count` rows from `first_row` on; with an order counted from the start of their group.
template <class T>
__device__ __forceinline__ void find_in_groups(const GroupsParams& p, i64 first_row, int count, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const T first = (T)first_row, end = first + (T)count, most = (T)p.most(), align_from = (T)p.align_from, align_to = (T)p.align_to;
    const auto aligned = [](T rows, T align) { return (rows + align - 1) & (T)(0 - align); };
    constexpr bool kEarly = sizeof(T) == 4;                          // the next round's sizes on their way during this one
    constexpr int kCount = kEarly ? kPerLane : 1;                    // groups of a lane and round: there are not registers for four i64
    LaneGroups<T, kCount> next;
    if (kEarly && p.splits.groups > 0) next.load(p, 0, p.order);
    for (int r = lane; r < count; r += 32) shared.source[r] = -1, shared.group[r] = -1;
    __syncwarp();
    T from = 0, to = 0;                                              // rows before this round's groups
    for (i64 round = 0; round < p.splits.groups && to < end; round += 32 * kCount) {
        LaneGroups<T, kCount> own;
        if constexpr (kEarly) {
            own = next;
            if (round + 32 * kCount < p.splits.groups) next.load(p, round + 32 * kCount, p.order);
        } else {
            own.load(p, round, p.order);
        }
        T from_rows = 0, to_rows = 0;
#pragma unroll
        for (int u = 0; u < kCount; u++) {
            from_rows += aligned(own.size[u], align_from);
            to_rows += aligned(own.size[u], align_to);
        }
        if constexpr (sizeof(T) == 4) {                              // a round that ends before the first row costs two sums
            const T all = to + __reduce_add_sync(~0u, to_rows);
            if (all <= first) {
                from += __reduce_add_sync(~0u, from_rows);
                from = from < most ? from : most;
                to = all;                                            // not more than `first`
                continue;
            }
        }
        T from_end = from_rows, to_end = to_rows;
        warp_prefix_sums(from_end, to_end);
        T own_from = p.order ? 0 : from + from_end - from_rows, own_to = to + to_end - to_rows;
#pragma unroll
        for (int u = 0; u < kCount; u++) {
            const bool here = own.size[u] > 0 && own_to < end && own_to + own.size[u] > first;
#pragma unroll 1
            for (u32 left = __ballot_sync(~0u, here); left; left &= left - 1) {
                const int owner = __ffs(left) - 1;
                const i64 begin = (i64)__shfl_sync(~0u, own_to, owner) - first_row, rows = __shfl_sync(~0u, own.size[u], owner);
                const i64 start = __shfl_sync(~0u, own_from, owner);
                const int stop = left_of(begin + rows, count);
                const i32 index = p.order ? (i32)p.group_at(round + owner * kCount + u) : 0;
#pragma unroll 1
                for (int r = left_of(begin, count) + lane; r < stop; r += 32) shared.source[r] = start + r - begin, shared.group[r] = index;
            }
            if (!p.order) own_from += aligned(own.size[u], align_from);
            own_to += aligned(own.size[u], align_to);
        }
        from += __shfl_sync(~0u, from_end, 31);
        to += __shfl_sync(~0u, to_end, 31);
        from = from < most ? from : most;
        to = to < most ? to : most;
    }
    __syncwarp();
}

// By one whole warp, with an order: adds to each row's source where its group starts in `from`.
__device__ __forceinline__ void add_starts(const GroupsParams& p, int count, Shared& shared) {
    const int lane = threadIdx.x % 32;
    i64 before = 0;
    for (i64 window = 0; window < p.splits.groups; window += kWindow) {
        for (int round = 0; round < kWindow && window + round < p.splits.groups; round += kRound) {
            LaneGroups<i64, kPerLane> own;
            own.load(p, window + round, false);
            i64 rows = 0;
#pragma unroll
            for (int u = 0; u < kPerLane; u++) rows += own.size[u];
            const i64 end = warp_prefix_sum(rows);
            i64 at = before + end - rows;
#pragma unroll
            for (int u = 0; u < kPerLane; u++) {
                shared.start[round + lane * kPerLane + u] = at;
                at += own.size[u];
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

// Quotients of numbers below 2^16 by one, in one multiplication. (A number times what the reciprocal is too large by is below 1 / divisor.)
struct Divisor {
    u32 divisor, reciprocal;     // 2^32 / divisor rounded up
    __device__ __forceinline__ explicit Divisor(int by) : divisor(by), reciprocal(by > 0 ? ~0u / by + 1 : 0) {}
    __device__ __forceinline__ int quotient(int a) const { return divisor == 1 ? a : (int)((u64)(u32)a * reciprocal >> 32); }
};

// The 16 bytes from `from` on, of which `begin` and `end` are the ends of the array that they are in: two aligned loads, or false
// where these would leave it.
__device__ __forceinline__ bool load_shifted(const u8* from, const u8* begin, const u8* end, u32 (&word)[8]) {
    const u8* const aligned = from - reinterpret_cast<u64>(from) % 16;
    if (aligned < begin || aligned + 32 > end) return false;
    const Unit low = Unit::load(aligned), high = Unit::load(aligned + 16);
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = low.word[i], word[4 + i] = high.word[i];
    return true;
}
__device__ __forceinline__ Unit cut_out(const u32 (&word)[8], u32 shift) {                        // shift: bytes, below 16
    u32 by_two[6], by_one[5];
#pragma unroll
    for (int i = 0; i < 6; i++) by_two[i] = shift & 8 ? word[i + 2] : word[i];
#pragma unroll
    for (int i = 0; i < 5; i++) by_one[i] = shift & 4 ? by_two[i + 1] : by_two[i];
    Unit unit;
#pragma unroll
    for (int i = 0; i < 4; i++) unit.word[i] = __funnelshift_r(by_one[i], by_one[i + 1], shift % 4 * 8);
    return unit;
}

// 16 bytes of `to` from `at` on, of which those before 0 and from `bytes` on are not there: put together from words of kStep bytes.
template <int kStep>
__device__ __forceinline__ void copy_words(const RowArray& a, const Shared& shared, u8* to, i64 column, int width, int bytes, int at) {
    const int first = at > 0 ? at : 0;
    int row = first / width, in_row = first - row * width;
    Unit unit{};
#pragma unroll
    for (int i = 0; i < 16; i += kStep) {
        if (at + i < 0 || at + i >= bytes) continue;
        const i64 source = shared.source[row];
        if (source >= 0) {
            const u8* const from = a.from + source + column + in_row;
            if (kStep == 4) unit.word[i / 4] = load_read_only(reinterpret_cast<const u32*>(from));
            else unit.word[i / 4] |= (u32)load_read_only(from) << 8 * (i % 4);
        }
        in_row += kStep;
        if (in_row == width) in_row = 0, row++;
    }
    if (at >= 0 && at + 16 <= bytes) return unit.store_whole(to + at);
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (at + i >= 0 && at + i < bytes) to[at + i] = (u8)(unit.word[i / 4] >> 8 * (i % 4));
}

// Rows of any length at any address.
template <int kStep>
__device__ __forceinline__ void copy_pieces(const RowArray& a, i64 from_rows, const Shared& shared, u8* to, i64 column, int width,
                                            int bytes) {
    const int lead = (int)(reinterpret_cast<u64>(to) % 16);
    const u8* const end = a.from + from_rows * a.row_bytes;
    if (width == 0) return;
    const Divisor by_width(width);
    for (int base = (int)threadIdx.x * 16 - lead; base < bytes; base += kShifted * kThreads * 16) {
        u32 word[kShifted][8], shift[kShifted];
        bool whole[kShifted];                                        // of one row, and cut out
        u32 others = 0;
#pragma unroll
        for (int u = 0; u < kShifted; u++) {
            const int at = base + u * kThreads * 16, row = at < bytes && at >= 0 ? by_width.quotient(at) : 0, in_row = at - row * width;
            whole[u] = at >= 0 && at < bytes && in_row + 16 <= width;
            shift[u] = 0;
            const i64 source = whole[u] ? shared.source[row] : -1;
            if (source < 0) {
#pragma unroll
                for (int w = 0; w < 8; w++) word[u][w] = 0;
            } else {
                const u8* const from = a.from + source + column + in_row;
                shift[u] = (u32)(reinterpret_cast<u64>(from) % 16);
                whole[u] = load_shifted(from, a.from, end, word[u]);
            }
            if (!whole[u] && at < bytes) others |= 1u << u;
        }
#pragma unroll
        for (int u = 0; u < kShifted; u++)
            if (whole[u]) cut_out(word[u], shift[u]).store_whole(to + base + u * kThreads * 16);
#pragma unroll 1
        for (; others; others &= others - 1)
            copy_words<kStep>(a, shared, to, column, width, bytes, base + (__ffs(others) - 1) * kThreads * 16);
    }
}

// Rows of multiples of 16 bytes at such addresses, kUnits loads of a thread in flight.
template <int kUnits>
__device__ __forceinline__ void copy_units(const Shared& shared, const u8* from, u8* to, int width, int bytes) {
    const Divisor by_units(width / 16);
    for (int base = (int)threadIdx.x * 16; base < bytes; base += kUnits * kThreads * 16) {
        Unit unit[kUnits];
#pragma unroll
        for (int u = 0; u < kUnits; u++) {
            const int at = base + u * kThreads * 16, row = at < bytes ? by_units.quotient(at / 16) : 0;
            const i64 source = at < bytes ? shared.source[row] : -1;
            if (source >= 0) unit[u] = Unit::load(from + source + (at - row * width));
            else unit[u] = {};
        }
#pragma unroll
        for (int u = 0; u < kUnits; u++)
            if (base + u * kThreads * 16 < bytes) unit[u].store_whole(to + base + u * kThreads * 16);
    }
}

#ifdef ENTRY_move_groups
extern "C" __global__ void __launch_bounds__(kThreads, 4) move_groups(const __grid_constant__ GroupsParams p) {
    __shared__ Shared shared;
    const bool second = blockIdx.x >= p.data_blocks;
    const RowArray a = second ? p.scales : p.data;
    const u32 block = second ? blockIdx.x - p.data_blocks : blockIdx.x, run = block / a.across;
    const i64 first = (i64)run * a.rows_per_block, column = (i64)(block - run * a.across) * a.segment;
    const int count = left_of(p.rows - first, a.rows_per_block), width = left_of(a.row_bytes - column, a.segment), bytes = count * width;
    if (threadIdx.x < 32) {
        if (p.most() < kFewRows) find_in_groups<u32>(p, first, count, shared);
        else find_in_groups<i64>(p, first, count, shared);
        if (p.order) add_starts(p, count, shared);
        for (int r = threadIdx.x; r < count; r += 32) {
            const i64 source = shared.source[r];
            shared.source[r] = source >= 0 && source < p.from_rows ? source * a.row_bytes : -1;
        }
    }
    __syncthreads();
    u8* const to = a.to + first * a.row_bytes + column;
    const u8* const from = a.from + column;
    if (a.step == 16) {
        switch ((bytes + kThreads * 16 - 1) / (kThreads * 16)) {     // no more loads than there are bytes for: predicates cost too
            case 4: copy_units<4>(shared, from, to, width, bytes); break;
            case 5: copy_units<5>(shared, from, to, width, bytes); break;
            case 6: copy_units<6>(shared, from, to, width, bytes); break;
            case 7: copy_units<7>(shared, from, to, width, bytes); break;
            default: copy_units<kMostUnits>(shared, from, to, width, bytes);
        }
    } else if (a.step == 4) {
        copy_pieces<4>(a, p.from_rows, shared, to, column, width, bytes);
    } else {
        copy_pieces<1>(a, p.from_rows, shared, to, column, width, bytes);
    }
    if (blockIdx.x > 0) return;
    if (p.scale && threadIdx.x == 0) *p.scale_to = *p.scale;
    check_groups(p, shared);
}
#endif
