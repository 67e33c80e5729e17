#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "parlat/config/model_config.h"
#include "parlat/convert/balanced.h"

namespace parlat {

// hadamard, pca: as published, a rotated checkpoint and its slices. balanced: the checkpoint as it is, with slices
// fitted to it.
enum class Transform { kHadamard, kPca, kBalanced };
std::string_view name(Transform transform);
// Throws ConfigError with the possible values.
Transform parse_transform(std::string_view text);

struct ConvertOptions {
  std::filesystem::path model, out;
  Transform transform = Transform::kBalanced;
  std::vector<int64_t> groups = {2};          // a file of slices each
  std::vector<std::vector<int64_t>> windows;  // of the calibration text, equally long
  BalancedOptions balanced;
};

struct ConvertedLayer {
  int64_t layer = 0, groups = 0;
  double error_before = 0, error_after = 0;  // balanced only: of the layer's output
};

// Writes out: a Hugging Face folder that computes the same as the model, and slices-G.safetensors for each number of
// groups. Works layer by layer: memory holds one layer's weights in fp32 and the calibration's activations. A rotated
// copy's tensors have the dtypes of the model's (fp8 becomes bf16), rounded once from fp32. For balanced, out may be
// the model's folder: then only the slices are written. Everything appears under its name when all is written. Throws
// ConfigError for what cannot be (a rotated copy over its source, a folder that holds another model or that another
// process converts into, groups that exceed the latent, principal coordinates of fewer tokens than there are),
// DataError for files, weights that aren't finite and texts whose latents do not vary. `progress` hears of layers done.
std::vector<ConvertedLayer> convert(const ConvertOptions& options, const ModelConfig& config,
                                    const std::function<void(int64_t)>& progress);

}  // namespace parlat
