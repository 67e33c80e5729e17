#include "parlat/weights/weight_table.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "parlat/base/error.h"
#include "parlat/tensor/fill.h"

namespace parlat {

namespace {

class TableBuilder {
 public:
  TableBuilder(const ModelConfig& config, Range local_experts) : config_(config), local_experts_(local_experts) {}

  std::vector<WeightRow> build(ModelWeights& weights) {
    const int64_t d_model = config_.mla.dims.d_model;
    weights = ModelWeights();
    weights.layers.resize(config_.n_layers);
    add("model.embed_tokens.weight", {config_.vocab_size, d_model}, weights.embedding);
    if (config_.tied_embeddings) rows_.back().tied = &weights.head;
    for (int64_t layer = 0; layer < config_.n_layers; ++layer) add_layer(layer, weights.layers[layer]);
    add_norm("model.norm.weight", d_model, weights.final_norm);
    if (!config_.tied_embeddings) add("lm_head.weight", {config_.vocab_size, d_model}, weights.head);
    return std::move(rows_);
  }

 private:
  WeightRow& add(std::string name, std::vector<int64_t> shape, Tensor& tensor) {
    rows_.push_back({.name = std::move(name), .shape = std::move(shape), .tensor = &tensor});
    return rows_.back();
  }

  void add_norm(std::string name, int64_t width, Tensor& tensor) {
    add(std::move(name), {width}, tensor).init = WeightRow::Init::kOnes;
  }

  void add_layer(int64_t index, LayerWeights& layer) {
    const std::string prefix = fmt::format("model.layers.{}.", index);
    const int64_t d_model = config_.mla.dims.d_model;
    add_norm(prefix + "input_layernorm.weight", d_model, layer.attention_norm);
    add_attention(prefix + "self_attn.", layer.mla);
    add_norm(prefix + "post_attention_layernorm.weight", d_model, layer.mlp_norm);
    if (config_.is_moe_layer(index)) {
      add_experts(prefix + "mlp.", layer.moe.emplace());
    } else {
      add_mlp(prefix + "mlp.", config_.d_mlp, layer.mlp.emplace());
    }
  }

  void add_attention(const std::string& prefix, MlaWeights& w) {
    const MlaDims& d = config_.mla.dims;
    w.spec = config_.mla;
    if (d.d_q_latent) {
      add(prefix + "q_a_proj.weight", {*d.d_q_latent, d.d_model}, w.w_dq);
      add_norm(prefix + "q_a_layernorm.weight", *d.d_q_latent, w.q_norm);
      add(prefix + "q_b_proj.weight", {d.n_heads * d.d_qk(), *d.d_q_latent}, w.w_uq);
    } else {
      add(prefix + "q_proj.weight", {d.n_heads * d.d_qk(), d.d_model}, w.w_uq);
    }
    add(prefix + "kv_a_proj_with_mqa.weight", {d.d_cache(), d.d_model}, w.w_dkv);
    add_norm(prefix + "kv_a_layernorm.weight", d.d_latent, w.kv_norm);
    add(prefix + "kv_b_proj.weight", {d.n_heads * (d.d_nope + d.d_v), d.d_latent}, w.w_ukv);
    add(prefix + "o_proj.weight", {d.d_model, d.n_heads * d.d_v}, w.w_o);
  }

  void add_mlp(const std::string& prefix, int64_t width, MlpWeights& w, bool expert = false) {
    const int64_t d_model = config_.mla.dims.d_model;
    add(prefix + "gate_proj.weight", {width, d_model}, w.w_gate).expert = expert;
    add(prefix + "up_proj.weight", {width, d_model}, w.w_up).expert = expert;
    add(prefix + "down_proj.weight", {d_model, width}, w.w_down).expert = expert;
  }

  void add_experts(const std::string& prefix, MoeWeights& w) {
    const MoeSpec& moe = *config_.moe;
    add(prefix + "gate.weight", {moe.n_routed, config_.mla.dims.d_model}, w.w_router);
    if (moe.gating == Gating::kNoauxTc) {
      WeightRow& bias = add(prefix + "gate.e_score_correction_bias", {moe.n_routed}, w.selection_bias);
      bias.trained = false;
      bias.keep_fp32 = true;
      bias.init = WeightRow::Init::kZeros;
    }
    w.local_experts = local_experts_;
    w.experts.resize(local_experts_.size());
    for (int64_t i = 0; i < local_experts_.size(); ++i) {
      add_mlp(fmt::format("{}experts.{}.", prefix, local_experts_.begin + i), moe.d_expert, w.experts[i], true);
    }
    if (moe.n_shared > 0) add_mlp(prefix + "shared_experts.", moe.n_shared * moe.d_expert, w.shared.emplace());
  }

  const ModelConfig& config_;
  Range local_experts_;
  std::vector<WeightRow> rows_;
};

}  // namespace

void WeightRow::set(const Tensor& value) const {
  *tensor = value;
  if (tied != nullptr) *tied = value;
}

std::vector<WeightRow> weight_table(const ModelConfig& config, Range local_experts, ModelWeights& weights) {
  const int64_t n_routed = config.moe ? config.moe->n_routed : 0;
  PARLAT_ASSERT(0 <= local_experts.begin && local_experts.begin <= local_experts.end && local_experts.end <= n_routed,
                "experts {} to {} of {}", local_experts.begin, local_experts.end, n_routed);
  return TableBuilder(config, local_experts).build(weights);
}

Range all_experts(const ModelConfig& config) { return {0, config.moe ? config.moe->n_routed : 0}; }

void initialize(const std::vector<WeightRow>& table, const ModelConfig& config, uint64_t seed, at::ScalarType dtype) {
  for (const WeightRow& row : table) {
    const at::ScalarType row_dtype = row.keep_fp32 ? at::kFloat : dtype;
    const auto keep = [&](const Tensor& whole) { row.set(row.part ? row.part->of(whole).contiguous() : whole); };
    if (row.init == WeightRow::Init::kOnes) {
      keep(at::ones(row.shape, row_dtype));
    } else if (row.init == WeightRow::Init::kZeros) {
      keep(at::zeros(row.shape, row_dtype));
    } else {
      const bool embedding = row.name == "model.embed_tokens.weight";
      const double std =
          embedding ? config.embedding_initializer_range.value_or(config.initializer_range) : config.initializer_range;
      keep(seeded_normal(row.shape, std, seed, row.name, row_dtype));
    }
  }
}

}  // namespace parlat
