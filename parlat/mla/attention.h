#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/config/parallel.h"
#include "parlat/kernels/key_ranges.h"
#include "parlat/mla/projections.h"

namespace parlat {

// q [B, S, h, N+R] against explicit keys and values -> out [B, S, h, V].
Tensor attend_explicit(const MlaSpec& spec, const Tensor& q_BSHd, const KeysValues& kv, const KeyRanges& visible,
                       AttentionKernel kernel = AttentionKernel::kFused);

// The same with keys and values of q's heads rebuilt from the latent [B, T, L+R] and their rows of kv_b_proj w_ukv_hL:
// once in full, or, where the fused kernel saves the latent only, a block at a time inside the kernel.
Tensor attend_latent(const MlaSpec& spec, const Tensor& q_BSHd, const Tensor& latent_BTd, const Tensor& w_ukv_hL,
                     const KeyRanges& visible, const AttentionOptions& options = {});

// The same function computed in latent space: queries absorb w_uk (L wide), one score product over L + R columns, the
// weighted sum of latents goes through w_uv. w_ukv_hL: the rows of q's heads.
//   saved  q_absorbed [B, S, h, L+R] and out_latent [B, S, h, L]: L/N and L/V times wider than explicit's
Tensor attend_absorbed(const MlaSpec& spec, const Tensor& q_BSHd, const Tensor& latent_BTd, const Tensor& w_ukv_hL,
                       const KeyRanges& visible, AttentionKernel kernel = AttentionKernel::kFused);

}  // namespace parlat
