#include "parlat/convert/balanced.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/adam.h>

#include <cmath>
#include <numbers>

#include "parlat/convert/balanced_start.h"

namespace parlat {

namespace {

// To find the start and to judge the end.
std::vector<QuerySample> six_samples(const LayerSamples& samples, const QueryPool& pool, const SampleSize& size) {
  std::vector<QuerySample> queries;
  for (int64_t i = 1; i <= 6; ++i) queries.push_back(sample_queries(samples, pool, size, -i));
  return queries;
}

// The parameters: a map of every kind and slice in white coordinates, store = inverse s, key = root k, value = root v.
class WhiteMaps {
 public:
  WhiteMaps(const std::vector<SliceMaps>& slices, const Whitening& w)
      : root_(w.root_LL.to(at::kFloat)), inverse_(w.inverse_LL.to(at::kFloat)) {
    for (const SliceMaps& s : slices) {
      for (const Tensor& map :
           {at::matmul(root_, s.store_Lw), at::matmul(inverse_, s.key_Lw), at::matmul(inverse_, s.value_Lw)}) {
        parameters_.push_back(map.detach().requires_grad_());
      }
    }
  }

  std::vector<SliceMaps> slices() const {
    std::vector<SliceMaps> slices;
    for (size_t i = 0; i < parameters_.size(); i += 3) {
      slices.push_back({at::matmul(inverse_, parameters_[i]), at::matmul(root_, parameters_[i + 1]),
                        at::matmul(root_, parameters_[i + 2])});
    }
    return slices;
  }

  const std::vector<Tensor>& parameters() const { return parameters_; }

 private:
  Tensor root_, inverse_;
  std::vector<Tensor> parameters_;
};

// Linear warm-up over 20 steps, then half a cosine to zero.
double rate_at(int64_t step, int64_t steps, double peak) {
  const double warm = std::min(1.0, static_cast<double>(step + 1) / 20);
  return peak * warm * 0.5 * (1 + std::cos(std::numbers::pi * static_cast<double>(step) / static_cast<double>(steps)));
}

// Entries of an orthonormal basis are about L^-1/2 in size; what is wrong with them about the square root of the error
// times that. A few times as much a step, or a nearly exact layer ends with the fit's noise.
double peak_rate(double error, int64_t d_latent) { return 3 * std::sqrt(error / static_cast<double>(d_latent)); }

std::vector<SliceMaps> fit(const LayerSamples& samples, const QueryPool& pool, const Start& start,
                           const BalancedOptions& options, const SampleSize& size) {
  const at::AutoGradMode grad(true);
  const WhiteMaps white(start.slices, start.whitening);
  const double peak = peak_rate(start.error, samples.weights.dims().d_latent);
  torch::optim::Adam adam(white.parameters(), torch::optim::AdamOptions(peak).betas({0.9, 0.98}));
  for (int64_t step = 0; step < options.steps; ++step) {
    static_cast<torch::optim::AdamOptions&>(adam.param_groups()[0].options()).lr(rate_at(step, options.steps, peak));
    adam.zero_grad();
    output_error(white.slices(), sample_queries(samples, pool, size, step), samples.weights).backward();
    adam.step();
  }
  std::vector<SliceMaps> slices = white.slices();
  for (SliceMaps& s : slices) s = {s.store_Lw.detach(), s.key_Lw.detach(), s.value_Lw.detach()};
  return slices;
}

}  // namespace

BalancedResult balance(const LayerSamples& samples, const BalancedOptions& options) {
  const SampleSize size{.windows = options.windows, .queries = options.queries, .seed = options.seed};
  const auto [fitted, judging] = split_queries(samples.x_BSD.size(0), samples.x_BSD.size(1));
  Start start = best_start(samples, six_samples(samples, fitted, size), options.groups);
  const std::vector<QuerySample> judges = six_samples(samples, judging, size);
  BalancedResult result;
  result.error_before = mean_error(start.slices, judges, samples.weights);
  result.slices = fit(samples, fitted, start, options, size);
  result.error_after = mean_error(result.slices, judges, samples.weights);
  if (options.steps == 0 || result.error_after > result.error_before) {
    result.slices = std::move(start.slices);
    result.error_after = result.error_before;
  }
  return result;
}

}  // namespace parlat
