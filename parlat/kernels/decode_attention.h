#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "parlat/tensor/shape.h"

namespace parlat {

inline constexpr int64_t kPageTokens = 64;

// Rows of latents in pages of kPageTokens consecutive rows; a query attends to the first `length` rows of its page
// list.
struct PagedLatents {
  Tensor rows_nd;                               // [pages * kPageTokens, w + R], fp32 or bf16: latent, then rope key
  std::vector<std::span<const int32_t>> pages;  // a query's pages, in order; at least ceil(length / kPageTokens)
  std::vector<int64_t> lengths;                 // a query's rows
};

struct PartialAttention {
  Tensor out_nhw;  // fp32 softmax(score) c: the weighted sum of latents; 0 where there are no rows
  Tensor lse_nh;   // fp32 natural logarithm of the sum of exp(score); -inf where there are no rows
};

// What queries and weights are rounded to for rows of a dtype: bf16 where pairs of it are multiplied, fp32 elsewhere.
at::ScalarType decode_operand_dtype(at::ScalarType rows);

// Attention of one query a row in latent space, where all heads share one key and one value: row t of the cache is the
// key, its first w columns are the value too.
//   q_nhd  [n, h, w + R] fp32, absorbed and already times the softmax scale
//   bf16   rows on a machine with AVX-512 BF16: q and the weights of rows are rounded to bf16, as FlashMLA and
//          transformers do, so that pairs of products are summed natively, in fp32; the weights sum to one all the same
//   cost   n h T (2 w + R) multiply-adds; each row is read once for up to kHeadBlock heads, as key and as value
//   work   is cut in (query, chunk of rows, block of heads), so that one long sequence keeps every thread busy; the cut
//          depends on lengths alone, so results are the same bits for any number of threads
// Rows past a query's length are never read. Instruction sets: those that Highway knows, chosen at run time
// (PARLAT_ISA=avx2 and the like forces one; tests).
PartialAttention decode_attention(const Tensor& q_nhd, const PagedLatents& cache, int64_t d_rope);

}  // namespace parlat
