// Rows of y, or of da and db, in lines of eight elements per thread (swiglu_tensor.cu, swiglu_blocks.cu, swiglu_mx.cu). x and grad
// come through shared memory (cp.async): what is on its way takes no registers, and is the next tile's while this one is stored.
//
// A block of kLineThreads threads owns 128 columns of y and some tiles of 128 rows, one below the other. Threads read what they have
// copied themselves: nobody waits for anything but its own copies (and for other experts' biases). Rows and columns that do not exist are
// zeros; where a bias is added to these, the results are made zeros.
#pragma once
#if OPTIONS
#include "swiglu/swiglu_options.cuh"
#endif

constexpr int kLineThreads = PLAIN == 1 ? 512 : 256;                 // PLAIN 1: a group of all is a tile, whose columns have scales
constexpr int kLineRows = PLAIN == 1 ? 4 : 4 / kParts, kLines = kLineRows * kParts;          // of a group
constexpr int kPatches = kLineThreads / Tile::kColumnPatches, kStepRows = kPatches * kLineRows;      // threads down; rows of a group of all
constexpr int kSteps = Tile::kRows / kStepRows;                      // in a tile
constexpr int kApart = PLAIN == 1 ? 1 : kPatches;                    // a thread's rows: adjacent where they are transposed
// Also in ops/quantize/swiglu.py.
constexpr int kStages = (sizeof(IN::storage) == 2 ? 4 : 2) / (PLAIN == 1 && BACKWARD ? 2 : 1);
constexpr int kAtOnce = (kStages + 1) / 2;               // rows that have memory; that are requested together
constexpr int kArrays = 2 + BACKWARD, kSlot = kLineThreads * 16, kStageBytes = kArrays * kLoads * kSlot;
static_assert(kLineRows % kAtOnce == 0, "rows are requested in the place of those that have been read");
// Blocks that share a multiprocessor: 32 warps of y, 24 of gradients, 16 of both their directions. Calls of divisions take registers, and
// elsewhere some programs take a few more.
#if PLAIN == 1 && DIVIDE
constexpr int kLineBlocks = 1;
#elif PLAIN == 1 && OPTIONS && !defined(ENTRY_swiglu_cast)
constexpr int kLineBlocks = BACKWARD || sizeof(IN::storage) == 4 ? 1 : 2;
#elif PLAIN == 1
constexpr int kLineBlocks = 2 - BACKWARD;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && __CUDACC_VER_MAJOR__ >= 13
constexpr int kLineBlocks = 4 - BACKWARD;
#else
constexpr int kLineBlocks = BACKWARD ? 2 : sizeof(IN::storage) == 4 ? 3 : 4;
#endif

// Of a block: as many as it has threads, where shared memory is enough. Also in ops/quantize/swiglu.py.
#if OPTIONS && defined(ENTRY_swiglu_block) && !BACKWARD
constexpr int kMostRows = kLineThreads / (sizeof(IN::storage) == 4 ? 2 : 1) / (1 + EXPERTS);
#elif OPTIONS
constexpr int kMostRows = kLineThreads;
#endif

// Of this thread's row r in a step.
__device__ __forceinline__ int line_row(int r) {
    const int patch = threadIdx.x / Tile::kColumnPatches;
    return (PLAIN == 1 ? patch * kLineRows : patch) + r * kApart;
}
// An address from which others follow by addition: the compiler would multiply anew for each.
template <class T>
__device__ __forceinline__ void pin(T*& p) {
#ifndef CUPY_FP8_HOST
    asm volatile("" : "+l"(p));
#endif
}

// A block's first tile, in tiles. Along rows of tiles.
struct StreamPosition {
    u32 down, across;

