#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "parlat/config/rope.h"

namespace parlat {

// The widths of one Multi-head Latent Attention layer. Letters are those of docs/mathematics.md.
struct MlaDims {
  int64_t d_model = 0;                // D  hidden_size
  int64_t n_heads = 0;                // H  num_attention_heads
  int64_t d_nope = 0;                 // N  qk_nope_head_dim
  int64_t d_rope = 0;                 // R  qk_rope_head_dim
  int64_t d_v = 0;                    // V  v_head_dim
  int64_t d_latent = 0;               // L  kv_lora_rank
  std::optional<int64_t> d_q_latent;  // Q  q_lora_rank
  int64_t d_qk() const { return d_nope + d_rope; }
  int64_t d_cache() const { return d_latent + d_rope; }
};

// Everything besides weights that fixes what one attention layer computes.
struct MlaSpec {
  MlaDims dims;
  RopeSpec rope;
  double inner_norm_eps = 1e-6;  // q_norm and kv_norm, whatever rms_norm_eps says
  double softmax_scale() const;  // d_qk^-0.5 times YaRN's factor
};

enum class Gating { kGreedy, kGroupLimitedGreedy, kNoauxTc };

struct MoeSpec {
  int64_t n_routed = 0;
  int64_t n_shared = 0;
  int64_t experts_per_token = 0;
  int64_t d_expert = 0;     // moe_intermediate_size
  int64_t first_dense = 0;  // first_k_dense_replace
  int64_t layer_freq = 1;   // moe_layer_freq
  Gating gating = Gating::kNoauxTc;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  bool norm_topk_prob = false;
  double routed_scaling_factor = 1.0;
};

struct ModelConfig {
  std::string name;        // where it came from: a built-in name or a path
  std::string model_type;  // deepseek_v2, deepseek_v3, kimi_k2, youtu
  MlaSpec mla;
  int64_t n_layers = 0;
  int64_t vocab_size = 0;
  int64_t d_mlp = 0;  // intermediate_size
  double rms_norm_eps = 1e-6;
  bool tied_embeddings = false;
  std::optional<std::array<int64_t, 2>>
      fp8_block;  // rows and columns that share a scale, in a checkpoint of fp8 weights
  int64_t max_positions = 4096;
  double initializer_range = 0.02;
  std::optional<double> embedding_initializer_range;  // youtu; initializer_range where absent
  std::optional<MoeSpec> moe;
  nlohmann::json hf;                      // the file as read (text_config for nested ones); what saving starts from
  std::vector<std::string> ignored_keys;  // unknown keys that do not change the mathematics

  bool is_moe_layer(int64_t layer) const;
};

// Reads a Hugging Face config.json (or a directory holding one), or a built-in name: v3, v2, v2-lite, k2, moonlight,
// youtu, tiny. Throws ConfigError for values that parlat does not compute, DataError for a file that can't be read.
ModelConfig load_model_config(const std::string& path_or_name);

// The same from parsed JSON; `name` is what errors call it.
ModelConfig parse_model_config(const nlohmann::json& json, const std::string& name);

// A config.json that transformers reads as the same model.
nlohmann::json to_hf_json(const ModelConfig& config);

std::vector<std::string> builtin_model_names();

// Throws ConfigError, naming all values at once, unless the widths and the expert topology are possible.
void validate(const ModelConfig& config);

}  // namespace parlat
