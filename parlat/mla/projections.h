#pragma once

#include <ATen/core/Tensor.h>

#include "parlat/mla/rope.h"
#include "parlat/weights/model_weights.h"

namespace parlat {

// Everything between x and attention, and between attention and the layer's output. Saved for the backward pass, beside
// weights and the rope table: what each function names; activations that two functions save exist once.

// RMSNorm in fp32, rounded to x's dtype, then times weight [d].
//   saved  x and 1/rms (fp32, one a row)
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);

// x [B, S, D] -> q [B, S, H, N+R]: nope columns, then rotated rope columns. All heads.
//   saved  x; with a query latent also c_q_raw [B, S, Q] and 1/rms [B, S] fp32
Tensor project_query(const MlaWeights& w, const Tensor& x_BSD, const RopeTable& rope);

// The two halves of project_query: x [B, S, D] -> c_q [B, S, Q], normalised, which only a model with a query latent
// has;
//   saved  x, c_q_raw [B, S, Q] and 1/rms [B, S] fp32
// and c_q [B, S, Q] -> q [B, S, h, N+R] of some heads.
//   saved  c_q
Tensor project_query_latent(const MlaWeights& w, const Tensor& x_BSD);
Tensor up_project_query(const MlaWeights& w, Range heads, const Tensor& c_q_BSQ, const RopeTable& rope);

// x [B, S, D] -> latent [B, S, L+R]: normalised c_kv, then the rotated k_rope that all heads share.
//   saved  x, the latent before norm and rotation [B, S, L+R], 1/rms [B, S] fp32
Tensor project_latent(const MlaWeights& w, const Tensor& x_BSD, const RopeTable& rope);

// Rows of kv_b_proj of some heads: [h (N+V), L]; a view.
Tensor up_projection(const MlaWeights& w, Range heads);

struct KeysValues {
  Tensor k_BTHd;  // [B, T, h, N+R], the rope key repeated for every head
  Tensor v_BTHV;  // [B, T, h, V]
};
// Keys and values of the heads whose rows w_ukv holds, rebuilt from the latent [B, T, L+R].
//   saved  latent
//   cost   B T h (N+V) L multiply-adds forward, twice that backward; scratch [B, T, h (N+V)]
KeysValues up_project(const Tensor& w_ukv_hL, const Tensor& latent_BTd, const MlaDims& dims);

// out [B, S, H, V] -> [B, S, D].
//   saved  out
Tensor project_output(const MlaWeights& w, const Tensor& out_BSHV);

}  // namespace parlat
