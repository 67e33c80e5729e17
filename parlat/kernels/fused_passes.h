#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/kernels/key_ranges.h"
#include "parlat/kernels/key_source.h"
#include "parlat/kernels/query_gradient.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// Queries a block: scores of kFusedKeys keys are 256 KB of fp32, and few of them are masked at the causal edge.
inline constexpr int64_t kFusedQueries = 128;

// softmax(scale q k^T) v block by block, without autograd: scores of one block exist at a time, and the running maximum
// and sum of each query (FlashAttention-2, Algorithm 1 and 2). Keys no query of a block sees are skipped. Sums
// and softmax in fp32 (fp64 for fp64), operands of products in block_dtype (block_product.h).
//   q [B, S, H, d]; out [B, S, H, v]; lse [B, S, H] fp32 (fp64), natural logarithm; no keys: out 0, lse -inf
//   cost     2 (d + v) flops forward and 6 d + 4 v backward for each query, head and key it sees, up to a block's edge
//   scratch  a thread: S v and, backward, S d elements where q isn't fp32; a block of keys, values and scores
// Threads share the heads. The order of all sums is fixed: the same bits whatever the number of threads.
// Tensors of other devices than the CPU: device_passes.h.
struct FusedQuery {
  const Tensor& q_BSHd;
  const KeyRanges& visible;
  double scale;
};

// resume: out (then fp32) and lse hold the attention over other keys, which these join.
void fused_forward(const FusedQuery& query, const KeySource& keys, const Tensor& out_BSHv, const Tensor& lse_BSH,
                   bool resume = false);

// out . grad_out of every query and head, [B, S, H] fp32 (fp64): all that the backward pass needs of out.
Tensor out_along_gradient(const Tensor& out_BSHv, const Tensor& grad_out_BSHv);

// along (out_along_gradient) and lse: over all keys; parts: `keys` are some of them only. Adds to grad_q, and does with
// the gradients that `keys` holds what that says.
void fused_backward(const FusedQuery& query, const KeySource& keys, const Tensor& along_BSH, const Tensor& lse_BSH,
                    const Tensor& grad_out_BSHv, const QueryGradient& grad_q, bool parts = false);

}  // namespace parlat
