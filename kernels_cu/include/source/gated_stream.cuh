// The rows of calls with options, beside Stream (fused/stream.cuh). Other experts' biases are loaded with a
// wait. Where a bias is added to absent rows and columns, the results are set to zero.
#pragma once
#include "fused/stream.cuh"
#include "source/gated_options.cuh"

template <class Call>
class OptionStream : public StagedRows {
public:
    // at: the thread block's first tile.
    __device__ __forceinline__ OptionStream(const Call& call, const TilePosition& at, int tiles, u8* shared)
        : StagedRows(call, shared) {
        const i64 row = at.row + row_in_step(0), column = at.column + Tile::patch_column();
        left = kBackward || column < half
            ? left_of(call.rows - row, tiles * Tile::kRows - row_in_step(0)) : 0;
        const i64 in_row = first_of_row(call, at.column);
        x = call.x + row * (2 * half) + in_row;
        if constexpr (kBackward) {
            absent = column < half ? 0 : kBothParts;
            grad = call.grad + row * half + column;
            if (call.interleaved()) {
                absent = in_row >= call.columns ? kBothParts
                    : in_row + Tile::kColumns >= call.columns ? kBothParts & ~kFirstPart : 0;
                grad -= Tile::patch_column() / 2;
            }
        }
        Biases::load(call, at);
        request(0);
        if (kStages > kRowsPerRequest) request(kRowsPerRequest);
        const i64 own = at.row + threadIdx.x;
        if (threadIdx.x < kMostRows)
            shared_probs()[threadIdx.x] = call.probs && own < call.rows ? call.probs[own] : 1.0f;
        __syncthreads();
    }
    // Computes the rows of a tile, calling use(r, values) for each. at: the tile; weights: those of its rows.
    // Forward, absent rows hold only biases: the caller zeroes them.
    template <class Use>
    __device__ __forceinline__ void each(const StreamPosition& at, const float* weights, Use use) {
        u32 sums[2][kThreadRows];                                    // of both parts
        if constexpr (kExperts) others = change_biases(at.tile());
#pragma unroll
        for (int r = 0; r < kThreadRows; r++) {
            if (r % kRowsPerRequest == 0) copy_async_wait<(kStages > kRowsPerRequest)>();
            float v[kArrays][8], terms[8], values[kParts][8];
            read_row(at, r, v, terms);
            if (r % kRowsPerRequest == kRowsPerRequest - 1) request(r + 1 - kRowsPerRequest + kStages);
            if constexpr (kBackward) {
                find_gradients(r, weights[r * kRowStride], v, terms, values, sums);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) values[0][i] = Source::gated(v[0][i], v, i);
                multiply_by_weight<Source>(call, weights + r * kRowStride, values[0]);
            }
            use(r, values);
        }
        stage = (stage + kThreadRows) % kStages;
        if constexpr (kBackward) store_sums_of_parts(at, sums);
        left -= kStepRows;
    }
    // How many of the `left` rows exist in this thread's columns of a part.
    __device__ __forceinline__ int left_in(int part, int left) const { return has(part) ? left : 0; }

