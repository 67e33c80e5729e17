#include "parlat/decode/sampling.h"

#include <ATen/ATen.h>

#include <cmath>

#include "parlat/base/error.h"
#include "parlat/tensor/fill.h"

namespace parlat {

namespace {

// In [0, 1), from the top 53 bits of a hash of seed and index.
double uniform(uint64_t seed, int64_t index) {
  return static_cast<double>(derive_seed(seed, fmt::format("token {}", index)) >> 11) * 0x1.0p-53;
}

int64_t largest(const Tensor& logits_V) {
  const float* const first = logits_V.const_data_ptr<float>();
  return std::max_element(first, first + logits_V.numel()) - first;
}

}  // namespace

void validate(const Sampling& s) {
  if (!std::isfinite(s.temperature) || s.temperature < 0) {
    throw ConfigError("temperature: expected 0 or more, got {}", s.temperature);
  }
  if (s.top_k < 0) throw ConfigError("top-k: expected 0 (all) or more, got {}", s.top_k);
  if (!(s.top_p > 0 && s.top_p <= 1)) throw ConfigError("top-p: expected more than 0, at most 1, got {}", s.top_p);
}

int64_t sample(const Tensor& logits_V, const Sampling& sampling, int64_t index) {
  const Tensor logits = logits_V.contiguous();
  if (sampling.temperature == 0) return largest(logits);

  // Tokens by falling logit, equal ones by number: the candidates are the first so many.
  const auto [sorted, tokens] = at::sort(logits, /*stable=*/true, /*dim=*/0, /*descending=*/true);
  const Tensor p = at::softmax(sorted.to(at::kDouble) / sampling.temperature, 0);
  const double* const probability = p.const_data_ptr<double>();
  const int64_t most = sampling.top_k > 0 ? std::min(sampling.top_k, p.numel()) : p.numel();
  double kept = 0;
  for (int64_t i = 0; i < most; ++i) kept += probability[i];
  double total = 0;
  int64_t candidates = 0;
  while (candidates < most && total < sampling.top_p * kept) total += probability[candidates++];

  double left = uniform(sampling.seed, index) * total;
  int64_t chosen = 0;
  while (chosen + 1 < candidates && left >= probability[chosen]) left -= probability[chosen++];
  return tokens[chosen].item<int64_t>();
}

}  // namespace parlat
