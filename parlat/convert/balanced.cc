#include "parlat/convert/balanced.h"

#include <ATen/ATen.h>
#include <torch/optim/adam.h>

#include <cmath>
#include <numbers>

#include "parlat/base/range.h"
#include "parlat/mla/projections.h"
#include "parlat/tensor/fill.h"

namespace parlat {

namespace {

// Eigenvalues below this part of the largest are noise: their directions are not amplified beyond it.
constexpr double kSmallest = 1e-7;

// Square root of the covariance and its inverse: to and from coordinates in which the latent is white.
struct Whitening {
  Tensor root_LL, inverse_LL;
};

Whitening whitening(const Eigen& e) {
  const Tensor root_L = e.values_L.clamp_min(e.values_L[0].item<double>() * kSmallest).sqrt();
  return {at::matmul(e.vectors_LL * root_L, e.vectors_LL.t()), at::matmul(e.vectors_LL / root_L, e.vectors_LL.t())};
}

// The parameters: maps of every slice in white coordinates. store = inverse s, key = root k, value = root v.
struct WhiteMaps {
  std::vector<Tensor> store, key, value;  // a group's [L, w]
};

std::vector<SliceMaps> to_slices(const WhiteMaps& white, const Whitening& w) {
  const Tensor root = w.root_LL.to(at::kFloat), inverse = w.inverse_LL.to(at::kFloat);
  std::vector<SliceMaps> slices;
  for (size_t g = 0; g < white.store.size(); ++g) {
    slices.push_back(
        {at::matmul(inverse, white.store[g]), at::matmul(root, white.key[g]), at::matmul(root, white.value[g])});
  }
  return slices;
}

// Leading blocks of principal directions of c_kv / kv_norm: store = u / g, key = value = g u.
WhiteMaps principal_blocks(const LayerSamples& samples, const Moments& m, const Whitening& w, int64_t groups) {
  const Tensor g_L1 = samples.weights.kv_norm.to(at::kDouble).unsqueeze(1);
  const Tensor u_LL = eigen(m.covariance_LL / g_L1 / g_L1.t()).vectors_LL;
  WhiteMaps white;
  for (int64_t group = 0; group < groups; ++group) {
    const Range columns = even_share(u_LL.size(0), groups, group);
    const Tensor u = u_LL.narrow(1, columns.begin, columns.size());
    white.store.push_back(at::matmul(w.root_LL, u / g_L1).to(at::kFloat));
    white.key.push_back(at::matmul(w.inverse_LL, u * g_L1).to(at::kFloat));
    white.value.push_back(white.key.back().clone());
  }
  return white;
}

// What one step looks at: queries of some windows, and the layer's exact output for them.
struct Step {
  Tensor absorbed_bHqL;     // times the softmax scale
  Tensor rope_scores_bHqS;  // with -inf for keys that a query does not see
  Tensor c_kv_b1SL;
  Tensor want_bqD;
};

Tensor output(const MlaWeights& w, const Tensor& out_latent_bHqL) {
  const MlaDims& d = w.dims();
  const Tensor w_uv = w.w_ukv.view({d.n_heads, d.d_nope + d.d_v, d.d_latent}).narrow(1, d.d_nope, d.d_v);
  const Tensor out_bHqV = at::matmul(out_latent_bHqL, w_uv.transpose(1, 2));
  return at::matmul(out_bHqV.transpose(1, 2).flatten(2), w.w_o.t());
}

Step make_step(const LayerSamples& samples, const BalancedOptions& options, int64_t index) {
  const at::NoGradGuard no_grad;
  const MlaWeights& w = samples.weights;
  const MlaDims& d = w.dims();
  const int64_t n_windows = samples.x_BSD.size(0), n_tokens = samples.x_BSD.size(1);
  const auto some = [&](int64_t count, int64_t of, const char* what) {
    const Tensor order = seeded_normal({of}, 1.0, options.seed, fmt::format("{} {}", what, index)).argsort();
    return std::get<0>(order.narrow(0, 0, std::min(count, of)).sort());
  };
  const Tensor windows = some(options.windows, n_windows, "windows"),
               queries = some(options.queries, n_tokens, "queries");
  const Tensor x_bSD = samples.x_BSD.index_select(0, windows);
  const RopeTable rope{samples.rope.cos_BSr.index_select(1, queries).expand({x_bSD.size(0), -1, -1}).contiguous(),
                       samples.rope.sin_BSr.index_select(1, queries).expand({x_bSD.size(0), -1, -1}).contiguous(),
                       samples.rope.interleaved};
  const Tensor q_bHqd = project_query(w, x_bSD.index_select(1, queries), rope).transpose(1, 2) * w.spec.softmax_scale();
  const Tensor w_uk = w.w_ukv.view({d.n_heads, d.d_nope + d.d_v, d.d_latent}).narrow(1, 0, d.d_nope);
  const Tensor hidden_qS = at::arange(n_tokens).unsqueeze(0) > queries.unsqueeze(1);
  Step step;
  step.absorbed_bHqL = at::matmul(q_bHqd.narrow(3, 0, d.d_nope), w_uk);
  const Tensor k_rope_b1RS = samples.k_rope().index_select(0, windows).transpose(1, 2).unsqueeze(1);
  step.rope_scores_bHqS =
      at::matmul(q_bHqd.narrow(3, d.d_nope, d.d_rope), k_rope_b1RS).masked_fill(hidden_qS, -INFINITY);
  step.c_kv_b1SL = samples.c_kv().index_select(0, windows).unsqueeze(1);
  const Tensor p = (at::matmul(step.absorbed_bHqL, step.c_kv_b1SL.transpose(2, 3)) + step.rope_scores_bHqS).softmax(-1);
  step.want_bqD = output(w, at::matmul(p, step.c_kv_b1SL));
  return step;
}

// Mean squared error of the sliced layer's output, over the exact one's mean square.
Tensor error_of(const std::vector<SliceMaps>& slices, const Step& step, const MlaWeights& w) {
  Tensor out;
  for (const SliceMaps& s : slices) {
    const Tensor z_b1Sw = at::matmul(step.c_kv_b1SL, s.store_Lw);
    const Tensor scores = at::matmul(at::matmul(step.absorbed_bHqL, s.key_Lw), z_b1Sw.transpose(2, 3));
    const Tensor p = (scores + step.rope_scores_bHqS).softmax(-1);
    const Tensor part = at::matmul(at::matmul(p, z_b1Sw), s.value_Lw.t());
    out = out.defined() ? out + part : part;
  }
  return (output(w, out) - step.want_bqD).square().mean() / step.want_bqD.var();
}

// Linear warm-up over 20 steps, then half a cosine to zero.
double rate_at(int64_t step, const BalancedOptions& options) {
  const double warm = std::min(1.0, static_cast<double>(step + 1) / 20);
  const double part = static_cast<double>(step) / static_cast<double>(options.steps);
  return options.learning_rate * warm * 0.5 * (1 + std::cos(std::numbers::pi * part));
}

double mean_error(const LayerSamples& samples, const WhiteMaps& white, const Whitening& w,
                  const BalancedOptions& options) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kSteps = 8;  // with indices that no step of the fit has
  double sum = 0;
  for (int64_t i = 0; i < kSteps; ++i) {
    sum += error_of(to_slices(white, w), make_step(samples, options, -1 - i), samples.weights).item<double>();
  }
  return sum / kSteps;
}

}  // namespace

