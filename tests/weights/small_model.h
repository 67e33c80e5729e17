#pragma once

#include <string>
#include <utility>
#include <vector>

#include "parlat/config/model_config.h"
#include "parlat/tensor/fill.h"
#include "parlat/weights/weight_table.h"

namespace parlat {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// A dense layer and an expert layer of 4 experts and a shared one; with query latent, untied unless asked.
inline ModelConfig small_model(bool tied = false) {
  ModelConfig c = parse_model_config(nlohmann::json::parse(R"({
    "model_type": "deepseek_v3", "hidden_size": 32, "num_attention_heads": 4, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "num_hidden_layers": 2,
    "vocab_size": 61, "intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1})"),
                                     "small");
  c.tied_embeddings = tied;
  return c;
}

}  // namespace parlat