    __device__ __forceinline__ StreamPosition(const SwigluCall& call, u32 tiles) {
        const u32 all = (u32)((call.half() + Tile::kColumns - 1) / Tile::kColumns), line = all ? blockIdx.x / all : 0;
        down = line * tiles, across = blockIdx.x - line * all;
    }
    __device__ __forceinline__ TilePosition tile() const { return {0, (i64)down * Tile::kRows, (i64)across * Tile::kColumns}; }
#if OPTIONS
    // To the block's next tile, where there is one. tiles: a power of two.
    __device__ __forceinline__ bool advance(const SwigluCall& call, u32 tiles) {
        down++;
#ifndef CUPY_FP8_HOST
        asm volatile("" : "+r"(across));                             // what follows from it takes no registers all the time
#endif
        return down & (tiles - 1) && (i64)down * Tile::kRows < call.rows;
    }
    // The first of its results.
    __device__ __forceinline__ TilePosition results(const SwigluCall& call) const {
        return {0, (i64)down * Tile::kRows, (i64)across * (adjoin(call) ? 2 * Tile::kColumns : Tile::kColumns)};
    }
#endif
};

class Stream {
public:
    int left;                    // how many rows exist from this thread's next one on; none where the columns do not (gradients with OPTIONS: `absent`)