private:
    // Source, made dependent on Call: an activation without programs for options has no terms_of().
    using Options = typename Either<(sizeof(Call) > 0), Source, Call>::Type;

    const Biases biases;
    static_assert(!kOptions || 4 * Tile::kColumns == kStreamThreads,
                  "each loads a bias: of two experts, of a and b");
    u32 others;                                                      // rows of other experts (change_biases)
    // Masks of `clipped`: interleaved, a thread has four elements of either part; otherwise all of both parts
    // or none.
    static constexpr u32 kFirstPart = 0x0f0fu, kBothParts = 0xffffu;
    u32 absent;                                                      // absent columns
    // elements clipped or absent in the row that read_row() has read last
    u32 clipped;

    __device__ __forceinline__ bool has(int part) const {
        return !kBackward || !(absent & (part ? kBothParts & ~kFirstPart : kFirstPart));
    }
    // First element of a row of x that this thread has. column: the tile's column.
    static __device__ __forceinline__ i64 first_of_row(const Call& call, i64 column) {
        if (!call.interleaved()) return column + Tile::patch_column();
        return 2 * column + (kBackward ? 1 : 2) * Tile::patch_column();
    }
    // Distance in elements from a thread's first eight of a row of x to its second eight.
    __device__ __forceinline__ i64 second() const {
        return !call.interleaved() ? half : kBackward ? Tile::kColumns : 8;
    }

    // Computes the gradients of the row read last. sums: row r of both parts.
    __device__ __forceinline__ void find_gradients(int r, float weight, float (&v)[kArrays][8],
                                                   const float (&terms)[8], float (&values)[kParts][8],
                                                   u32 (&sums)[2][kThreadRows]) const {
        float of_parts[2] = {};
        gradients(call, weight, v, terms, clipped, values, of_parts);
        if (!call.sums) return;
        if (!call.interleaved()) of_parts[0] = add_rn(of_parts[0], of_parts[1]);
#pragma unroll
        for (int part = 0; part < 2; part++)
            sums[part][r] = has(part) ? as_bits(of_parts[part]) : kAbsentTerm;
    }
    __device__ __forceinline__ void store_sums_of_parts(const StreamPosition& at,
                                                        const u32 (&sums)[2][kThreadRows]) const {
        if (!call.sums) return;
        const i64 row = at.tile().row + row_in_step(0), first = at.results(call).column;
        store_sums(call, sums[0], row, kRowStride, first / Tile::kColumns, left);
        if (call.interleaved() && first + Tile::kColumns < call.columns)
            store_sums(call, sums[1], row, kRowStride, first / Tile::kColumns + 1, left);
    }

    // Loads a tile's biases where the shared ones are of other experts. Returns kThreadRows bits for this
    // thread's rows whose expert is not the first row's, then kThreadRows bits for those whose expert is not
    // the last row's either.
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
        // Without this the compiler duplicates the code down to sigma for both cases, and spills.
        asm volatile("" : "+r"(rare));
#endif
        if (__builtin_expect(!(rare >> (kThreadRows + r) & 1), 1))
            return biases.add(call, part, rare >> r & 1, v);
        const TilePosition tile = at.tile();
        const IN::storage* from = call.bias_of(tile.row + row_in_step(r));
        if (!from || left <= r * kRowStride) return;
        // a loop for the same reason as in sigmoids()
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
    // Reads a row: v receives a, b and grad; forward, act(a) in place of a.
    __device__ __forceinline__ void read_row(const StreamPosition& at, int r, float (&v)[kArrays][8],
                                             float (&terms)[8]) {
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
        Options::terms_of(v[0], call.alpha, call.has(Call::kGptOss), terms);
        if constexpr (kBackward) {
            read(r, 2, raw[0]);
            widen_eight(raw[0], v[kArrays - 1]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) v[0][i] = Source::activation(v[0][i], terms[i]);
            widen_eight(raw[1], v[1]);
            add_biases(at, r, 1, v[1]);
#pragma unroll
            for (float& b : v[1]) b = at_least(at_most(b, call.limit), call.minus_limit);
        }
#pragma unroll
        for (float& b : v[1]) b = add_rn(b, one(call));
    }

    // Requests kRowsPerRequest rows from r on, of this or the following tiles.
    __device__ __forceinline__ void request(int begin) {
        // f32 re-reads it: with one more value in registers its gradients spill on sm_120 (CUDA 12).
        const i64 half = kLoads > 1 ? call.half() : this->half;
#pragma unroll
        for (int r = begin; r < begin + kRowsPerRequest; r++) {
            const int rows = rows_to_next(r);
            const bool first = exists(r) && has(0), other = exists(r) && has(1);
#pragma unroll
            for (int l = 0; l < kLoads; l++) {
                copy_async<true>(stage_of(r, 0) + l * kLoadBytes, x + l * kLoad, first);
                copy_async<true>(stage_of(r, 1) + l * kLoadBytes, x + second() + l * kLoad, other);
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
    // Requests eight adjacent elements of grad or, interleaved, four and four.
    __device__ __forceinline__ void request_grad(u8* to, bool first, bool other) const {
        if (!call.interleaved()) {
#pragma unroll
            for (int l = 0; l < kLoads; l++)
                copy_async<true>(to + l * kLoadBytes, grad + l * kLoad, first);
        } else if (kLoads > 1) {
            copy_async<true>(to, grad, first);
            copy_async<true>(to + kLoadBytes, grad + Tile::kColumns / 2, other);
        } else {
            copy_async_part<8>(to, grad, first ? 8 : 0);
            copy_async_part<8>(to + 8, grad + Tile::kColumns / 2, other ? 8 : 0);
        }
    }
};
