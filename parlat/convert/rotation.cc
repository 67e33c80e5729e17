#include "parlat/convert/rotation.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "parlat/base/error.h"
#include "parlat/base/range.h"
#include "parlat/tensor/fill.h"

namespace parlat {

namespace {

// The covariance of the latent before its norm's weight.
Tensor raw_covariance(const LayerSamples& samples) {
  const Tensor c_kv = samples.c_kv().flatten(0, 1).to(at::kDouble) / samples.weights.kv_norm.to(at::kDouble);
  return covariance(c_kv);
}

}  // namespace

Tensor hadamard_basis(int64_t d_latent, uint64_t seed) {
  if (!std::has_single_bit(static_cast<uint64_t>(d_latent))) {
    throw ConfigError("hadamard: expected a latent width that is a power of two, got {}", d_latent);
  }
  Tensor h = at::ones({1, 1}, at::kDouble);
  while (h.size(0) < d_latent) h = at::cat({at::cat({h, h}, 1), at::cat({h, -h}, 1)}, 0);
  const Tensor signs_L = seeded_integers({d_latent}, 2, seed, "hadamard signs").to(at::kDouble) * 2 - 1;
  return signs_L.unsqueeze(1) * h / std::sqrt(static_cast<double>(d_latent));
}

Tensor pca_basis(const LayerSamples& samples) { return eigen(raw_covariance(samples)).vectors_LL; }

void rotate_weights(const Tensor& basis_LL, MlaWeights& w) {
  const int64_t d_latent = w.dims().d_latent;
  const Tensor rows = w.w_dkv.to(at::kDouble);
  const Tensor latent_rows = at::matmul(basis_LL.t(), rows.narrow(0, 0, d_latent));
  const Tensor rope_rows = rows.narrow(0, d_latent, w.dims().d_rope);
  w.w_ukv = at::matmul(w.w_ukv.to(at::kDouble) * w.kv_norm.to(at::kDouble), basis_LL).to(w.w_ukv.scalar_type());
  w.w_dkv = at::cat({latent_rows, rope_rows}).to(w.w_dkv.scalar_type());
  w.kv_norm = at::ones_like(w.kv_norm);
}

std::vector<SliceMaps> rotated_slices(const Tensor& variance_L, int64_t groups) {
  const int64_t d_latent = variance_L.size(0);
  // Latents are fp32: rounding alone gives each coordinate about eps^2 of the variance.
  constexpr double kEps = std::numeric_limits<float>::epsilon();
  const double least = static_cast<double>(d_latent) * kEps * kEps;
  std::vector<SliceMaps> slices;
  for (int64_t group = 0; group < groups; ++group) {
    const Range columns = even_share(d_latent, groups, group);
    const double share = (variance_L.narrow(0, columns.begin, columns.size()).sum() / variance_L.sum()).item<double>();
    if (!(share > least)) {
      throw DataError(
          "calibration: expected text of enough different tokens that latents vary in each of {} slices, got {:.1e} of "
          "the variance in slice {}",
          groups, std::max(share, 0.0), group);
    }
    SliceMaps maps = plain_slice(d_latent, groups, group);
    maps.key_Lw = maps.key_Lw / share;
    slices.push_back(maps);
  }
  return slices;
}

Tensor variance_in(const Tensor& basis_LL, const LayerSamples& samples) {
  return at::matmul(at::matmul(basis_LL.t(), raw_covariance(samples)), basis_LL).diagonal().clone();
}

}  // namespace parlat
