#pragma once

#include <cstdint>
#include <vector>

#include "parlat/config/model_config.h"

namespace parlat {

// Multiply-adds counted as two, of the whole model's forward pass over documents of the given lengths: projections,
// causal attention with d_qk and d_v apart (half of the square), routed experts a token really visits, head.
// Backward is twice that.
double forward_flops(const ModelConfig& config, const std::vector<int64_t>& document_lengths);

// Of one attention layer: the projections (query, latent, up-projection, output) and the score and value products.
struct AttentionFlops {
  double projections = 0;
  double attention = 0;
};
AttentionFlops attention_flops(const MlaDims& dims, const std::vector<int64_t>& document_lengths);

// Trained parameters: all, and those a token visits.
struct ParameterCount {
  int64_t total = 0;
  int64_t active = 0;
};
ParameterCount count_parameters(const ModelConfig& config);

}  // namespace parlat
