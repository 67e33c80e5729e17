#pragma once

#include <hwy/aligned_allocator.h>

#include <cstdint>
#include <span>

#include "parlat/base/range.h"

namespace parlat {

// Heads that share one walk over the rows: one vector of AVX-512, two of AVX2, four of SSE.
inline constexpr int64_t kHeadBlock = 16;

// One task of decode_attention: some rows, up to kHeadBlock heads.
struct DecodeBlock {
  const float* q;  // [n_heads, width + d_rope]
  int64_t n_heads, width, d_rope;
  const void* rows;  // [.., width + d_rope], bf16 or fp32
  bool bf16;
  std::span<const int32_t> pages;
  Range range;       // rows of the page list
  float* out;        // [kHeadBlock, width], sums of exp(score - max) c
  float *max, *sum;  // [kHeadBlock]
};

// Of the rows of a page in fp32: an odd number of cache lines, so that one column of many rows does not fall into few
// sets of the cache.
inline int64_t decode_row_stride(int64_t d) { return ((d + 15) / 16 | 1) * 16; }

// What a thread reuses from task to task: aligned to vectors.
struct DecodeScratch {
  explicit DecodeScratch(int64_t d);
  using Floats = hwy::AlignedFreeUniquePtr<float[]>;
  Floats q_transposed;  // [d, kHeadBlock], d = width + d_rope
  Floats rows;          // one page in fp32, [kPageTokens, decode_row_stride(d)]
  Floats scores;        // [kPageTokens, kHeadBlock], then probabilities
  Floats scale;         // [kHeadBlock]
};

// The walk: score a page against all heads (heads lie in the lanes of a vector: no sum across lanes), take the running
// softmax, add the page's weighted latents (columns in the lanes). Compiled for several instruction sets.
void decode_block(const DecodeBlock& block, DecodeScratch& scratch);

}  // namespace parlat
