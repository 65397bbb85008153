// move_groups moves groups of consecutive rows of bytes (docs/numerics.md, section 7):
//
//   to[start of g in to + i] = from[start of g in from + i] for every group g and i < sizes[g], else 0
//   In `from` each group takes its size rounded up to align_from rows, in the order of the groups.
//   In `to` each group takes its size rounded up to align_to rows, in `order`, or in their own if that is
//   null.
//
// from u8 [from_rows, row_bytes], sizes i32 or i64 [groups] -> to u8 [rows, row_bytes]. pad_groups has
// align_to > 1, unpad_groups align_from > 1, and sort_chunks an order. The scales, a second array with the
// same rows, move along; their thread blocks follow those of the first. A single scale for all rows is
// copied.
//
// A block of 256 threads writes up to 32 KB of consecutive rows, or part of one long row. Its first warp
// finds the source of each row by a scan over all sizes. (With an order there are two scans: for destinations
// and for sources.) Then every thread has up to eight 16-byte loads in flight, if rows are multiples of 16
// bytes at such addresses. Other rows are also stored 16 aligned bytes at a time, extracted from two aligned
// loads, or at the ends of rows assembled from words of 4 bytes or from bytes. Every byte of `to` is written
// once; nothing is cleared before.
//
// Wrong facts on the device are harmless: a negative size counts as 0, rows from past the end of `from` are
// 0, rows past the end of `to` are left out, and an index of no group is an empty chunk. Bytes moved per byte
// of `to`: 2, or 1 if it is 0. No defines.
#include "moe/moved_rows.cuh"

constexpr int kMostUnits = 8;    // loads in flight per thread
constexpr int kShifted = 2;      // units in flight per thread that are extracted from two loads
using Unit = Chunk<e8m0fnu, 16>;

// Division of numbers below 2^16 by one multiplication; exact, since a number times the error of the
// reciprocal is below 1 / divisor.
struct Divisor {
    u32 divisor, reciprocal;     // 2^32 / divisor rounded up
    __device__ __forceinline__ explicit Divisor(int by)
        : divisor(by), reciprocal(by > 0 ? ~0u / by + 1 : 0) {}
    __device__ __forceinline__ int quotient(int a) const {
        return divisor == 1 ? a : (int)((u64)(u32)a * reciprocal >> 32);
    }
};

// Loads the 16 bytes at `from` by two aligned loads. Returns false if these would leave the array [begin,
// end).
__device__ __forceinline__ bool load_shifted(const u8* from, const u8* begin, const u8* end, u32 (&word)[8]) {
    const u8* const aligned = from - reinterpret_cast<u64>(from) % 16;
    if (aligned < begin || aligned + 32 > end) return false;
    const Unit low = Unit::load(aligned), high = Unit::load(aligned + 16);
#pragma unroll
    for (int i = 0; i < 4; i++) word[i] = low.word[i], word[4 + i] = high.word[i];
    return true;
}
// Returns the 16 bytes that begin `shift` bytes (below 16) into the words.
__device__ __forceinline__ Unit cut_out(const u32 (&word)[8], u32 shift) {
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

// Writes those 16 bytes of `to` from `at` on that are between 0 and `bytes`, assembled from words of kStep
// bytes.
template <int kStep>
__device__ __forceinline__ void copy_words(const RowArray& a, const Shared& shared, u8* to, i64 column,
                                           int width, int bytes, int at) {
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

// Copies rows of any length at any address.
template <int kStep>
__device__ __forceinline__ void copy_pieces(const RowArray& a, i64 from_rows, const Shared& shared, u8* to,
                                            i64 column, int width, int bytes) {
    const int lead = (int)(reinterpret_cast<u64>(to) % 16);
    const u8* const end = a.from + from_rows * a.row_bytes;
    if (width == 0) return;
    const Divisor by_width(width);
    for (int base = (int)threadIdx.x * 16 - lead; base < bytes; base += kShifted * kThreads * 16) {
        u32 word[kShifted][8], shift[kShifted];
        bool whole[kShifted];                        // all bytes are of one row, cut from two loads
        u32 ragged = 0;                              // chunks assembled from words
#pragma unroll
        for (int u = 0; u < kShifted; u++) {
            const int at = base + u * kThreads * 16;
            const int row = at < bytes && at >= 0 ? by_width.quotient(at) : 0, in_row = at - row * width;
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
            if (!whole[u] && at < bytes) ragged |= 1u << u;
        }
#pragma unroll
        for (int u = 0; u < kShifted; u++)
            if (whole[u]) cut_out(word[u], shift[u]).store_whole(to + base + u * kThreads * 16);
#pragma unroll 1
        for (; ragged; ragged &= ragged - 1) {
            const int at = base + (__ffs(ragged) - 1) * kThreads * 16;
            copy_words<kStep>(a, shared, to, column, width, bytes, at);
        }
    }
}

// Copies rows that are multiples of 16 bytes at such addresses, with kUnits loads in flight per thread.
template <int kUnits>
__device__ __forceinline__ void copy_units(const Shared& shared, const u8* from, u8* to, int width,
                                           int bytes) {
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

extern "C" __global__ void __launch_bounds__(kThreads, 4)
move_groups(const __grid_constant__ GroupsParams p) {
    __shared__ Shared shared;
    const bool second = blockIdx.x >= p.data_blocks;
    const RowArray a = second ? p.scales : p.data;
    const u32 block = second ? blockIdx.x - p.data_blocks : blockIdx.x, tile = block / a.across;
    const i64 first = (i64)tile * a.rows_per_block, column = (i64)(block - tile * a.across) * a.row_share;
    const int count = left_of(p.rows - first, a.rows_per_block);
    const int width = left_of(a.row_bytes - column, a.row_share), bytes = count * width;
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
        // no more loads per thread than needed, since predicates cost time
        switch ((bytes + kThreads * 16 - 1) / (kThreads * 16)) {
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
