#include "parlat/convert/balanced_start.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "parlat/base/range.h"

namespace parlat {

namespace {

// Eigenvalues below this part of the largest are noise: their directions are not amplified beyond it.
constexpr double kSmallest = 1e-7;
// Ridge of the least squares, relative to each column's own size.
constexpr double kRidge = 1e-4;

// Second moment of absorbed queries, over heads and queries.
Tensor query_moment(const std::vector<QuerySample>& queries) {
  Tensor sum;
  double rows = 0;
  for (const QuerySample& sample : queries) {
    const Tensor q = sample.absorbed_bHqL.flatten(0, 2).to(at::kDouble);
    const Tensor product = at::matmul(q.t(), q);
    sum = sum.defined() ? sum + product : product;
    rows += static_cast<double>(q.size(0));
  }
  return sum / rows;
}

// How strongly each direction of a weighted latent shows in the layer's output, over all heads: sum of (w_o w_uv)^T
// (w_o w_uv).
Tensor output_metric(const MlaWeights& w) {
  const MlaDims& d = w.dims();
  const Tensor w_uv = w.w_ukv.view({d.n_heads, d.d_nope + d.d_v, d.d_latent}).narrow(1, d.d_nope, d.d_v);
  const Tensor w_o = w.w_o.view({d.d_model, d.n_heads, d.d_v});
  Tensor metric = at::zeros({d.d_latent, d.d_latent}, at::kDouble);
  for (int64_t h = 0; h < d.n_heads; ++h) {
    const Tensor through = at::matmul(w_o.select(1, h), w_uv[h]).to(at::kDouble);
    metric += at::matmul(through.t(), through);
  }
  return metric;
}

// Value maps that give back the exact weighted latents from the slices' as well as linear maps can. Returns the mean
// error of the output that is left.
double fit_values(const std::vector<QuerySample>& queries, const MlaWeights& weights, std::vector<SliceMaps>& slices) {
  std::vector<Tensor> out_latents;  // they do not depend on the value maps
  Tensor xx, xy;
  for (const QuerySample& sample : queries) {
    out_latents.push_back(sliced_out_latent(slices, sample));
    const Tensor x = out_latents.back().flatten(0, 2).to(at::kDouble);
    const Tensor y = sample.out_latent_bHqL.flatten(0, 2).to(at::kDouble);
    xx = xx.defined() ? xx + at::matmul(x.t(), x) : at::matmul(x.t(), x);
    xy = xy.defined() ? xy + at::matmul(x.t(), y) : at::matmul(x.t(), y);
  }
  const Tensor values = at::linalg_solve(xx + at::diag(xx.diagonal() * kRidge), xy).to(at::kFloat);  // [sum of w, L]
  int64_t row = 0;
  for (SliceMaps& s : slices) {
    s.value_Lw = values.narrow(0, row, s.width()).t().contiguous();
    row += s.width();
  }
  double sum = 0;
  for (size_t i = 0; i < queries.size(); ++i) {
    sum += value_error(slices, out_latents[i], queries[i], weights).item<double>();
  }
  return sum / static_cast<double>(queries.size());
}

}  // namespace

Whitening whitening(const Tensor& covariance_LL) {
  const Eigen e = eigen(covariance_LL);
  const Tensor root_L = e.values_L.clamp_min(e.values_L[0].item<double>() * kSmallest).sqrt();
  return {at::matmul(e.vectors_LL * root_L, e.vectors_LL.t()), at::matmul(e.vectors_LL / root_L, e.vectors_LL.t())};
}

std::vector<SliceMaps> principal_blocks(const LayerSamples& samples, int64_t groups) {
  const Tensor g_L1 = samples.weights.kv_norm.to(at::kDouble).unsqueeze(1);
  const Tensor u_LL = eigen(covariance(samples.c_kv().flatten(0, 1)) / g_L1 / g_L1.t()).vectors_LL;
  std::vector<SliceMaps> slices;
  for (int64_t group = 0; group < groups; ++group) {
    const Range columns = even_share(u_LL.size(0), groups, group);
    const Tensor u = u_LL.narrow(1, columns.begin, columns.size());
    const Tensor back = (u * g_L1).to(at::kFloat).contiguous();
    slices.push_back({(u / g_L1).to(at::kFloat).contiguous(), back, back});
  }
  return slices;
}

ScoreCoordinates score_coordinates(const LayerSamples& samples, const std::vector<QuerySample>& queries) {
  ScoreCoordinates c{whitening(covariance(samples.c_kv().flatten(0, 1))), {}, {}};
  const Tensor& root = c.whitening.root_LL;
  const auto white = [&](const Tensor& form_LL) { return at::matmul(at::matmul(root, form_LL), root); };
  c.by_score_LL = eigen(white(query_moment(queries))).vectors_LL;
  c.output_metric_LL = white(output_metric(samples.weights));
  return c;
}

Start shared_scores(const ScoreCoordinates& c, const std::vector<QuerySample>& queries, const MlaWeights& weights,
                    int64_t groups, int64_t shared) {
  const int64_t d_latent = c.by_score_LL.size(0);
  const Tensor scores = c.by_score_LL.narrow(1, 0, shared), rest = c.by_score_LL.narrow(1, shared, d_latent - shared);
  const Tensor metric = at::matmul(at::matmul(rest.t(), c.output_metric_LL), rest);
  const Tensor by_output = at::matmul(rest, eigen(metric).vectors_LL);
  std::vector<SliceMaps> slices;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t own = even_share(d_latent, groups, group).size() - shared;
    const Tensor dealt = by_output.slice(1, group, std::nullopt, groups).narrow(1, 0, own);
    const Tensor x = at::cat({scores, dealt}, 1);
    const Tensor key = at::matmul(c.whitening.root_LL, x).to(at::kFloat).contiguous();
    slices.push_back({at::matmul(c.whitening.inverse_LL, x).to(at::kFloat).contiguous(), key, key});
  }
  const double error = fit_values(queries, weights, slices);
  return {std::move(slices), c.whitening, error};
}

double mean_error(const std::vector<SliceMaps>& slices, const std::vector<QuerySample>& queries,
                  const MlaWeights& weights) {
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (const QuerySample& sample : queries) sum += output_error(slices, sample, weights).item<double>();
  return sum / static_cast<double>(queries.size());
}

Start best_start(const LayerSamples& samples, const std::vector<QuerySample>& queries, int64_t groups) {
  const ScoreCoordinates coordinates = score_coordinates(samples, queries);
  Start best{principal_blocks(samples, groups), coordinates.whitening, 0};
  best.error = mean_error(best.slices, queries, samples.weights);
  const int64_t narrowest = even_share(samples.weights.dims().d_latent, groups, groups - 1).size();
  const int64_t step = std::max<int64_t>(1, narrowest / 16);
  for (int64_t shared = 0; shared < narrowest; shared += step) {
    Start start = shared_scores(coordinates, queries, samples.weights, groups, shared);
    if (start.error < best.error) best = std::move(start);
  }
  return best;
}

}  // namespace parlat
