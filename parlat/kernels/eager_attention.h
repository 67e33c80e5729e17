#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/kernels/key_ranges.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// Queries a block: scores of 2048 keys are 2 MB of fp32. More rows make faster products, but more masked scores.
inline constexpr int64_t kEagerBlockRows = 256;

// softmax(scale * q k^T) v with the probabilities materialised, differentiable in q, k, v.
//   q [B, S, H, d], k [B, T, K, d], v [B, T, K, v]; K = H, or K = 1: one key and value for all heads (absorbed form).
//   out [B, S, H, v] in q's dtype. Scores, softmax and all sums in fp32 (fp64 for fp64); the forward pass multiplies v
//   with the fp32 probabilities, the backward pass works from the saved ones.
//   saved  q, k, v and the probabilities [B, H, S, T] in q's dtype; without autograd the probabilities never exist
//   cost   B H S T (d + v) multiply-adds forward, twice that backward; blocks of queries skip keys that none sees
//   scratch, a thread: fp32 copies of one head's k and v, their gradients, and two blocks of queries x keys
// NaN in q or k reaches the queries that see it; in v also others of the same block, as 0 times NaN. The order of all
// sums is fixed, so results repeat bit for bit whatever the number of threads.
Tensor eager_attention(const Tensor& q_BSHd, const Tensor& k_BTKd, const Tensor& v_BTKv, const KeyRanges& visible,
                       double softmax_scale);

}  // namespace parlat
