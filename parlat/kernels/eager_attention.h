#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/kernels/key_ranges.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// softmax(scale * q k^T) v with the probabilities materialised, differentiable in q, k, v.
//   q [B, S, H, d], k [B, T, K, d], v [B, T, K, v]; K = H, or K = 1: one key and value for all heads (absorbed form).
//   out [B, S, H, v] in q's dtype; fp32 scores and softmax (fp64 for fp64).
//   saved  q, k, v and the probabilities [B, H, S, T] in q's dtype
//   cost   2 B H S T (d + v) multiply-adds forward, 2.5 times that backward; row blocks skip the keys no row may see
Tensor eager_attention(const Tensor& q_BSHd, const Tensor& k_BTKd, const Tensor& v_BTKv, const KeyRanges& visible,
                       double softmax_scale);

}  // namespace parlat
