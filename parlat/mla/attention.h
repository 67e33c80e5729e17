#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/kernels/key_ranges.h"
#include "parlat/mla/projections.h"

namespace parlat {

// q [B, S, h, N+R] against explicit keys and values -> out [B, S, h, V].
Tensor attend_explicit(const MlaSpec& spec, const Tensor& q_BSHd, const KeysValues& kv, const KeyRanges& visible);

// The same function computed in latent space: queries absorb w_uk (L wide), one score product over L + R columns, the
// weighted sum of latents goes through w_uv. w_ukv_hL: the rows of q's heads.
//   saved  q_absorbed [B, S, h, L+R] and out_latent [B, S, h, L]: L/N and L/V times wider than explicit's
Tensor attend_absorbed(const MlaSpec& spec, const Tensor& q_BSHd, const Tensor& latent_BTd, const Tensor& w_ukv_hL,
                       const KeyRanges& visible);

}  // namespace parlat
