#pragma once

#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <utility>

#include "parlat/model/transformer.h"
#include "parlat/weights/checkpoint_files.h"
#include "tests/model/local_attention.h"
#include "tests/temporary_folder.h"

namespace parlat {

// A dense and an expert layer of 8 heads, whose vocabulary, widths and experts no number of ranks divides.
inline ModelConfig small_decode_model(const nlohmann::json& changes = nlohmann::json::object()) {
  nlohmann::json json = nlohmann::json::parse(R"({
    "model_type": "deepseek_v3", "hidden_size": 36, "num_attention_heads": 8, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 10, "kv_lora_rank": 16, "q_lora_rank": 22, "num_hidden_layers": 2,
    "vocab_size": 61, "intermediate_size": 50, "n_routed_experts": 12, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "moe_intermediate_size": 17, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2,
    "max_position_embeddings": 512, "initializer_range": 0.25})");
  json.update(changes);
  return parse_model_config(json, "small");
}

// Its seeded weights in a folder, and in fp64. out_scale: what those that write to the residual are multiplied by.
struct SavedModel {
  TemporaryFolder folder;
  ModelConfig config;
  ModelWeights weights;
  std::vector<WeightRow> table;

  explicit SavedModel(ModelConfig of = small_decode_model(), at::ScalarType stored = at::kFloat, double out_scale = 1)
      : config(std::move(of)), table(weight_table(config, all_experts(config), weights)) {
    initialize(table, config, /*seed=*/5, at::kFloat);
    for (const WeightRow& row : table) {
      const bool out = row.name.ends_with("o_proj.weight") || row.name.ends_with("down_proj.weight");
      row.set((*row.tensor * (out ? out_scale : 1)).to(stored));
    }
    save_weights(folder.path(), config, table);
    for (const WeightRow& row : table) row.set(row.tensor->to(at::kDouble));
  }

  // [S, vocabulary] of one sequence, fp64.
  Tensor logits(const Attention& attention, const std::vector<int64_t>& tokens) const {
    const at::NoGradGuard no_grad;
    Tensor out;
    run_local_ranks(1, [&](Communicator& comm) {
      const int64_t length = static_cast<int64_t>(tokens.size());
      const Transformer model(config, weights, attention, comm);
      const TokenShard shard = whole_sequences(config, 1, length, at::kDouble);
      out = model.logits(model.forward(at::tensor(tokens, at::kLong).view({1, length}), shard))[0];
    });
    return out;
  }
};

}  // namespace parlat