    // at: of the block's first tile.
    __device__ __forceinline__ Stream(const SwigluCall& call, const TilePosition& at, int tiles, u8* shared)
        : half(call.half()), slots(shared + threadIdx.x * 16), stage(0)
#if OPTIONS
        , call(call)
#endif
    {
        const i64 row = at.row + line_row(0), column = at.column + Tile::patch_column();
#if OPTIONS
        left = BACKWARD || column < half ? left_of(call.rows - row, tiles * Tile::kRows - line_row(0)) : 0;
        const i64 in_row = first_of_row(call, at.column);
        x = call.x + row * (2 * half) + in_row;
#if BACKWARD
        absent = column < half ? 0 : kBothParts;
        grad = call.grad + row * half + column;
        if (call.interleaved()) {
            absent = in_row >= call.columns ? kBothParts : in_row + Tile::kColumns >= call.columns ? kBothParts & ~kFirstPart : 0;
            grad -= Tile::patch_column() / 2;
        }
#endif
        Biases::load(call, at);
#else
        left = column < half ? left_of(call.rows - row, tiles * Tile::kRows - line_row(0)) : 0;
        x = call.x + row * (2 * half) + column;
#if BACKWARD
        grad = call.grad + row * half + column;
#endif
#endif
        request(0);
        if (kStages > kAtOnce) request(kAtOnce);
        const i64 own = at.row + threadIdx.x;
#if OPTIONS
        if (threadIdx.x < kMostRows)
#endif
            shared_probs()[threadIdx.x] = call.probs && own < call.rows ? call.probs[own] : 1.0f;
        __syncthreads();
    }
    // use(r, v, sigma) of the rows of a group. v: of a, b, grad; OPTIONS, and not BACKWARD: of a * sigma, b. at: of the block's tile.
    template <class Use>
    __device__ __forceinline__ void each(const StreamPosition& at, Use use) {
#if OPTIONS && EXPERTS
        others = change_biases(at.tile());
#endif
#pragma unroll
        for (int r = 0; r < kLineRows; r++) {
            if (r % kAtOnce == 0) copy_async_wait<(kStages > kAtOnce)>();
            float v[kArrays][8], sigma[8];
#if OPTIONS
            read_options(at, r, v, sigma);
#else
            Eight raw;
            read(r, 0, raw);
            widen_eight(raw, v[0]);
#pragma unroll
            for (int i = 0; i < 8; i++) sigma[i] = v[0][i];
            sigmoids(sigma, all_quick(raw));
#pragma unroll
            for (int k = 1; k < kArrays; k++) {
                read(r, k, raw);
                widen_eight(raw, v[k]);
            }
#endif
            if (r % kAtOnce == kAtOnce - 1) request(r + 1 - kAtOnce + kStages);
            use(r, v, sigma);
        }
        stage = (stage + kLineRows) % kStages;
    }
#if OPTIONS
    // How many of the rows exist that are `left`, of this thread's columns of a part.
    __device__ __forceinline__ int left_in(int part, int left) const { return has(part) ? left : 0; }
#endif
#if OPTIONS && BACKWARD
    // Of the row that each() has told last. sums: row r of both parts.
    __device__ __forceinline__ void gradients(const SwigluCall& call, int r, float weight, float (&v)[kArrays][8], const float (&sigma)[8],
                                              float (&values)[kParts][8], u32 (&sums)[2][kLineRows]) const {
        float of_parts[2] = {};
        ::gradients(call, weight, v[0], v[1], v[2], sigma, clipped, values, of_parts);
        if (!call.sums) return;
        if (!call.interleaved()) of_parts[0] = add_rn(of_parts[0], of_parts[1]);
#pragma unroll
        for (int part = 0; part < 2; part++) sums[part][r] = has(part) ? as_bits(of_parts[part]) : kAbsentTerm;
    }
    __device__ __forceinline__ void store_sums(const SwigluCall& call, const StreamPosition& at, const u32 (&sums)[2][kLineRows]) const {
        if (!call.sums) return;
        const i64 row = at.tile().row + line_row(0), first = at.results(call).column;
        ::store_sums(call, sums[0], row, kApart, first / Tile::kColumns, left);
        if (call.interleaved() && first + Tile::kColumns < call.columns)
            ::store_sums(call, sums[1], row, kApart, first / Tile::kColumns + 1, left);
    }
#endif
    // The lines of a group; PLAIN 2: without the weights of y. weights: of its rows. step: of the block's tile.
    __device__ __forceinline__ void compute(const SwigluCall& call, const StreamPosition& at, int step, const float* weights,
                                            float (&y)[kLines][8]) {
#if BACKWARD && OPTIONS
        u32 sums[2][kLineRows];
#elif BACKWARD
        u32 sums[kLineRows];
#endif
        each(at, [&](int r, float (&v)[kArrays][8], const float (&sigma)[8]) {
#if BACKWARD
            float values[kParts][8];
#if OPTIONS
            gradients(call, r, weights[r * kApart], v, sigma, values, sums);
#else
            sums[r] = as_bits(activate(call.sums, weights[r * kApart], v[0], v[1], v[2], sigma, values));
#endif
#pragma unroll
            for (int part = 0; part < kParts; part++)
#pragma unroll
                for (int i = 0; i < 8; i++) y[part * kLineRows + r][i] = values[part][i];
#else
#pragma unroll
            for (int i = 0; i < 8; i++) {
#if OPTIONS
                const float u = mul_rn(v[0][i], v[1][i]);
#else
                const float u = mul_rn(mul_rn(v[0][i], sigma[i]), v[1][i]);
#endif
                y[r][i] = PLAIN == 2 ? u : mul_rn(u, weights[r * kApart]);
            }
#endif
        });
#if OPTIONS && !BACKWARD
        if (left < kLineRows) {                                      // biases alone
#pragma unroll
            for (int r = 0; r < kLineRows; r++)
                if (r >= left)
#pragma unroll
                    for (float& v : y[r]) v = 0.0f;
        }
#endif
#if BACKWARD && OPTIONS
        store_sums(call, at, sums);
#elif BACKWARD
        if (call.sums) store_sums(call, sums, at.tile().row + step * kStepRows + line_row(0), kApart, at.across, left);
#endif
        left -= kStepRows;
    }
    // After the last group: what was requested beyond it is there too, before another block has the shared memory.
    static __device__ __forceinline__ void finish() { copy_async_wait(); }
    // Of the block's rows, 1 without weights.
    static __device__ __forceinline__ float* shared_probs() {
#if OPTIONS
        __shared__ __align__(16) float probs[kMostRows];
#else
        __shared__ __align__(16) float probs[kLineThreads];
#endif
        return probs;
    }

private:
    i64 half;
    u8* slots;
    const IN::storage* x;                                            // of the next row to be requested
#if BACKWARD
    const IN::storage* grad;
#endif
    int stage;                                                       // of the group's first row
#if OPTIONS
    const SwigluCall& call;
    const Biases biases;
    static_assert(4 * Tile::kColumns == kLineThreads, "each loads a bias: of two experts, of a and b");
#if EXPERTS
    u32 others;                                                      // rows of other experts (change_biases)
#endif
#if BACKWARD
    // Bits of `clipped`: interleaved a thread has four elements of either part, otherwise both parts or none.
    static constexpr u32 kFirstPart = 0x0f0fu, kBothParts = 0xffffu;
    u32 absent;                                                      // columns
    u32 clipped;                                                     // of the row that each() has told last: or absent
#endif
    __device__ __forceinline__ bool has(int part) const {
#if BACKWARD
        return !(absent & (part ? kBothParts & ~kFirstPart : kFirstPart));
#else
        return true;
#endif
    }
    // The first element of a row of x that this thread has. column: the tile's.
    static __device__ __forceinline__ i64 first_of_row(const SwigluCall& call, i64 column) {
        if (!call.interleaved()) return column + Tile::patch_column();
        return 2 * column + (BACKWARD ? 1 : 2) * Tile::patch_column();
    }
    // From a thread's first eight elements of a row of x to its others.
    __device__ __forceinline__ i64 second() const { return !call.interleaved() ? half : BACKWARD ? Tile::kColumns : 8; }

#if EXPERTS
    // Loads a tile's biases, where the block has others. The result: which of this thread's rows have another expert than the first row of the
    // tile (kLineRows bits), and than the last one too (as many).
    __device__ __forceinline__ u32 change_biases(const TilePosition& tile) const {
        static_assert(kLineRows == 4 && kApart == 1, "four words of which the first is aligned");
        if (MAYBE_EXPERTS && !call.experts) return 0;
        const u32* const experts = call.experts + tile.row;
        const u32 first = load_read_only(experts), last = load_read_only(experts + Tile::kRows - 1);
        const uint4 own = load_read_only(reinterpret_cast<const uint4*>(experts + line_row(0)));
        if (first != Biases::experts()[0] || last != Biases::experts()[1]) {
            __syncthreads();
            Biases::load(call, tile);
            __syncthreads();
        }
        const auto others = [&](u32 expert) {
            return (own.x != expert) | (own.y != expert) << 1 | (own.z != expert) << 2 | (own.w != expert) << 3;
        };
        return others(first) | (others(first) & others(last)) << kLineRows;
    }
#endif
    // Of row r. part: of a, or of b.
    __device__ __forceinline__ void add_biases(const StreamPosition& at, int r, int part, float (&v)[8]) const {
#if !EXPERTS
        biases.add(call, part, false, v);
#else
        u32 rare = others;
#ifndef CUPY_FP8_HOST
        asm volatile("" : "+r"(rare));                               // otherwise both parts' ways to sigma are compiled, and spill
#endif
        if (__builtin_expect(!(rare >> (kLineRows + r) & 1), 1)) return biases.add(call, part, rare >> r & 1, v);
        const TilePosition tile = at.tile();
        const IN::storage* from = call.bias_of(tile.row + line_row(r));
        if (!from || left <= r * kApart) return;
        // A loop, as of rare arguments in sigmoids().
        const bool interleaved = call.interleaved();
        from += first_of_row(call, tile.column) + (interleaved ? part : part * half);
#pragma unroll 1
        for (int i = 0; i < 8; i++, from += interleaved ? 2 : 1) {
            if (interleaved && i == 4) from += second() - 8;
            const float first = add_rn(v[0], IN::widen(has(interleaved ? i / 4 : part) ? *from : 0));
#pragma unroll
            for (int k = 1; k < 8; k++) v[k - 1] = v[k];
            v[7] = first;
        }
#endif
    }
    // As the rest of each(), with options.
    __device__ __forceinline__ void read_options(const StreamPosition& at, int r, float (&v)[kArrays][8], float (&sigma)[8]) {
        Eight raw[2];
        read(r, 0, raw[0]);
        read(r, 1, raw[1]);
        if (call.interleaved()) separate(raw);
        widen_eight(raw[0], v[0]);
        add_biases(at, r, 0, v[0]);
#if BACKWARD
        widen_eight(raw[1], v[1]);
        add_biases(at, r, 1, v[1]);
        clipped = clip(call, v[0], v[1]) | (left > r * kApart ? absent : kBothParts);
#else
#pragma unroll
        for (float& a : v[0]) a = at_most(a, call.limit);
#endif
        const bool quick = all_below(v[0], call.has(SwigluCall::kGptOss) ? kQuickGptOss : kQuickSigmoid);
#pragma unroll
        for (int i = 0; i < 8; i++) sigma[i] = mul_rn(call.alpha, v[0][i]);
        sigmoids(sigma, quick);
#if BACKWARD
        read(r, 2, raw[0]);
        widen_eight(raw[0], v[2]);
#else
#pragma unroll
        for (int i = 0; i < 8; i++) v[0][i] = mul_rn(v[0][i], sigma[i]);
        widen_eight(raw[1], v[1]);
        add_biases(at, r, 1, v[1]);
#pragma unroll
        for (float& b : v[1]) b = at_least(at_most(b, call.limit), call.minus_limit);
#endif
#pragma unroll
        for (float& b : v[1]) b = add_rn(b, one(call));
    }
#if BACKWARD
    // Eight neighbours, or four and four.
    __device__ __forceinline__ void request_grad(u8* to, bool first, bool other) const {
        if (!call.interleaved()) {
#pragma unroll
            for (int l = 0; l < kLoads; l++) copy_async<true>(to + l * kSlot, grad + l * kLoad, first);
        } else if (kLoads > 1) {
            copy_async<true>(to, grad, first), copy_async<true>(to + kSlot, grad + Tile::kColumns / 2, other);
        } else {
            copy_async_half(to, grad, first), copy_async_half(to + 8, grad + Tile::kColumns / 2, other);
        }
    }
    static __device__ __forceinline__ void copy_async_half(u8* shared, const void* from, bool exists) {
        const u32 bytes = exists ? 8 : 0;
#ifdef CUPY_FP8_HOST
        host_cp_async(shared, from, 8, bytes);
#else
        const u32 to = (u32)__cvta_generic_to_shared(shared);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
#endif
    }
#endif
#endif

