// A thread computes rows of y, or of da and db, in chunks of eight elements (swiglu_tensor.cu,
// swiglu_blocks.cu, swiglu_mx.cu). x and grad come through shared memory (cp.async): copies in flight take no
// registers, and fetch the next tile while this one is stored.
//
// A block of kStreamThreads threads owns 128 columns of y and some tiles of 128 rows, one below the other.
// A thread reads the elements that it has copied itself, so it waits only for its own copies (and for other
// experts' biases). Rows and columns that do not exist are zeros; where a bias is added to these, the results
// are made zeros.
#pragma once
#include "swiglu/swiglu_chunks.cuh"
#include "swiglu/swiglu_magnitudes.cuh"

class Stream {
public:
    // How many rows exist from this thread's next one on; none where the columns do not (gradients with
    // options: see `absent`).
    int left;

    // at: the block's first tile.
    __device__ __forceinline__ Stream(const SwigluCall& call, const TilePosition& at, int tiles, u8* shared)
        : half(call.half()), staged(shared + threadIdx.x * 16), stage(0), call(call) {
        const i64 row = at.row + row_in_step(0), column = at.column + Tile::patch_column();
        left = (kOptions && kBackward) || column < half
            ? left_of(call.rows - row, tiles * Tile::kRows - row_in_step(0)) : 0;
        const i64 in_row = kOptions ? first_of_row(call, at.column) : column;
        x = call.x + row * (2 * half) + in_row;
        if constexpr (kBackward) {
            if constexpr (kOptions) absent = column < half ? 0 : kBothParts;
            grad = call.grad + row * half + column;
            if (kOptions && call.interleaved()) {
                absent = in_row >= call.columns ? kBothParts
                    : in_row + Tile::kColumns >= call.columns ? kBothParts & ~kFirstPart : 0;
                grad -= Tile::patch_column() / 2;
            }
        }
        if constexpr (kOptions) Biases::load(call, at);
        request(0);
        if (kStages > kRowsPerRequest) request(kRowsPerRequest);
        const i64 own = at.row + threadIdx.x;
        if (!kOptions || threadIdx.x < kMostRows)
            shared_probs()[threadIdx.x] = call.probs && own < call.rows ? call.probs[own] : 1.0f;
        __syncthreads();
    }
    // use(r, v, sigma) is called for the rows of a group. v: a, b, grad; forward with options: a * sigma, b.
    // at: the block's tile.
    template <class Use>
    __device__ __forceinline__ void each(const StreamPosition& at, Use use) {
        if constexpr (kExperts) others = change_biases(at.tile());
#pragma unroll
        for (int r = 0; r < kThreadRows; r++) {
            if (r % kRowsPerRequest == 0) copy_async_wait<(kStages > kRowsPerRequest)>();
            float v[kArrays][8], sigma[8];
            if constexpr (kOptions) read_with_options(at, r, v, sigma);
            else read_without_options(r, v, sigma);
            if (r % kRowsPerRequest == kRowsPerRequest - 1) request(r + 1 - kRowsPerRequest + kStages);
            use(r, v, sigma);
        }
        stage = (stage + kThreadRows) % kStages;
    }
    // With options: returns how many of the `left` rows exist in this thread's columns of a part.
    __device__ __forceinline__ int left_in(int part, int left) const { return has(part) ? left : 0; }
    // With options: computes the gradients of the row that each() has passed last. sums: row r of both parts.
    __device__ __forceinline__ void gradients(int r, float weight, float (&v)[kArrays][8],
                                              const float (&sigma)[8], float (&values)[2][8],
                                              u32 (&sums)[2][kThreadRows]) const {
        float of_parts[2] = {};
        ::gradients(call, weight, v[0], v[1], v[kArrays - 1], sigma, clipped, values, of_parts);
        if (!call.sums) return;
        if (!call.interleaved()) of_parts[0] = add_rn(of_parts[0], of_parts[1]);
#pragma unroll
        for (int part = 0; part < 2; part++)
            sums[part][r] = has(part) ? as_bits(of_parts[part]) : kAbsentTerm;
    }
    __device__ __forceinline__ void store_sums(const StreamPosition& at,
                                               const u32 (&sums)[2][kThreadRows]) const {
        if (!call.sums) return;
        const i64 row = at.tile().row + row_in_step(0), first = at.results(call).column;
        ::store_sums(call, sums[0], row, kRowStride, first / Tile::kColumns, left);
        if (call.interleaved() && first + Tile::kColumns < call.columns)
            ::store_sums(call, sums[1], row, kRowStride, first / Tile::kColumns + 1, left);
    }
    // Computes the chunks of a group; on path rows y is not yet multiplied by the weights. weights: those of
    // the group's rows. step: the group's number in the tile.
    __device__ __forceinline__ void compute(const StreamPosition& at, int step, const float* weights,
                                            float (&y)[kThreadChunks][8]) {
        u32 sums[kThreadRows], part_sums[2][kThreadRows];  // sums without options, part_sums with them
        each(at, [&](int r, float(&v)[kArrays][8], const float(&sigma)[8]) {
            if constexpr (kBackward) {
                float values[2][8];
                if constexpr (kOptions) gradients(r, weights[r * kRowStride], v, sigma, values, part_sums);
                else sums[r] = as_bits(activate(call.sums, weights[r * kRowStride], v[0], v[1],
                                                v[kArrays - 1], sigma, values));
#pragma unroll
                for (int part = 0; part < kParts; part++)
#pragma unroll
                    for (int i = 0; i < 8; i++) y[part * kThreadRows + r][i] = values[part][i];
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float u = mul_rn(kOptions ? v[0][i] : mul_rn(v[0][i], sigma[i]), v[1][i]);
                    y[r][i] = kPath == Path::rows ? u : mul_rn(u, weights[r * kRowStride]);
                }
            }
        });
        if constexpr (kOptions && !kBackward) {
            if (left < kThreadRows) {  // These rows do not exist: they have only biases.
#pragma unroll
                for (int r = 0; r < kThreadRows; r++)
                    if (r >= left)
#pragma unroll
                        for (float& v : y[r]) v = 0.0f;
            }
        }
        if constexpr (kBackward && kOptions) store_sums(at, part_sums);
        else if constexpr (kBackward) {
            if (call.sums)
                ::store_sums(call, sums, at.tile().row + step * kStepRows + row_in_step(0), kRowStride,
                             at.across, left);
        }
        left -= kStepRows;
    }
    // Waits, after the last group, for the copies requested beyond it, before another block has the shared
    // memory.
    static __device__ __forceinline__ void finish() { copy_async_wait(); }
    // Returns shared memory with the weights of the block's rows, 1 without probs.
    static __device__ __forceinline__ float* shared_probs() {
        __shared__ __align__(16) float probs[kMostRows];
        return probs;
    }

