#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/kernels/key_ranges.h"
#include "parlat/tensor/shape.h"

namespace parlat {

// Attention that writes no scores, differentiable (fused_passes.h). bf16, fp32 or fp64 inputs of one dtype.

// softmax(scale q k^T) v: q [B, S, H, d], k [B, T, K, d], v [B, T, K, v]; K = H, or 1: one key and value for all heads.
//   out [B, S, H, v]
//   saved  q, k, v, out and lse [B, S, H] fp32
Tensor fused_attention(const Tensor& q_BSHd, const Tensor& k_BTKd, const Tensor& v_BTKv, const KeyRanges& visible,
                       double softmax_scale);

// The same with keys and values rebuilt from the latent, a head and a block at a time, forward and again backward: q
// [B, S, H, N+R], latent [B, T, L+R], w_ukv [H (N+V), L] -> [B, S, H, V]. Where nothing is differentiated the weight
// may be of another dtype than the activations.
//   saved  q, latent, out and lse: no key and no value
//   cost   besides that of attention 2 T L (N+V) H flops forward and 6 backward
Tensor fused_latent_attention(const Tensor& q_BSHd, const Tensor& latent_BTd, const Tensor& w_ukv_hL,
                              const KeyRanges& visible, double softmax_scale);

}  // namespace parlat
