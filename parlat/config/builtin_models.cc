#include "parlat/config/builtin_models.h"

#include <array>
#include <string_view>
#include <utility>

#include "parlat/config/model_config.h"

namespace parlat {

namespace {

// deepseek-ai/DeepSeek-V3, without its fp8 quantisation.
constexpr std::string_view kV3 = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
  "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
  "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
  "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1,
  "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 8, "topk_group": 4, "norm_topk_prob": true,
  "routed_scaling_factor": 2.5, "hidden_act": "silu", "rms_norm_eps": 1e-06, "initializer_range": 0.02,
  "max_position_embeddings": 163840, "rope_theta": 10000, "tie_word_embeddings": false, "attention_bias": false,
  "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                   "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
})";

// deepseek-ai/DeepSeek-V2
constexpr std::string_view kV2 = R"({
  "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
  "vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60,
  "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 160, "n_shared_experts": 2,
  "num_experts_per_tok": 6, "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "moe_layer_freq": 1,
  "topk_method": "group_limited_greedy", "scoring_func": "softmax", "n_group": 8, "topk_group": 3,
  "norm_topk_prob": false, "routed_scaling_factor": 16.0, "hidden_act": "silu", "rms_norm_eps": 1e-06,
  "initializer_range": 0.02, "max_position_embeddings": 163840, "rope_theta": 10000, "tie_word_embeddings": false,
  "attention_bias": false,
  "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                   "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
})";

// deepseek-ai/DeepSeek-V2-Lite
constexpr std::string_view kV2Lite = R"({
  "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
  "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
  "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": null, "kv_lora_rank": 512,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
  "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1,
  "topk_method": "greedy", "scoring_func": "softmax", "n_group": 1, "topk_group": 1, "norm_topk_prob": false,
  "routed_scaling_factor": 1.0, "hidden_act": "silu", "rms_norm_eps": 1e-06, "initializer_range": 0.02,
  "max_position_embeddings": 163840, "rope_theta": 10000, "tie_word_embeddings": false, "attention_bias": false,
  "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                   "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
})";

// moonshotai/Kimi-K2-Instruct, without its fp8 quantisation.
constexpr std::string_view kK2 = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
  "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
  "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384, "n_shared_experts": 1,
  "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 1, "moe_layer_freq": 1,
  "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
  "routed_scaling_factor": 2.827, "hidden_act": "silu", "rms_norm_eps": 1e-06, "initializer_range": 0.02,
  "max_position_embeddings": 131072, "rope_theta": 50000.0, "tie_word_embeddings": false, "attention_bias": false,
  "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
                   "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
})";

// moonshotai/Moonlight-16B-A3B
constexpr std::string_view kMoonlight = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
  "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27,
  "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": null, "kv_lora_rank": 512,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
  "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1,
  "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
  "routed_scaling_factor": 2.446, "hidden_act": "silu", "rms_norm_eps": 1e-05, "initializer_range": 0.02,
  "max_position_embeddings": 8192, "rope_theta": 50000.0, "tie_word_embeddings": false, "attention_bias": false,
  "rope_scaling": null
})";

// tencent/Youtu-LLM-2B: dense, tied.
constexpr std::string_view kYoutu = R"({
  "architectures": ["YoutuForCausalLM"], "model_type": "youtu",
  "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32,
  "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-06,
  "max_position_embeddings": 131072, "tie_word_embeddings": true, "attention_bias": false,
  "rope_interleave": true, "rope_parameters": {"rope_type": "default", "rope_theta": 1600000}
})";

// Trains in minutes on bytes, and has every part: query latent, dense and expert layers, groups, a shared expert.
constexpr std::string_view kTiny = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
  "vocab_size": 257, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4,
  "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64,
  "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1,
  "num_experts_per_tok": 2, "moe_intermediate_size": 160, "first_k_dense_replace": 1, "moe_layer_freq": 1,
  "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 2, "topk_group": 1, "norm_topk_prob": true,
  "routed_scaling_factor": 1.0, "hidden_act": "silu", "rms_norm_eps": 1e-06, "initializer_range": 0.02,
  "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": false, "attention_bias": false,
  "bos_token_id": null, "eos_token_id": 256, "num_nextn_predict_layers": 0
})";

constexpr std::array<std::pair<std::string_view, std::string_view>, 7> kModels = {{{"v3", kV3},
                                                                                   {"v2", kV2},
                                                                                   {"v2-lite", kV2Lite},
                                                                                   {"k2", kK2},
                                                                                   {"moonlight", kMoonlight},
                                                                                   {"youtu", kYoutu},
                                                                                   {"tiny", kTiny}}};

}  // namespace

std::optional<nlohmann::json> builtin_model(const std::string& name) {
  for (const auto& [model, text] : kModels) {
    if (model == name) return nlohmann::json::parse(text);
  }
  return std::nullopt;
}

std::vector<std::string> builtin_model_names() {
  std::vector<std::string> names;
  for (const auto& [model, text] : kModels) names.emplace_back(model);
  return names;
}

}  // namespace parlat
