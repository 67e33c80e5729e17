#include "parlat/convert/sliced_layer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "parlat/mla/projections.h"
#include "parlat/tensor/fill.h"

namespace parlat {

namespace {

Tensor output(const MlaWeights& w, const Tensor& out_latent_bHqL) {
  const MlaDims& d = w.dims();
  const Tensor w_uv = w.w_ukv.view({d.n_heads, d.d_nope + d.d_v, d.d_latent}).narrow(1, d.d_nope, d.d_v);
  const Tensor out_bHqV = at::matmul(out_latent_bHqL, w_uv.transpose(1, 2));
  return at::matmul(out_bHqV.transpose(1, 2).flatten(2), w.w_o.t());
}

}  // namespace

SplitQueries split_queries(int64_t n_windows, int64_t n_tokens) {
  const int64_t kept = std::max<int64_t>(1, (n_windows == 1 ? n_tokens : n_windows) / 8);
  if (n_windows == 1) return {{{0}, {0, n_tokens - kept}}, {{0}, {n_tokens - kept, n_tokens}}};
  SplitQueries split{{{}, {0, n_tokens}}, {{}, {0, n_tokens}}};
  for (int64_t i = 0; i < kept; ++i) split.judge.windows.push_back((2 * i + 1) * n_windows / (2 * kept));
  for (int64_t window = 0; window < n_windows; ++window) {
    if (!std::ranges::binary_search(split.judge.windows, window)) split.fit.windows.push_back(window);
  }
  return split;
}

QuerySample sample_queries(const LayerSamples& samples, const QueryPool& pool, const SampleSize& size, int64_t index) {
  const at::NoGradGuard no_grad;
  const MlaWeights& w = samples.weights;
  const MlaDims& d = w.dims();
  const int64_t n_tokens = samples.x_BSD.size(1);
  const auto some = [&](int64_t count, int64_t of, const char* what) {
    const Tensor order = seeded_normal({of}, 1.0, size.seed, fmt::format("{} {}", what, index)).argsort();
    return std::get<0>(order.narrow(0, 0, std::min(count, of)).sort());
  };
  const auto n_windows = static_cast<int64_t>(pool.windows.size());
  const Tensor windows = at::tensor(pool.windows, at::kLong).index_select(0, some(size.windows, n_windows, "windows"));
  const Tensor queries = some(size.queries, pool.positions.size(), "queries") + pool.positions.begin;
  const Tensor x_bSD = samples.x_BSD.index_select(0, windows);
  const RopeTable rope{samples.rope.cos_BSr.index_select(1, queries).expand({x_bSD.size(0), -1, -1}).contiguous(),
                       samples.rope.sin_BSr.index_select(1, queries).expand({x_bSD.size(0), -1, -1}).contiguous(),
                       samples.rope.interleaved};
  const Tensor q_bHqd = project_query(w, x_bSD.index_select(1, queries), rope).transpose(1, 2) * w.spec.softmax_scale();
  const Tensor w_uk = w.w_ukv.view({d.n_heads, d.d_nope + d.d_v, d.d_latent}).narrow(1, 0, d.d_nope);
  const Tensor hidden_qS = at::arange(n_tokens).unsqueeze(0) > queries.unsqueeze(1);
  QuerySample sample;
  sample.absorbed_bHqL = at::matmul(q_bHqd.narrow(3, 0, d.d_nope), w_uk);
  const Tensor k_rope_b1RS = samples.k_rope().index_select(0, windows).transpose(1, 2).unsqueeze(1);
  sample.rope_scores_bHqS =
      at::matmul(q_bHqd.narrow(3, d.d_nope, d.d_rope), k_rope_b1RS).masked_fill(hidden_qS, -INFINITY);
  sample.c_kv_b1SL = samples.c_kv().index_select(0, windows).unsqueeze(1);
  const Tensor p =
      (at::matmul(sample.absorbed_bHqL, sample.c_kv_b1SL.transpose(2, 3)) + sample.rope_scores_bHqS).softmax(-1);
  sample.out_latent_bHqL = at::matmul(p, sample.c_kv_b1SL);
  sample.out_bqD = output(w, sample.out_latent_bHqL);
  return sample;
}

Tensor sliced_out_latent(const std::vector<SliceMaps>& slices, const QuerySample& sample) {
  std::vector<Tensor> parts;
  for (const SliceMaps& s : slices) {
    const Tensor z_b1Sw = at::matmul(sample.c_kv_b1SL, s.store_Lw);
    const Tensor scores = at::matmul(at::matmul(sample.absorbed_bHqL, s.key_Lw), z_b1Sw.transpose(2, 3));
    parts.push_back(at::matmul((scores + sample.rope_scores_bHqS).softmax(-1), z_b1Sw));
  }
  return at::cat(parts, 3);
}

Tensor value_error(const std::vector<SliceMaps>& slices, const Tensor& out_latent_bHqw, const QuerySample& sample,
                   const MlaWeights& weights) {
  std::vector<Tensor> values;
  for (const SliceMaps& s : slices) values.push_back(s.value_Lw);
  const Tensor out_latent = at::matmul(out_latent_bHqw, at::cat(values, 1).t());
  return (output(weights, out_latent) - sample.out_bqD).square().mean() / sample.out_bqD.var();
}

Tensor output_error(const std::vector<SliceMaps>& slices, const QuerySample& sample, const MlaWeights& weights) {
  return value_error(slices, sliced_out_latent(slices, sample), sample, weights);
}

}  // namespace parlat
