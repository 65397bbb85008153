// Where a routing (route.cu) sends tokens.
#pragma once
#include "memory/chunks.cuh"

struct Routes {
    const i32* row_map;          // [tokens, topk]
    const i32* sources;          // [rows]; -1: an unused row
    const i32* experts;          // [tokens, topk], for a mask
    i64 tokens, rows;
    u32 topk;
    u32 columns;                 // experts, if probs are [tokens, experts]; 0: they are [tokens, topk]
    u32 clearing;                // the first block of those that clear 32 rows each; 0: all blocks clear

    // Returns the row of a slot, or -1. A row that does not exist counts as none.
    __device__ __forceinline__ i32 row(i64 slot) const {
        const i32 row = load_read_only(row_map + slot);
        return row >= 0 && row < rows ? row : -1;
    }
    // Returns the token that an existing row is a copy of, or -1. A token that does not exist counts as none.
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