BalancedResult balance(const LayerSamples& samples, const BalancedOptions& options,
                       const std::function<void(int64_t)>& progress) {
  const Moments m = moments(samples.c_kv().flatten(0, 1));
  const Whitening w = whitening(eigen(m.covariance_LL));
  WhiteMaps white = principal_blocks(samples, m, w, options.groups);
  BalancedResult result;
  result.error_before = mean_error(samples, white, w, options);
  std::vector<SliceMaps> start = to_slices(white, w);

  const at::AutoGradMode grad(true);
  std::vector<Tensor> parameters;
  for (auto* maps : {&white.store, &white.key, &white.value}) {
    for (Tensor& map : *maps) parameters.push_back(map.requires_grad_());
  }
  torch::optim::Adam adam(parameters, torch::optim::AdamOptions(options.learning_rate).betas({0.9, 0.98}));
  for (int64_t step = 0; step < options.steps; ++step) {
    static_cast<torch::optim::AdamOptions&>(adam.param_groups()[0].options()).lr(rate_at(step, options));
    adam.zero_grad();
    error_of(to_slices(white, w), make_step(samples, options, step), samples.weights).backward();
    adam.step();
    if (progress) progress(step + 1);
  }
  for (auto* maps : {&white.store, &white.key, &white.value}) {
    for (Tensor& map : *maps) map = map.detach();
  }
  result.error_after = mean_error(samples, white, w, options);
  result.slices = to_slices(white, w);
  // A layer that was nearly exact may end the fit with its noise.
  if (result.error_after > result.error_before) {
    result.slices = std::move(start);
    result.error_after = result.error_before;
  }
  return result;
}

}  // namespace parlat
