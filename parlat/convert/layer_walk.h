#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "parlat/config/model_config.h"
#include "parlat/mla/documents.h"
#include "parlat/weights/model_weights.h"
#include "parlat/weights/weight_table.h"

namespace parlat {

// A layer that the calibration text has run through.
struct WalkedLayer {
  int64_t index = 0;
  LayerWeights& weights;               // fp32; the walk needs them no more, they may be changed
  const std::vector<WeightRow>& rows;  // of the weight table: where in `weights` lies what
  const Tensor& x_BSD;                 // what its attention saw: after the layer's norm, fp32
};
using LayerVisitor = std::function<void(const WalkedLayer&)>;

// Runs windows [B, S] of tokens, sequences of their own, through a checkpoint layer by layer, in fp32 on one rank: only
// one layer's weights are in memory at a time, next to the activations [B, S, D]. `progress` hears of the layers done.
// Throws what load_weights throws, ConfigError for tokens outside the vocabulary.
void walk_layers(const std::filesystem::path& directory, const ModelConfig& config,
                 const std::vector<std::vector<int64_t>>& windows, const LayerVisitor& visit,
                 const std::function<void(int64_t)>& progress);

// The rows of the model's weight table that `wanted` picks by name, loaded into `weights`, fp32.
std::vector<WeightRow> load_rows(const std::filesystem::path& directory, const ModelConfig& config,
                                 const std::function<bool(const std::string&)>& wanted, ModelWeights& weights);

}  // namespace parlat
