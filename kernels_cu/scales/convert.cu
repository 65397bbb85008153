// convert_scales copies scales of blocks between layouts (docs/layouts.md; docs/numerics.md, section 5):
//
//   to[line, block] = scale of from[line, block]        line: a row, or a column for column-wise blocks
//
// from IN, to OUT; each layout is six strides (ScaleStrides). Scales of one type keep their bits. f32 -> E8M0
// gives the exponent of a power of two and 0 for 0; other scales become NaN and set a bit in the sticky word.
// E8M0 -> f32 gives 2^(e - 127). Padding is written as 0 and never read. Bytes moved per scale: sizeof(IN) +
// sizeof(OUT).
//
// A thread has four scales that are adjacent in `to`: 16 bytes of f32 or a word of E8M0, one store if they
// are aligned and whole, and one load if they are adjacent in `from` too. A block of 256 threads has a tile
// of 32 lines x 32 blocks, which is whole sectors in both arrays, or two tiles of swizzled scales (128 lines
// x 8 blocks). Such arrays are small and only latency counts: there is one launch and no shared memory,
// because sectors that two warps share meet in the L1.
//
// Defines:
//   IN, OUT      f32 or e8m0fnu: the width of loads and stores. (A word of deepgemm_sm100 is four E8M0
//                bytes.) Everything else is a run-time value.
#include "memory/errors.cuh"
#include "memory/chunks.cuh"

// Strides of a layout of scales, in elements. Without tiles, line32 = 32 line, line128 = 128 line and block4
// = 4 block.
struct ScaleStrides {
    i64 matrix;
    i64 line, line32, line128;   // strides of lines: within 32, of 32 within 128, of 128
    i64 block, block4;           // strides of blocks: within four, of four

    __device__ __forceinline__ i64 at(i64 m, i64 l, i64 b) const {
        return m * matrix + (l & 31) * line + (l >> 5 & 3) * line32 + (l >> 7) * line128
               + (b & 3) * block + (b >> 2) * block4;
    }
};

struct ScaleLayoutParams {
    const IN::storage* from;
    OUT::storage* to;
    u32* errors;
    ScaleStrides source, target;
    i64 lines, blocks;                                               // extents of `to`, without its padding
    i64 stored_lines, stored_blocks;                                 // extents of `to`, with its padding
    u32 down, across;                                                // tiles of a matrix
    u32 source_shift, target_shift;                      // log2 of the lines that share one line of scales
    u32 order;                                           // kFourLines to kSwizzled
};

constexpr int kThreads = 256;
// `order`: which four scales of a tile a thread has: of four lines; of four blocks; a packed word, where
// eight lines are a sector; a word of a swizzled tile.
constexpr u32 kFourLines = 0, kFourBlocks = 1, kPacked = 2, kSwizzled = 3;

// Line and block of the first of this thread's four scales.
struct FirstScale {
    i64 line, block;

    __device__ __forceinline__ FirstScale(u32 order, i64 down, i64 across) {
        const u32 t = threadIdx.x;
        line = down * (order == kSwizzled ? 128 : 32), block = across * (order == kSwizzled ? 8 : 32);
        if (order == kFourLines) line += t % 8 * 4, block += t / 8;
        else if (order == kFourBlocks) line += t / 8, block += t % 8 * 4;
        else if (order == kPacked) line += t % 8 + t / 64 * 8, block += t / 8 % 8 * 4;
        else line += t % 4 * 32 + t / 4 % 32, block += t / 128 * 4;
    }
};

// Returns element i of a chunk, packed as in memory.
template <class F>
__device__ __forceinline__ u32 element(const Chunk<F, 4>& c, int i) {
    if constexpr (sizeof(typename F::storage) == 4) return c.word[i];
    else return c.word[0] >> 8 * i & 0xffu;
}
template <class F>
__device__ __forceinline__ void set_element(Chunk<F, 4>& c, int i, u32 bits) {       // the element was 0
    if constexpr (sizeof(typename F::storage) == 4) c.word[i] = bits;
    else c.word[0] |= bits << 8 * i;
}
template <class F>
__device__ __forceinline__ bool is_aligned(const typename F::storage* p) {
    return reinterpret_cast<u64>(p) % Chunk<F, 4>::kBytes == 0;
}

template <class From, class To>
struct Conversion {
    static __device__ __forceinline__ u32 bits(u32 scale, bool&) { return scale; }
};
template <>
struct Conversion<e8m0fnu, f32> {
    static __device__ __forceinline__ u32 bits(u32 scale, bool&) { return as_bits(e8m0fnu::widen(scale)); }
};
template <>
struct Conversion<f32, e8m0fnu> {
    static __device__ __forceinline__ u32 bits(u32 scale, bool& wrong) {
        const u32 exponent = scale >> 23;                            // a negative scale has 256 or more
        if (!(scale & ~0x00400000u)) return 0;                       // 0, or 2^-127, a subnormal
        if (exponent - 1 < 254 && !(scale & 0x7fffffu)) return exponent;
        wrong = wrong || (scale & 0x7fffffffu) <= 0x7f800000u;       // a NaN scale is no error
        return kNanE8m0;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
convert_scales(const __grid_constant__ ScaleLayoutParams p) {
    const u32 row_of_tiles = blockIdx.x / p.across, matrix = row_of_tiles / p.down;
    const FirstScale at(p.order, row_of_tiles - matrix * p.down, blockIdx.x - row_of_tiles * p.across);
    const bool by_lines = p.order == kFourLines;
    // Returns how many of the thread's scales lie within `lines` lines and `blocks` blocks.
    const auto of_four = [&](i64 lines, i64 blocks) {
        if (at.line >= lines || at.block >= blocks) return 0;
        return by_lines ? left_of(lines - at.line, 4) : left_of(blocks - at.block, 4);
    };
    const int stored = of_four(p.stored_lines, p.stored_blocks), count = of_four(p.lines, p.blocks);
    if (!stored) return;

    Chunk<IN, 4> in{};
    if (count) {
        const i64 line = at.line >> p.target_shift << p.source_shift;
        const IN::storage* from = p.from + p.source.at(matrix, line, at.block);
        const i64 step = by_lines ? p.source.line : p.source.block;
        if (count == 4 && step == 1 && is_aligned<IN>(from)) {
            in = Chunk<IN, 4>::load(from);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < count) set_element(in, i, load_read_only(from + i * step));
        }
    }
    Chunk<OUT, 4> out{};
    bool wrong = false;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < count) set_element(out, i, Conversion<IN, OUT>::bits(element(in, i), wrong));
    if (wrong) report(p.errors, kScaleNotPowerOfTwo);

    OUT::storage* to = p.to + p.target.at(matrix, at.line, at.block);
    if (stored == 4 && is_aligned<OUT>(to)) {
        if constexpr (Chunk<OUT, 4>::kBytes == 16) out.store_whole(to);
        else out.store(to);
    } else {
        out.store_partial(to, stored);
    }
}
