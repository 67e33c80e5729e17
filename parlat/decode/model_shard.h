#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "parlat/config/layout.h"
#include "parlat/config/model_config.h"
#include "parlat/weights/model_weights.h"
#include "parlat/weights/slice_maps.h"
#include "parlat/weights/weight_table.h"

namespace parlat {

// One layer's attention as a rank decodes it: its heads h of H, its slice w of the latent.
struct AttentionShard {
  MlaWeights mla;        // rows of the rank's heads; w_ukv: of those it prefills
  Tensor store_wL;       // undefined: the latent is stored whole
  Tensor key_map_hwN;    // w_uk of each head through the slice's key map: what absorbs a query
  Tensor value_map_hVw;  // w_uv of each head through the slice's value map: what a weighted latent goes through
  int64_t width = 0;     // w
};

struct LayerShard {
  Tensor attention_norm, mlp_norm;  // [D] fp32
  AttentionShard attention;
  std::optional<MlpWeights> mlp;  // a part of the columns
  std::optional<MoeWeights> moe;  // the rank's experts, a part of the shared experts' columns
};

// What one rank of a decoding model holds. Activations are fp32, weights fp32 or bf16; norms and router fp32.
struct ModelShard {
  ModelConfig config;  // of the whole model
  std::string origin;  // the checkpoint's folder, or the config's name of random weights: for errors
  Placement placement;
  Range vocabulary;  // rows of embedding and head
  Tensor embedding, final_norm, head;
  std::vector<LayerShard> layers;
  std::vector<std::string> skipped;  // tensors of the checkpoint that are not needed
};

struct ModelSource {
  std::filesystem::path directory;  // a Hugging Face checkpoint; empty: random weights from the seed
  std::filesystem::path slices;     // a file of slice maps, not for gla; empty: the directory's for the groups, if any
  uint64_t seed = 1;
};

// Norms, biases and routers stay fp32 in models of 16 bits.
void keep_small_weights(std::vector<WeightRow>& table);

// The file of slice maps that a layout uses; empty where the latent is whole, or cut as it is.
std::filesystem::path slice_file(const ModelSource& source, const LayoutSpec& layout);

// The maps of each layer for slice `group`; undefined where the latent is whole. Throws what load_model_shard throws.
std::vector<SliceMaps> slice_maps(const ModelSource& source, const ModelConfig& config, const LayoutSpec& layout,
                                  int64_t group);

// Reads the rank's part of every tensor. Throws what load_weights, load_slices and place throw, and ConfigError for
// slices of other groups than the layout's.
ModelShard load_model_shard(const ModelSource& source, const ModelConfig& config, const LayoutSpec& layout, int ranks,
                            int rank, at::ScalarType dtype);

}  // namespace parlat
