#pragma once

#include <hwy/aligned_allocator.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "parlat/base/range.h"
#include "parlat/kernels/decode_attention.h"

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
  float* out;        // [kHeadBlock, width], sums of weights times c
  float *max, *sum;  // [kHeadBlock], sum of exp(score - max)
  float* weight;     // [kHeadBlock], sum of the weights: these exponentials, or what they were rounded to
};

// Rows of one page from `row` on that are in the block's range, and where those of the next page lie, to be asked of
// memory meanwhile.
struct PageSpan {
  const char* rows;
  const char* next;  // null: there is none
  int64_t row_bytes, count;
};
inline PageSpan page_span(const DecodeBlock& block, int64_t row) {
  const int64_t row_bytes = (block.width + block.d_rope) * (block.bf16 ? 2 : 4), in_page = row % kPageTokens;
  const auto row_of_page = [&](int64_t page, int64_t at) {
    return static_cast<const char*>(block.rows) + (block.pages[page] * kPageTokens + at) * row_bytes;
  };
  PageSpan span{row_of_page(row / kPageTokens, in_page), nullptr, row_bytes,
                std::min(kPageTokens - in_page, block.range.end - row)};
  if (row + span.count < block.range.end) span.next = row_of_page(row / kPageTokens + 1, 0);
  return span;
}

// Of the rows of a page in fp32: an odd number of cache lines, so that one column of many rows does not fall into few
// sets of the cache.
inline int64_t decode_row_stride(int64_t d) { return ((d + 15) / 16 | 1) * 16; }

// What a thread reuses from task to task: aligned to vectors.
struct DecodeScratch {
  explicit DecodeScratch(int64_t d);
  using Floats = hwy::AlignedFreeUniquePtr<float[]>;
  Floats q_transposed;  // [d, kHeadBlock], d = width + d_rope
  Floats rows;          // one page in fp32, [kPageTokens, decode_row_stride(d)]
  Floats scores;        // [kPageTokens, kHeadBlock], then weights
  Floats scale;         // [kHeadBlock]
  // Pairs of bf16, the first in the low half: what decode_block_in_pairs works with.
  using Pairs = hwy::AlignedFreeUniquePtr<uint32_t[]>;
  Pairs q_pairs;       // [(d + 1) / 2, kHeadBlock]
  Pairs weight_pairs;  // of two rows, [kPageTokens / 2, kHeadBlock]
  Pairs value_pairs;   // of two rows, [kPageTokens / 2, kValueColumns]
};

// Columns of values whose rows are interleaved at a time: 8 KB, in the nearest cache.
inline constexpr int64_t kValueColumns = 64;

// The walk: score a page against all heads (heads lie in the lanes of a vector: no sum across lanes), take the running
// softmax, add the page's weighted latents (columns in the lanes). Compiled for several instruction sets.
void decode_block(const DecodeBlock& block, DecodeScratch& scratch);

// The same for bf16 rows where uses_bf16_pairs(): rows are never widened, q and the weights are rounded to bf16, pairs
// of products are summed in fp32.
void decode_block_in_pairs(const DecodeBlock& block, DecodeScratch& scratch);

// scores[0, count) of the scratch become weights exp(score - new maximum); the block's max, sum and weight and the
// scratch's scale (of what was summed before) follow. round: weights to bf16.
void softmax_page(const DecodeBlock& block, int64_t count, bool round, DecodeScratch& scratch);

}  // namespace parlat
