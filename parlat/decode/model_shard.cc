#include "parlat/decode/model_shard.h"

#include <ATen/ATen.h>

#include <map>

#include "parlat/base/error.h"
#include "parlat/mla/projections.h"
#include "parlat/weights/checkpoint_files.h"

namespace parlat {

namespace {

// Which part of each tensor a rank keeps; what is not named it keeps whole.
class Parts {
 public:
  Parts(const ModelConfig& config, const Placement& placement, int ranks, int rank)
      : config_(config), placement_(placement), ranks_(ranks), rank_(rank) {}

  Range vocabulary() const { return share(config_.vocab_size); }

  void assign(ModelWeights& weights, std::vector<WeightRow>& table) {
    rows(weights.embedding, vocabulary());
    rows(weights.head, vocabulary());
    for (LayerWeights& layer : weights.layers) {
      assign(layer.mla);
      if (layer.mlp) assign(*layer.mlp, config_.d_mlp);
      if (layer.moe && layer.moe->shared) assign(*layer.moe->shared, config_.moe->n_shared * config_.moe->d_expert);
    }
    for (WeightRow& row : table) {
      const auto part = parts_.find(row.tensor);
      if (part != parts_.end()) row.part = part->second;
    }
  }

 private:
  Range share(int64_t count) const { return even_share(count, ranks_, rank_); }
  void rows(Tensor& tensor, Range range) { parts_[&tensor] = {0, range}; }
  void columns(Tensor& tensor, Range range) { parts_[&tensor] = {1, range}; }

  void assign(MlaWeights& w) {
    const MlaDims& d = config_.mla.dims;
    const Range heads = placement_.heads;
    const auto scaled = [&](int64_t size) { return Range{heads.begin * size, heads.end * size}; };
    rows(w.w_uq, scaled(d.d_qk()));
    rows(w.w_ukv, scaled(d.d_nope + d.d_v));
    columns(w.w_o, scaled(d.d_v));
    w.spec.dims.n_heads = heads.size();
  }

  void assign(MlpWeights& w, int64_t width) {
    rows(w.w_gate, share(width));
    rows(w.w_up, share(width));
    columns(w.w_down, share(width));
  }

  const ModelConfig& config_;
  const Placement& placement_;
  int ranks_, rank_;
  std::map<const Tensor*, WeightPart> parts_;
};

// x w in fp32, rounded once to w's dtype.
Tensor through_map(const Tensor& w_hnL, const Tensor& map_Lw) {
  if (!map_Lw.defined()) return w_hnL;
  return at::matmul(w_hnL.to(at::kFloat), map_Lw).to(w_hnL.scalar_type());
}

AttentionShard attention_shard(MlaWeights w, const Placement& placement, const SliceMaps& maps) {
  const MlaDims& d = w.dims();
  AttentionShard shard;
  const Tensor w_ukv = w.w_ukv.view({d.n_heads, d.d_nope + d.d_v, d.d_latent});
  const Tensor w_uk = w_ukv.narrow(1, 0, d.d_nope), w_uv = w_ukv.narrow(1, d.d_nope, d.d_v);
  if (maps.store_Lw.defined()) shard.store_wL = maps.store_Lw.t().contiguous();
  shard.width = maps.store_Lw.defined() ? maps.width() : d.d_latent;
  shard.key_map_hwN = through_map(w_uk, maps.key_Lw).transpose(1, 2).contiguous();
  shard.value_map_hVw = through_map(w_uv, maps.value_Lw).contiguous();
  const Range prefill = placement.prefill_heads;
  w.w_ukv = up_projection(w, {prefill.begin - placement.heads.begin, prefill.end - placement.heads.begin}).clone();
  shard.mla = std::move(w);
  return shard;
}

}  // namespace

void keep_small_weights(std::vector<WeightRow>& table) {
  for (WeightRow& row : table) {
    const bool router = row.name.ends_with(".mlp.gate.weight");
    row.keep_fp32 = row.keep_fp32 || row.shape.size() == 1 || router;
  }
}

std::filesystem::path slice_file(const ModelSource& source, const LayoutSpec& layout) {
  // gla is the latent cut as it is, whatever slices there are.
  if (layout.groups == 1 || layout.layout == DecodeLayout::kGla) return {};
  if (!source.slices.empty()) return source.slices;
  if (source.directory.empty()) return {};
  const std::filesystem::path own = source.directory / slice_file_name(layout.groups);
  std::error_code ignored;
  return std::filesystem::exists(own, ignored) ? own : std::filesystem::path();
}

std::vector<SliceMaps> slice_maps(const ModelSource& source, const ModelConfig& config, const LayoutSpec& layout,
                                  int64_t group) {
  if (layout.groups == 1) return std::vector<SliceMaps>(config.n_layers);
  const std::filesystem::path path = slice_file(source, layout);
  if (path.empty()) {
    return std::vector<SliceMaps>(config.n_layers, plain_slice(config.mla.dims.d_latent, layout.groups, group));
  }
  const SliceFile file = load_slices(path, config);
  if (file.groups() != layout.groups) {
    throw ConfigError("groups: expected the {} of {}, got {}", file.groups(), path.string(), layout.groups);
  }
  if (!file.model.empty() && !source.directory.empty() && file.model != latent_fingerprint(source.directory)) {
    throw DataError("{}: expected slices of {}, got those of another model", path.string(), source.directory.string());
  }
  std::vector<SliceMaps> maps;
  for (const auto& layer : file.layers) maps.push_back(layer[group]);
  return maps;
}

ModelShard load_model_shard(const ModelSource& source, const ModelConfig& config, const LayoutSpec& layout, int ranks,
                            int rank, at::ScalarType dtype) {
  ModelShard shard{.config = config,
                   .origin = source.directory.empty() ? config.name : source.directory.string(),
                   .placement = place(layout, config.mla.dims, ranks, rank),
                   .vocabulary = {},
                   .embedding = {},
                   .final_norm = {},
                   .head = {},
                   .layers = {},
                   .skipped = {}};
  const std::vector<SliceMaps> maps = slice_maps(source, config, layout, shard.placement.group);
  const Range experts = config.moe ? even_share(config.moe->n_routed, ranks, rank) : Range{};
  ModelWeights weights;
  std::vector<WeightRow> table = weight_table(config, experts, weights);
  Parts parts(config, shard.placement, ranks, rank);
  parts.assign(weights, table);
  keep_small_weights(table);
  if (source.directory.empty()) {
    initialize(table, config, source.seed, dtype);
  } else {
    shard.skipped = load_weights(source.directory, config, table, dtype);
  }
  shard.vocabulary = parts.vocabulary();
  shard.embedding = weights.embedding;
  shard.final_norm = weights.final_norm;
  shard.head = weights.head;
  for (int64_t i = 0; i < config.n_layers; ++i) {
    LayerWeights& layer = weights.layers[i];
    shard.layers.push_back({.attention_norm = layer.attention_norm,
                            .mlp_norm = layer.mlp_norm,
                            .attention = attention_shard(std::move(layer.mla), shard.placement, maps[i]),
                            .mlp = std::move(layer.mlp),
                            .moe = std::move(layer.moe)});
  }
  return shard;
}

}  // namespace parlat
