#include "parlat/convert/layer_walk.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "parlat/base/error.h"
#include "parlat/decode/feed_forward.h"
#include "parlat/mla/attention.h"
#include "parlat/mla/projections.h"
#include "parlat/weights/checkpoint_files.h"

namespace parlat {

namespace {

std::vector<WeightRow> rows_of(std::vector<WeightRow> table, const std::string& prefix) {
  std::erase_if(table, [&](const WeightRow& row) { return !row.name.starts_with(prefix); });
  return table;
}

Tensor embed(const std::filesystem::path& directory, const ModelConfig& config,
             const std::vector<std::vector<int64_t>>& windows) {
  ModelWeights weights;
  const std::vector<WeightRow> table = weight_table(config, all_experts(config), weights);
  load_weights(directory, config, rows_of(table, "model.embed_tokens."), at::kFloat);
  std::vector<Tensor> rows;
  for (const std::vector<int64_t>& window : windows) {
    for (const int64_t token : window) {
      if (token < 0 || token >= config.vocab_size) {
        throw ConfigError("calibration: expected tokens from 0 to {}, got {}", config.vocab_size - 1, token);
      }
    }
    rows.push_back(at::tensor(window, at::kLong));
  }
  return at::embedding(weights.embedding, at::stack(rows));
}

// One window through one layer; x is the window's row of the residual stream.
Tensor attention_of(const MlaWeights& w, const Tensor& x_1SD) {
  const Documents documents = Documents::whole(1, x_1SD.size(1));
  const RopeTable rope = rope_table(w.spec.rope, w.dims().d_rope, documents.positions());
  const KeysValues kv = up_project(w.w_ukv, project_latent(w, x_1SD, rope), w.dims());
  return project_output(w, attend_explicit(w.spec, project_query(w, x_1SD, rope), kv, documents.visible(true)));
}

}  // namespace

LayerWeights load_layer(const std::filesystem::path& directory, const ModelConfig& config, int64_t layer) {
  ModelWeights weights;
  const std::vector<WeightRow> table = weight_table(config, all_experts(config), weights);
  load_weights(directory, config, rows_of(table, fmt::format("model.layers.{}.", layer)), at::kFloat);
  return std::move(weights.layers[layer]);
}

void walk_layers(const std::filesystem::path& directory, const ModelConfig& config,
                 const std::vector<std::vector<int64_t>>& windows, const LayerVisitor& visit,
                 const std::function<void(int64_t)>& progress) {
  const at::NoGradGuard no_grad;
  Tensor x_BSD = embed(directory, config, windows);
  for (int64_t i = 0; i < config.n_layers; ++i) {
    const LayerWeights layer = load_layer(directory, config, i);
    const Tensor normed_BSD = rms_norm(x_BSD, layer.attention_norm, config.rms_norm_eps);
    visit(i, layer.mla, normed_BSD);
    for (int64_t b = 0; b < x_BSD.size(0); ++b) {
      const Tensor x_1SD = x_BSD.narrow(0, b, 1);
      x_1SD.add_(attention_of(layer.mla, normed_BSD.narrow(0, b, 1)));
      const Tensor x_SD = x_1SD[0];
      const Tensor normed_SD = rms_norm(x_SD, layer.mlp_norm, config.rms_norm_eps);
      x_SD.add_(partial_feed_forward(config, layer.mlp, layer.moe, normed_SD));  // one rank's part: the whole
    }
    progress(i + 1);
  }
}

}  // namespace parlat
