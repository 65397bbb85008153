// Shared by the kernels that move tokens: where a routing (route.cu) sends tokens, and zeros in unused rows.
//
// Each block examines every gridDim.x-th row and writes zeros to it if `sources` marks it as unused, so that
// all blocks have the same share of the unused rows, wherever these are. If there may be many, separate
// blocks clear them.
#pragma once
#include "memory/chunks.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Routes {
    const i32* row_map;          // [tokens, topk]
    const i32* sources;          // [rows]; -1: an unused row
    const i32* experts;          // [tokens, topk], if there is a mask
    i64 tokens, rows;
    u32 topk;
    u32 columns;                 // experts, if probs are [tokens, experts]; 0: [tokens, topk]
    u32 clearing;                // first of the blocks that clear rows; 0: all blocks clear
    u32 examined;                // rows that each clearing block examines, up to 32

    // Returns the row of a slot, or -1 (also for a row out of range).
    __device__ __forceinline__ i32 row(i64 slot) const {
        const i32 row = load_read_only(row_map + slot);
        return row >= 0 && row < rows ? row : -1;
    }
    // Returns the token that an existing row is a copy of, or -1 (also for a token out of range).
    __device__ __forceinline__ i64 token_of(i64 row) const {
        const i32 slot = load_read_only(sources + row);
        if (slot < 0 || topk == 0) return -1;
        const i64 token = (u32)slot / topk;
        return token < tokens ? token : -1;
    }
    // Returns the index of the prob of slot k of a token, or -1.
    __device__ __forceinline__ i64 prob_at(i64 token, u32 k) const {
        const i64 slot = token * topk + k;
        if (!columns) return slot;
        const u32 expert = (u32)load_read_only(experts + slot);
        return expert < columns ? token * columns + expert : -1;
    }
};

// Copies the probs of `count` tokens to their rows; `thread` is one of `threads` that share the work.
__device__ __forceinline__ void move_probs(const Routes& routes, const u32* probs, u32* rows_probs, i64 first,
                                           int count, int thread, int threads) {
    const int slots = count * (int)routes.topk;
    for (int i = thread; i < slots; i += threads) {
        const int token = i / (int)routes.topk;
        const i64 row = routes.row(first * routes.topk + i);
        const i64 at = routes.prob_at(first + token, i - token * routes.topk);
        if (row >= 0) rows_probs[row] = at < 0 ? 0 : load_read_only(probs + at);
    }
}

using Unit = Chunk<e8m0fnu, 16>;
template <class T> __device__ __forceinline__ T load_piece(const u8* from) {
    return load_read_only(reinterpret_cast<const T*>(from));
}
template <> __device__ __forceinline__ Unit load_piece<Unit>(const u8* from) { return Unit::load(from); }
__device__ __forceinline__ void store_piece(u8* to, const Unit& piece) { piece.store_whole<true>(to); }
template <class T> __device__ __forceinline__ void store_piece(u8* to, T piece) {
    *reinterpret_cast<T*>(to) = piece;
}

// Writes zeros. Call from all threads.
template <class T>
__device__ __forceinline__ void clear_pieces(u8* to, i64 bytes) {
    for (i64 at = (i64)threadIdx.x * sizeof(T); at < bytes; at += kThreads * sizeof(T))
        store_piece(to + at, T{});
}
__device__ __forceinline__ void clear(u8* to, i64 bytes, u32 step) {
    if (step == 16) clear_pieces<Unit>(to, bytes);
    else if (step == 4) clear_pieces<u32>(to, bytes);
    else if (step == 2) clear_pieces<u16>(to, bytes);
    else clear_pieces<u8>(to, bytes);
}

// Returns the row that a lane examines: one of consecutive rows in a clearing block, else one of rows
// blockIdx.x, blockIdx.x + gridDim.x, ..., which the grid's size limits to 32. -1: none.
__device__ __forceinline__ i64 row_to_examine(const Routes& routes, u32 lane) {
    if (routes.clearing)
        return lane < routes.examined ? ((i64)blockIdx.x - routes.clearing) * routes.examined + lane : -1;
    return (i64)lane * gridDim.x + blockIdx.x;
}
// Loads the source of the lane's row early, because it is used late.
__device__ __forceinline__ i32 load_own_source(const Routes& routes) {
    const i64 own = row_to_examine(routes, threadIdx.x % 32);
    return own >= 0 && own < routes.rows ? load_read_only(routes.sources + own) : 0;
}
// Calls clear_row(row) for each unused row that the block examines. Call from all threads.
template <class Clear>
__device__ __forceinline__ void clear_unused(const Routes& routes, i32 own_source, Clear clear_row) {
#ifndef CUPY_FP8_HOST
    asm volatile("" : "+r"(own_source));         // keeps the compiler from waiting for the load earlier
#endif
    for (u32 unused = __ballot_sync(~0u, own_source < 0); unused; unused &= unused - 1)
        clear_row(row_to_examine(routes, __ffs(unused) - 1));
}
