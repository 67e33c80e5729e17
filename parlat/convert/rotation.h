#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "parlat/convert/layer_samples.h"
#include "parlat/weights/slice_maps.h"

namespace parlat {

// The published transforms (TPLA, arXiv 2508.15881): an orthogonal basis U of the latent before its norm's weight, in
// whose coordinates slices are consecutive columns. RMS is the same in every such basis, so once kv_norm is folded into
// w_ukv the checkpoint's function does not change.

// Sylvester's Hadamard matrix with random signs; d_latent must be a power of two (ConfigError).
Tensor hadamard_basis(int64_t d_latent, uint64_t seed);
// Eigenvectors of the covariance of c_kv / kv_norm over the samples, largest first.
Tensor pca_basis(const LayerSamples& samples);

// The basis folded into weights, computed in fp64: w_dkv <- U^T w_dkv (its L latent rows), w_ukv <- (w_ukv kv_norm) U,
// kv_norm <- 1.
void rotate_weights(const Tensor& basis_LL, MlaWeights& weights);

// The slices of a rotated layer as published: consecutive columns, each one's score divided by its share of the
// variance. variance_L: of each coordinate. DataError where a slice's is not above what rounding leaves.
std::vector<SliceMaps> rotated_slices(const Tensor& variance_L, int64_t groups);
// Variance of each coordinate of c_kv / kv_norm in the basis.
Tensor variance_in(const Tensor& basis_LL, const LayerSamples& samples);

}  // namespace parlat
