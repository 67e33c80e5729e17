#pragma once

#include "parlat/config/model_config.h"

namespace parlat {

// Two layers; the second is a mixture of experts if asked for.
inline ModelConfig small_model(bool experts) {
  nlohmann::json hf = {{"model_type", "deepseek_v3"}, {"vocab_size", 61},
                       {"hidden_size", 32},           {"intermediate_size", 48},
                       {"num_hidden_layers", 2},      {"num_attention_heads", 4},
                       {"num_key_value_heads", 4},    {"q_lora_rank", 24},
                       {"kv_lora_rank", 16},          {"qk_nope_head_dim", 8},
                       {"qk_rope_head_dim", 4},       {"v_head_dim", 8},
                       {"n_routed_experts", nullptr}, {"max_position_embeddings", 512},
                       {"rms_norm_eps", 1e-6},        {"hidden_act", "silu"},
                       {"initializer_range", 0.2},    {"tie_word_embeddings", !experts}};
  if (experts) {
    hf.update({{"n_routed_experts", 6},
               {"n_shared_experts", 1},
               {"num_experts_per_tok", 2},
               {"moe_intermediate_size", 16},
               {"first_k_dense_replace", 1},
               {"topk_method", "noaux_tc"},
               {"n_group", 2},
               {"topk_group", 1},
               {"norm_topk_prob", true},
               {"scoring_func", "sigmoid"},
               {"routed_scaling_factor", 2.5}});
  }
  return parse_model_config(hf, "small");
}

}  // namespace parlat
