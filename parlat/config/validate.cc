#include <cmath>
#include <string>
#include <vector>

#include "parlat/base/error.h"
#include "parlat/config/model_config.h"

namespace parlat {

namespace {

// Beyond these a file is broken; sizes computed from admitted values fit 64 bits.
constexpr double kMostParameters = 1e15;
constexpr int64_t kMostExpertMlps = 1'000'000;

void check_widths(const ModelConfig& config, std::vector<std::string>& problems) {
  const MlaDims& d = config.mla.dims;
  const std::pair<const char*, int64_t> widths[] = {{"hidden_size", d.d_model},
                                                    {"num_attention_heads", d.n_heads},
                                                    {"qk_nope_head_dim", d.d_nope},
                                                    {"qk_rope_head_dim", d.d_rope},
                                                    {"v_head_dim", d.d_v},
                                                    {"kv_lora_rank", d.d_latent},
                                                    {"q_lora_rank", d.d_q_latent.value_or(1)},
                                                    {"num_hidden_layers", config.n_layers},
                                                    {"vocab_size", config.vocab_size},
                                                    {"intermediate_size", config.d_mlp},
                                                    {"max_position_embeddings", config.max_positions}};
  for (const auto& [key, width] : widths) {
    if (width < 1) problems.push_back(fmt::format("{}: expected at least 1, got {}", key, width));
  }
  if (d.d_rope % 2 != 0) {
    problems.push_back(fmt::format("qk_rope_head_dim: expected an even number (rotated pairs), got {}", d.d_rope));
  }
}

// Groups exist for the gatings that choose groups first.
void check_experts(const MoeSpec& moe, int64_t n_layers, std::vector<std::string>& problems) {
  const auto require = [&](bool holds, const char* expected) {
    if (holds) return;
    problems.push_back(
        fmt::format("experts: expected {}, got n_routed_experts {}, n_group {}, topk_group {}, num_experts_per_tok {}",
                    expected, moe.n_routed, moe.n_group, moe.topk_group, moe.experts_per_token));
  };
  const bool grouped = moe.gating != Gating::kGreedy;
  const bool sizes = moe.n_routed >= 1 && moe.experts_per_token >= 1 && moe.n_group >= 1 && moe.topk_group >= 1;
  require(sizes, "sizes of at least 1");
  if (!sizes) return;
  int64_t eligible = moe.n_routed;
  if (grouped) {
    const int64_t group = moe.n_routed / moe.n_group;
    require(moe.n_routed % moe.n_group == 0, "n_group to divide n_routed_experts");
    if (moe.gating == Gating::kNoauxTc) require(group >= 2, "at least 2 experts a group (noaux_tc scores its top 2)");
    require(moe.topk_group <= moe.n_group, "topk_group of at most n_group");
    eligible = group * std::min(moe.topk_group, moe.n_group);
  }
  require(moe.experts_per_token <= eligible, "num_experts_per_tok of at most the experts in the kept groups");
  if (moe.d_expert < 1)
    problems.push_back(fmt::format("moe_intermediate_size: expected at least 1, got {}", moe.d_expert));
  if (moe.n_shared < 0) problems.push_back(fmt::format("n_shared_experts: expected at least 0, got {}", moe.n_shared));
  if (moe.first_dense < 0 || moe.layer_freq < 1) {
    problems.push_back(
        fmt::format("experts: expected first_k_dense_replace of at least 0 and moe_layer_freq of at least "
                    "1, got {} and {}",
                    moe.first_dense, moe.layer_freq));
  }
  if (moe.n_routed > kMostExpertMlps / std::max<int64_t>(n_layers, 1)) {
    problems.push_back(fmt::format("n_routed_experts: expected at most {} over {} layers, got {} a layer",
                                   kMostExpertMlps, n_layers, moe.n_routed));
  }
}

double estimated_parameters(const ModelConfig& config) {
  const MlaDims& d = config.mla.dims;
  const double model = static_cast<double>(d.d_model), heads = static_cast<double>(d.n_heads);
  const double query = static_cast<double>(d.d_q_latent.value_or(d.d_model));
  const double attention = model * static_cast<double>(d.d_cache()) + model * query +
                           heads * static_cast<double>(d.d_qk()) * query + heads * static_cast<double>(d.d_v) * model +
                           heads * static_cast<double>(d.d_nope + d.d_v) * static_cast<double>(d.d_latent);
  double mlp = 3 * model * static_cast<double>(config.d_mlp);
  if (config.moe) {
    mlp += 3 * model * static_cast<double>(config.moe->d_expert) *
           (static_cast<double>(config.moe->n_routed) + static_cast<double>(config.moe->n_shared));
  }
  return static_cast<double>(config.n_layers) * (attention + mlp) + 2 * model * static_cast<double>(config.vocab_size);
}

}  // namespace

void validate(const ModelConfig& config) {
  std::vector<std::string> problems;
  check_widths(config, problems);
  if (config.moe) check_experts(*config.moe, config.n_layers, problems);
  if (problems.empty() && estimated_parameters(config) > kMostParameters) {
    problems.push_back(
        fmt::format("expected at most {:.0e} parameters, got {:.1e}", kMostParameters, estimated_parameters(config)));
  }
  if (problems.empty()) return;
  std::string all;
  for (const std::string& problem : problems) all += (all.empty() ? "" : "; ") + problem;
  throw ConfigError("{}: {}", config.name.empty() ? "model" : config.name, all);
}

}  // namespace parlat
