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

Tensor embed(const std::filesystem::path& directory, const ModelConfig& config,
             const std::vector<std::vector<int64_t>>& windows) {
  ModelWeights weights;
  load_rows(
      directory, config, [](const std::string& name) { return name.starts_with("model.embed_tokens."); }, weights);
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

std::vector<WeightRow> load_rows(const std::filesystem::path& directory, const ModelConfig& config,
                                 const std::function<bool(const std::string&)>& wanted, ModelWeights& weights) {
  std::vector<WeightRow> rows = weight_table(config, all_experts(config), weights);
  std::erase_if(rows, [&](const WeightRow& row) { return !wanted(row.name); });
  load_weights(directory, config, rows, at::kFloat);
  return rows;
}

void walk_layers(const std::filesystem::path& directory, const ModelConfig& config,
                 const std::vector<std::vector<int64_t>>& windows, const LayerVisitor& visit,
                 const std::function<void(int64_t)>& progress) {
  const at::NoGradGuard no_grad;
  Tensor x_BSD = embed(directory, config, windows);
  for (int64_t i = 0; i < config.n_layers; ++i) {
    const std::string prefix = fmt::format("model.layers.{}.", i);
    ModelWeights weights;
    const std::vector<WeightRow> rows = load_rows(
        directory, config, [&](const std::string& name) { return name.starts_with(prefix); }, weights);
    LayerWeights& layer = weights.layers[i];
    const Tensor normed_BSD = rms_norm(x_BSD, layer.attention_norm, config.rms_norm_eps);
    for (int64_t b = 0; b < x_BSD.size(0); ++b) {
      const Tensor x_1SD = x_BSD.narrow(0, b, 1);
      x_1SD.add_(attention_of(layer.mla, normed_BSD.narrow(0, b, 1)));
      const Tensor x_SD = x_1SD[0];
      const Tensor normed_SD = rms_norm(x_SD, layer.mlp_norm, config.rms_norm_eps);
      x_SD.add_(partial_feed_forward(config, layer.mlp, layer.moe, normed_SD));  // one rank's part: the whole
    }
    visit({.index = i, .weights = layer, .rows = rows, .x_BSD = normed_BSD});
    progress(i + 1);
  }
}

}  // namespace parlat