    __device__ __forceinline__ u8* slot(int r, int array) const {
        return slots + (kLineRows % kStages ? (stage + r) % kStages : r % kStages) * kStageBytes + array * (kLoads * kSlot);
    }
    // kAtOnce rows from r on, of this group or of those that follow.
    __device__ __forceinline__ void request(int begin) {
#pragma unroll
        for (int r = begin; r < begin + kAtOnce; r++) {
            const bool exists = left > r / kLineRows * kStepRows + r % kLineRows * kApart;
            const int rows = (r + 1) % kLineRows ? kApart : kStepRows - (kLineRows - 1) * kApart;
#if OPTIONS
            const bool first = exists && has(0), other = exists && has(1);
#pragma unroll
            for (int l = 0; l < kLoads; l++) {
                copy_async<true>(slot(r, 0) + l * kSlot, x + l * kLoad, first);
                copy_async<true>(slot(r, 1) + l * kSlot, x + second() + l * kLoad, other);
            }
            x += rows * (2 * half);
            pin(x);
#if BACKWARD
            request_grad(slot(r, 2), first, other);
            grad += rows * half;
            pin(grad);
#endif
#else
#pragma unroll
            for (int l = 0; l < kLoads; l++) {
                copy_async<(kLoads > 1)>(slot(r, 0) + l * kSlot, x + l * kLoad, exists);
                copy_async<(kLoads > 1)>(slot(r, 1) + l * kSlot, x + half + l * kLoad, exists);
            }
            x += rows * (2 * half);
            pin(x);
#if BACKWARD
#pragma unroll
            for (int l = 0; l < kLoads; l++) copy_async<(kLoads > 1)>(slot(r, 2) + l * kSlot, grad + l * kLoad, exists);
            grad += rows * half;
            pin(grad);
#endif
#endif
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void read(int r, int array, Eight& to) const {
#pragma unroll
        for (int l = 0; l < kLoads; l++) to[l] = Chunk<IN, kLoad>::load_shared(slot(r, array) + l * kSlot);
    }
    static __device__ constexpr u32 quick_limit(bf16) { return 0x42aeu; }       // kQuickSigmoid
    static __device__ constexpr u32 quick_limit(f16) { return 0x5570u; }
    static __device__ constexpr u32 quick_limit(f32) { return 0; }
    // The larger magnitude of each half, NaN above all, with some sign.
    static __device__ __forceinline__ u32 larger_halves(bf16, u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
        return a;
#else
        return bf16::max_magnitudes<true>(a & bf16::kMagnitudes, b & bf16::kMagnitudes);
#endif
    }
    static __device__ __forceinline__ u32 larger_halves(f16, u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
        return a;
#else
        return f16::max_magnitudes<true>(a & f16::kMagnitudes, b & f16::kMagnitudes);
#endif
    }
    static __device__ __forceinline__ u32 larger_halves(f32, u32 a, u32 b) { return a; }
    // Whether every |a| is below kQuickSigmoid: of 16-bit formats by the largest magnitudes of both halves of a word.
    static __device__ __forceinline__ bool all_quick(const Eight& raw) {
        if (sizeof(IN::storage) == 4) {
            float a[8];
            widen_eight(raw, a);
            return all_below(a, kQuickSigmoid);
        }
        u32 top = raw[0].word[0];
#pragma unroll
        for (int i = 1; i < 8 / Chunk<IN, kLoad>::kPerWord; i++)
            top = larger_halves(IN{}, top, raw[i / Chunk<IN, kLoad>::kWords].word[i % Chunk<IN, kLoad>::kWords]);
        return !((top & 0x7fff7fffu) + (0x8000u - quick_limit(IN{})) * 0x10001u & 0x80008000u);
    }
};

// Where lines go that are stored as y is: of an array's elements, so that two arrays have one.
struct LineStore {
    i64 at;                      // of the first line of a group

    __device__ __forceinline__ LineStore(const SwigluCall& call, const TilePosition& to)
        : at((to.row + line_row(0)) * call.columns + to.column + Tile::patch_column()) {}
    __device__ __forceinline__ void advance(const SwigluCall& call) { at += kStepRows * call.columns; }
#if OPTIONS
    // Of one tile, found when it is stored: until then it takes no registers.
    __device__ __forceinline__ LineStore(const SwigluCall& call, const TilePosition& to, int thread)
        : at((to.row + thread / Tile::kColumnPatches * kLineRows) * call.columns + to.column + thread % Tile::kColumnPatches * 8) {}
#endif
};

// Line i of a group is of row i % kLineRows, and of da or db.
__device__ __forceinline__ int row_of(int line) { return line % kLineRows; }
__device__ __forceinline__ int part_of(int line) { return line / kLineRows; }

// A weight that may become a part of a scale: its product with the scale of an amax between 2^-60 and 2^60 is a normal number.
__device__ __forceinline__ bool is_moderate(float weight) { return (as_bits(weight) & 0x7fffffffu) - (87u << 23) < 80u << 23; }
__device__ __forceinline__ bool is_moderate_amax(u32 bits) { return bits - (67u << 23) < 120u << 23; }        // 2^-60 to 2^60
__device__ __forceinline__ void multiply_lines(float (&u)[4][8], const float* weights) {
#pragma unroll
    for (int line = 0; line < 4; line++) {
        const float weight = weights[row_of(line) * kApart];
#pragma unroll
        for (float& v : u[line]) v = mul_rn(v, weight);
    }
}

// codes(line) of four lines, to `data`. left: how many of the group's rows exist, and others after it.
template <class Codes>
__device__ __forceinline__ void store_lines(const SwigluCall& call, u8* data, const LineStore& store, int left, Codes codes) {
    constexpr int kTogether = 4 / kLineRows;                         // da and db, or one of them
    const i64 half = call.half();
    u8* to = data + store.at;
#pragma unroll
    for (int r = 0; r < kLineRows; r++) {
        Chunk<OUT, 8> of_row[kTogether];
#pragma unroll
        for (int part = 0; part < kTogether; part++) of_row[part] = codes(part * kLineRows + r);
        pin(to);
        if (r * kApart < left) {
#pragma unroll
            for (int part = 0; part < kTogether; part++) of_row[part].store(as_global(to + part * half));
        }
        to += kApart * kParts * half;
    }
}
// Four of the lines.
__device__ __forceinline__ const float (&four_lines(const float (&y)[kLines][8], int part))[4][8] {
    return *reinterpret_cast<const float(*)[4][8]>(&y[part * 4]);
}

#if PLAIN == 1
// The codes of four rows of a tile from `row` on, and this thread's columns.
__device__ __forceinline__ void write_four_rows(const Tile& tile, int row, const Chunk<OUT, 8> (&line)[4]) {
    write_half_patch(tile.byte_at(row, Tile::patch_column()), line);
}
// store_transposed() by kLineThreads. end: the column after the last.
__device__ __forceinline__ void store_tile(const SwigluCall& call, const TilePosition& at, const i64& end, const Tile& tile, u8* data, bool vector) {
    if (!vector) {
        store_ragged_rows<Tile::kRows, Tile::kColumns, kLineThreads>(
            data + at.column * call.rows + at.row, call.rows, left_of(end - at.column, Tile::kColumns),
            left_of(call.rows - at.row, Tile::kRows), [&](int column, int row_patch) { return tile.chunk_at(column, row_patch); });
        return;
    }
#pragma unroll
    for (int unit = 0; unit < Tile::kUnits<16>; unit += kLineThreads / kThreads) {
        const i64 row = at.column + Tile::column<16>(unit), column = at.row + Tile::row<16>();
        if (row < end && column < call.rows) tile.read<OUT, 16>(unit).store_whole(data + row * call.rows + column);
    }
}
// The maxima of the columns of a tile, four rows of it per thread: words in shared memory, so that the 32 rows of a run lie in lanes that
// do not meet in banks.
struct ColumnTops {
    static constexpr int kOfRun = 8 * Tile::kColumns + 8, kWords = Tile::kRows / 32 * kOfRun;
    u32* words;

    // Call __syncthreads() before read().
    template <bool kNan>
    __device__ __forceinline__ void write(const float (&y)[4][8]) const {
        u32 top[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            top[c] = larger<kNan>(larger<kNan>(larger<kNan>(larger<kNan>(0, y[0][c]), y[1][c]), y[2][c]), y[3][c]);
        }
        const int thread = thread_again();
        u32* const to = at(thread / Tile::kColumnPatches) + thread % Tile::kColumnPatches * 8;
        store_shared_whole(to, top[0], top[1], top[2], top[3]);
        store_shared_whole(to + 4, top[4], top[5], top[6], top[7]);
    }
    // A thread has one run of one column: four runs in lanes that are 8 apart.
    static __device__ __forceinline__ int run(int thread) { return thread % 32 / 8; }
    static __device__ __forceinline__ int column(int thread) { return thread / 32 * 8 + thread % 8; }
    __device__ __forceinline__ u32 read(int run, int column) const {
        u32 top = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) top = larger_bits(top, at(run * 8)[i * Tile::kColumns + column]);
        return top;
    }
    // A float for every run and column, in the place of what only this thread has read. Call __syncthreads() before operands().
    __device__ __forceinline__ void put(int run, int column, float v) const { at(run * 8)[column] = as_bits(v); }
    // Those of this thread's rows and columns.
    __device__ __forceinline__ void operands(float (&by)[8]) const {
        load_floats(at(threadIdx.x / Tile::kColumnPatches / 8 * 8) + Tile::patch_column(), by);
    }

private:
    __device__ __forceinline__ u32* at(int four_rows) const { return words + four_rows / 8 * kOfRun + four_rows % 8 * Tile::kColumns; }
};
#endif
