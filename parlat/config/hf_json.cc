#include "parlat/base/error.h"
#include "parlat/config/model_config.h"

namespace parlat {

namespace {

using nlohmann::json;

json rope_json(const RopeSpec& rope) {
  if (rope.type == RopeSpec::Type::kDefault) return nullptr;
  json scaling = {{"type", "yarn"},
                  {"rope_type", "yarn"},
                  {"factor", rope.factor},
                  {"original_max_position_embeddings", rope.original_max_positions},
                  {"beta_fast", rope.beta_fast},
                  {"beta_slow", rope.beta_slow}};
  if (rope.mscale) scaling["mscale"] = *rope.mscale;
  if (rope.mscale_all_dim) scaling["mscale_all_dim"] = *rope.mscale_all_dim;
  if (rope.attention_factor) scaling["attention_factor"] = *rope.attention_factor;
  if (!rope.truncate) scaling["truncate"] = false;
  return scaling;
}

void write_experts(const ModelConfig& config, json& out) {
  if (!config.moe) {
    // youtu's class has no experts; the others build some in every layer from here on.
    if (config.model_type != "youtu") out["first_k_dense_replace"] = config.n_layers;
    return;
  }
  const MoeSpec& moe = *config.moe;
  constexpr const char* kMethods[] = {"greedy", "group_limited_greedy", "noaux_tc"};
  out["n_routed_experts"] = moe.n_routed;
  out["n_shared_experts"] = moe.n_shared;
  out["num_experts_per_tok"] = moe.experts_per_token;
  out["moe_intermediate_size"] = moe.d_expert;
  out["first_k_dense_replace"] = moe.first_dense;
  out["moe_layer_freq"] = moe.layer_freq;
  out["topk_method"] = kMethods[static_cast<int>(moe.gating)];
  out["scoring_func"] = moe.gating == Gating::kNoauxTc ? "sigmoid" : "softmax";
  out["n_group"] = moe.n_group;
  out["topk_group"] = moe.topk_group;
  out["norm_topk_prob"] = moe.norm_topk_prob;
  out["routed_scaling_factor"] = moe.routed_scaling_factor;
}

}  // namespace

json to_hf_json(const ModelConfig& config) {
  validate(config);
  json out = config.hf.is_object() ? config.hf : json::object();
  // transformers has no kimi_k2 of its own; the model is deepseek_v3's.
  const std::string type = config.model_type == "kimi_k2" ? "deepseek_v3" : config.model_type;
  const char* architecture = type == "deepseek_v2" ? "DeepseekV2ForCausalLM"
                             : type == "youtu"     ? "YoutuForCausalLM"
                                                   : "DeepseekV3ForCausalLM";
  // The hub's own code files are not copied along, and multi-token-prediction layers are not saved.
  for (const char* key : {"auto_map", "rope_parameters", "num_mtp_layers"}) out.erase(key);
  const MlaDims& d = config.mla.dims;
  const RopeSpec& rope = config.mla.rope;
  out["model_type"] = type;
  out["architectures"] = {architecture};
  out["vocab_size"] = config.vocab_size;
  out["hidden_size"] = d.d_model;
  out["intermediate_size"] = config.d_mlp;
  out["num_hidden_layers"] = config.n_layers;
  out["num_attention_heads"] = d.n_heads;
  out["num_key_value_heads"] = d.n_heads;
  out["q_lora_rank"] = d.d_q_latent ? json(*d.d_q_latent) : json();
  out["kv_lora_rank"] = d.d_latent;
  out["qk_nope_head_dim"] = d.d_nope;
  out["qk_rope_head_dim"] = d.d_rope;
  out["v_head_dim"] = d.d_v;
  out["hidden_act"] = "silu";
  out["rms_norm_eps"] = config.rms_norm_eps;
  out["initializer_range"] = config.initializer_range;
  if (config.embedding_initializer_range) out["embedding_initializer_range"] = *config.embedding_initializer_range;
  out["max_position_embeddings"] = config.max_positions;
  out["rope_theta"] = rope.theta;
  out["rope_scaling"] = rope_json(rope);
  if (type != "deepseek_v2") out["rope_interleave"] = rope.interleaved;
  out["tie_word_embeddings"] = config.tied_embeddings;
  out["attention_bias"] = false;
  if (type == "deepseek_v3") out["num_nextn_predict_layers"] = 0;
  out.erase("head_dim");
  out.erase("qk_head_dim");
  write_experts(config, out);
  return out;
}

}  // namespace parlat
