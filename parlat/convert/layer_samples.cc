#include "parlat/convert/layer_samples.h"

#include <ATen/ATen.h>

#include "parlat/mla/documents.h"
#include "parlat/mla/projections.h"

namespace parlat {

LayerSamples layer_samples(const MlaWeights& weights, const Tensor& x_BSD) {
  LayerSamples samples{.weights = weights, .x_BSD = x_BSD, .rope = {}, .latent_BSd = {}};
  const Documents window = Documents::whole(1, x_BSD.size(1));
  samples.rope = rope_table(weights.spec.rope, weights.dims().d_rope, window.positions());
  std::vector<Tensor> latents;
  for (int64_t b = 0; b < x_BSD.size(0); ++b) {
    latents.push_back(project_latent(weights, x_BSD.narrow(0, b, 1), samples.rope));
  }
  samples.latent_BSd = at::cat(latents);
  return samples;
}

Tensor covariance(const Tensor& x_nL) {
  const Tensor x = x_nL.to(at::kDouble), centred = x - x.mean(0);
  return at::matmul(centred.t(), centred) / static_cast<double>(x.size(0));
}

Eigen eigen(const Tensor& symmetric_LL) {
  const auto [values, vectors] = at::linalg_eigh(symmetric_LL);
  Tensor v = vectors.flip({1});
  const Tensor largest = v.gather(0, v.abs().argmax(0, /*keepdim=*/true));
  return {values.flip({0}), v * largest.sign()};
}

}  // namespace parlat