private:
    i64 half;
    u8* staged;                                                      // this thread's part of the stages
    const IN::storage *x, *grad;                                     // the next row to be requested
    int stage;                                                       // of the group's first row
    const SwigluCall& call;
    const Biases biases;
    static_assert(!kOptions || 4 * Tile::kColumns == kStreamThreads,
                  "each loads a bias: of two experts, of a and b");
    u32 others;                                                      // rows of other experts (change_biases)
    // Masks of `clipped`: interleaved, a thread has four elements of either part; otherwise it has all of
    // both parts or none.
    static constexpr u32 kFirstPart = 0x0f0fu, kBothParts = 0xffffu;
    u32 absent;                                                      // columns that do not exist
    // Bits of the elements that are clipped or do not exist in the row that each() has passed last.
    u32 clipped;

    __device__ __forceinline__ bool has(int part) const {
        return !kBackward || !(absent & (part ? kBothParts & ~kFirstPart : kFirstPart));
    }
    // With options: returns the first element of a row of x that this thread has. column: the tile's column.
    static __device__ __forceinline__ i64 first_of_row(const SwigluCall& call, i64 column) {
        if (!call.interleaved()) return column + Tile::patch_column();
        return 2 * column + (kBackward ? 1 : 2) * Tile::patch_column();
    }
    // Returns the distance in elements from a thread's first eight of a row of x to its second eight.
    __device__ __forceinline__ i64 second() const {
        return !kOptions || !call.interleaved() ? half : kBackward ? Tile::kColumns : 8;
    }

    // Loads a tile's biases, where the block has those of other experts. Returns kThreadRows bits for this
    // thread's rows of another expert than the first row of the tile, then as many for those of another one
    // than the last row too.
    __device__ __forceinline__ u32 change_biases(const TilePosition& tile) const {
        static_assert(!kOptions || (kThreadRows == 4 && kRowStride == 1),
                      "four words of which the first is aligned");
        if (kMaybeExperts && !call.experts) return 0;
        const u32* const experts = call.experts + tile.row;
        const u32 first = load_read_only(experts), last = load_read_only(experts + Tile::kRows - 1);
        const uint4 own = load_read_only(reinterpret_cast<const uint4*>(experts + row_in_step(0)));
        if (first != Biases::experts()[0] || last != Biases::experts()[1]) {
            __syncthreads();
            Biases::load(call, tile);
            __syncthreads();
        }
        const auto others = [&](u32 expert) {
            return (own.x != expert) | (own.y != expert) << 1 | (own.z != expert) << 2
                | (own.w != expert) << 3;
        };
        return others(first) | (others(first) & others(last)) << kThreadRows;
    }
    // Adds the biases of row r. part: 0 for a, 1 for b.
    __device__ __forceinline__ void add_biases(const StreamPosition& at, int r, int part,
                                               float (&v)[8]) const {
        if constexpr (!kExperts) return biases.add(call, part, false, v);
        u32 rare = others;
#ifndef CUPY_FP8_HOST
        // Without this the compiler duplicates the code down to sigma for either case, and spills.
        asm volatile("" : "+r"(rare));
#endif
        if (__builtin_expect(!(rare >> (kThreadRows + r) & 1), 1))
            return biases.add(call, part, rare >> r & 1, v);
        const TilePosition tile = at.tile();
        const IN::storage* from = call.bias_of(tile.row + row_in_step(r));
        if (!from || left <= r * kRowStride) return;
        // This is a loop for the same reason as in sigmoids().
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
    }
    __device__ __forceinline__ void read_without_options(int r, float (&v)[kArrays][8], float (&sigma)[8]) {
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
    }
    __device__ __forceinline__ void read_with_options(const StreamPosition& at, int r, float (&v)[kArrays][8],
                                                 float (&sigma)[8]) {
        Eight raw[2];
        read(r, 0, raw[0]);
        read(r, 1, raw[1]);
        if (call.interleaved()) separate(raw);
        widen_eight(raw[0], v[0]);
        add_biases(at, r, 0, v[0]);
        if constexpr (kBackward) {
            widen_eight(raw[1], v[1]);
            add_biases(at, r, 1, v[1]);
            clipped = clip(call, v[0], v[1]) | (left > r * kRowStride ? absent : kBothParts);
        } else {
#pragma unroll
            for (float& a : v[0]) a = at_most(a, call.limit);
        }
        const bool quick = all_below(v[0], call.has(SwigluCall::kGptOss) ? kQuickGptOss : kQuickSigmoid);
#pragma unroll
        for (int i = 0; i < 8; i++) sigma[i] = mul_rn(call.alpha, v[0][i]);
        sigmoids(sigma, quick);
        if constexpr (kBackward) {
            read(r, 2, raw[0]);
            widen_eight(raw[0], v[kArrays - 1]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) v[0][i] = mul_rn(v[0][i], sigma[i]);
            widen_eight(raw[1], v[1]);
            add_biases(at, r, 1, v[1]);
#pragma unroll
            for (float& b : v[1]) b = at_least(at_most(b, call.limit), call.minus_limit);
        }
#pragma unroll
        for (float& b : v[1]) b = add_rn(b, one(call));
    }

    __device__ __forceinline__ u8* stage_of(int r, int array) const {
        const int number = kThreadRows % kStages ? (stage + r) % kStages : r % kStages;
        return staged + number * kStageBytes + array * (kLoads * kLoadBytes);
    }
    __device__ __forceinline__ void read(int r, int array, Eight& to) const {
#pragma unroll
        for (int l = 0; l < kLoads; l++)
            to[l] = Chunk<IN, kLoad>::load_shared(stage_of(r, array) + l * kLoadBytes);
    }
    // Requests kRowsPerRequest rows from r on, of this group or of those that follow.
    __device__ __forceinline__ void request(int begin) {
        // Copies go through the L1 where those of a thread are halves of sectors.
        constexpr bool kThroughL1 = kOptions || kLoads > 1;
        // f32 reads it anew: with one more value in registers its gradients spill on sm_120 (CUDA 12).
        const i64 half = kLoads > 1 ? call.half() : this->half;
#pragma unroll
        for (int r = begin; r < begin + kRowsPerRequest; r++) {
            const bool exists = left > r / kThreadRows * kStepRows + r % kThreadRows * kRowStride;
            const int rows = (r + 1) % kThreadRows ? kRowStride : kStepRows - (kThreadRows - 1) * kRowStride;
            const bool first = exists && (!kOptions || has(0)), other = exists && (!kOptions || has(1));
#pragma unroll
            for (int l = 0; l < kLoads; l++) {
                copy_async<kThroughL1>(stage_of(r, 0) + l * kLoadBytes, x + l * kLoad, first);
                copy_async<kThroughL1>(stage_of(r, 1) + l * kLoadBytes, x + second() + l * kLoad, other);
            }
            x += rows * (2 * half);
            pin(x);
            if constexpr (kBackward) {
                request_grad(stage_of(r, 2), first, other);
                grad += rows * half;
                pin(grad);
            }
        }
        copy_async_commit();
    }
    // Requests eight neighbours of grad or, interleaved, four and four.
    __device__ __forceinline__ void request_grad(u8* to, bool first, bool other) const {
        if (!kOptions || !call.interleaved()) {
#pragma unroll
            for (int l = 0; l < kLoads; l++)
                copy_async<(kOptions || kLoads > 1)>(to + l * kLoadBytes, grad + l * kLoad, first);
        } else if (kLoads > 1) {
            copy_async<true>(to, grad, first);
            copy_async<true>(to + kLoadBytes, grad + Tile::kColumns / 2, other);
        } else {
            copy_async_part<8>(to, grad, first ? 8 : 0);
            copy_async_part<8>(to + 8, grad + Tile::kColumns / 2, other ? 8 : 0);
        }
    }
};
