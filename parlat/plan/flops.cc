#include "parlat/plan/flops.h"

#include <numeric>

namespace parlat {

namespace {

// Weights of one attention layer that a token is multiplied with.
int64_t projection_parameters(const MlaDims& d) {
  const int64_t d_query = d.n_heads * d.d_qk();
  const int64_t query = d.d_q_latent ? *d.d_q_latent * (d.d_model + d_query) : d.d_model * d_query;
  return query + d.d_model * d.d_cache() + d.d_latent * d.n_heads * (d.d_nope + d.d_v) + d.n_heads * d.d_v * d.d_model;
}

int64_t attention_parameters(const MlaDims& d) {
  return projection_parameters(d) + d.d_latent + d.d_q_latent.value_or(0);
}

int64_t mlp_parameters(int64_t d_model, int64_t width) { return 3 * d_model * width; }

int64_t moe_parameters(const MoeSpec& moe, int64_t d_model, int64_t routed) {
  return moe.n_routed * d_model + mlp_parameters(d_model, (routed + moe.n_shared) * moe.d_expert);
}

// Weights of one layer's MLP that a token is multiplied with.
int64_t active_mlp_parameters(const ModelConfig& config, int64_t layer) {
  const int64_t d_model = config.mla.dims.d_model;
  return config.is_moe_layer(layer) ? moe_parameters(*config.moe, d_model, config.moe->experts_per_token)
                                    : mlp_parameters(d_model, config.d_mlp);
}

}  // namespace

AttentionFlops attention_flops(const MlaDims& dims, const std::vector<int64_t>& document_lengths) {
  double tokens = 0, pairs = 0;
  for (const int64_t length : document_lengths) {
    tokens += static_cast<double>(length);
    pairs += static_cast<double>(length) * static_cast<double>(length + 1) / 2;
  }
  return {.projections = 2 * tokens * static_cast<double>(projection_parameters(dims)),
          .attention = 2 * pairs * static_cast<double>(dims.n_heads * (dims.d_qk() + dims.d_v))};
}

double forward_flops(const ModelConfig& config, const std::vector<int64_t>& document_lengths) {
  const AttentionFlops attention = attention_flops(config.mla.dims, document_lengths);
  const double tokens = std::accumulate(document_lengths.begin(), document_lengths.end(), 0.0);
  double flops = static_cast<double>(config.n_layers) * (attention.projections + attention.attention);
  for (int64_t layer = 0; layer < config.n_layers; ++layer) {
    flops += 2 * tokens * static_cast<double>(active_mlp_parameters(config, layer));
  }
  return flops + 2 * tokens * static_cast<double>(config.mla.dims.d_model * config.vocab_size);
}

ParameterCount count_parameters(const ModelConfig& config) {
  const int64_t d_model = config.mla.dims.d_model;
  ParameterCount count;
  // Everything outside the experts is visited by every token.
  const int64_t tables = config.vocab_size * d_model * (config.tied_embeddings ? 1 : 2);
  count.active = tables + d_model + config.n_layers * (attention_parameters(config.mla.dims) + 2 * d_model);
  count.total = count.active;
  for (int64_t layer = 0; layer < config.n_layers; ++layer) {
    const bool moe = config.is_moe_layer(layer);
    count.active += active_mlp_parameters(config, layer);
    count.total +=
        moe ? moe_parameters(*config.moe, d_model, config.moe->n_routed) : mlp_parameters(d_model, config.d_mlp);
  }
  return count;
}

}  // namespace parlat
