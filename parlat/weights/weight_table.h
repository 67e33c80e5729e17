#pragma once

#include <optional>
#include <string>
#include <vector>

#include "parlat/weights/model_weights.h"

namespace parlat {

// Consecutive rows (dimension 0) or columns (1) of a tensor.
struct WeightPart {
  int64_t dimension = 0;
  Range range;
  Tensor of(const Tensor& whole) const { return whole.narrow(dimension, range.begin, range.size()); }
};

// One row a tensor of the model, in file order: the one place that knows names and shapes. Loading, saving,
// initialising, counting and the optimizer all go through it.
struct WeightRow {
  std::string name;  // Hugging Face's
  std::vector<int64_t> shape;
  Tensor* tensor = nullptr;  // where it lives in the ModelWeights
  bool trained = true;       // false: e_score_correction_bias
  bool expert = false;       // lives on one rank of an expert-parallel group only
  bool keep_fp32 = false;    // e_score_correction_bias, whatever the model's dtype
  enum class Init { kNormal, kOnes, kZeros } init = Init::kNormal;
  Tensor* tied = nullptr;               // ModelWeights::head, where it is the embedding itself
  std::optional<WeightPart> part;       // what this rank keeps of it; all where absent
  void set(const Tensor& value) const;  // into every place the weight has; filling goes through it
};

// Sizes `weights` for the config (layers, experts [local_experts of each MoE layer]) and returns its rows; tensors stay
// undefined until filled. A tied head has no row.
std::vector<WeightRow> weight_table(const ModelConfig& config, Range local_experts, ModelWeights& weights);

// Every expert, for one rank.
Range all_experts(const ModelConfig& config);

// Seeded initial weights: N(0, initializer_range) by name, so equal on every rank; norms 1.
void initialize(const std::vector<WeightRow>& table, const ModelConfig& config, uint64_t seed, at::ScalarType dtype);

}  // namespace parlat
