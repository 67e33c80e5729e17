#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "parlat/mla/rope.h"
#include "parlat/weights/model_weights.h"

namespace parlat {

// What one layer's attention does with the calibration text: windows of S tokens, fp32.
struct LayerSamples {
  MlaWeights weights;
  Tensor x_BSD;       // after the layer's norm
  RopeTable rope;     // of one window
  Tensor latent_BSd;  // [B, S, L + R]
  Tensor c_kv() const { return latent_BSd.narrow(2, 0, weights.dims().d_latent); }
  Tensor k_rope() const { return latent_BSd.narrow(2, weights.dims().d_latent, weights.dims().d_rope); }
};
LayerSamples layer_samples(const MlaWeights& weights, const Tensor& x_BSD);

// Covariance [L, L] of rows x [n, L], fp64.
Tensor covariance(const Tensor& x_nL);

// Covariance's eigenvectors in columns, largest eigenvalue first; each one's sign such that its largest entry is
// positive.
struct Eigen {
  Tensor values_L, vectors_LL;
};
Eigen eigen(const Tensor& symmetric_LL);

}  // namespace parlat
