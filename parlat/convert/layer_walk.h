#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <vector>

#include "parlat/config/model_config.h"
#include "parlat/mla/documents.h"
#include "parlat/weights/model_weights.h"

namespace parlat {

// What a layer's attention sees of the calibration text: x [B, S, D] after the layer's norm, in fp32. Windows are
// sequences of their own.
using LayerVisitor = std::function<void(int64_t layer, const MlaWeights& weights, const Tensor& x_BSD)>;

// Runs windows [B, S] of tokens through a checkpoint layer by layer, in fp32 on one rank: only one layer's weights are
// in memory at a time, next to the activations [B, S, D]. `progress` hears of the layers done. Throws what load_weights
// throws, ConfigError for tokens outside the vocabulary.
void walk_layers(const std::filesystem::path& directory, const ModelConfig& config,
                 const std::vector<std::vector<int64_t>>& windows, const LayerVisitor& visit,
                 const std::function<void(int64_t)>& progress);

// One layer's weights from a checkpoint, fp32.
LayerWeights load_layer(const std::filesystem::path& directory, const ModelConfig& config, int64_t layer);

}  // namespace parlat
