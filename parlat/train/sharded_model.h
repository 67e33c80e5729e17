#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "parlat/model/transformer.h"
#include "parlat/train/data.h"
#include "parlat/train/flat_group.h"
#include "parlat/train/mesh.h"

namespace parlat {

// One rank's part of a model that is trained on a mesh: its weights, in groups that the optimizer works on, the form of
// attention, and the loss of its tokens.
class ShardedModel {
 public:
  // Weights from a Hugging Face directory, or from the seed where `directory` is empty: the same on every mesh; on the
  // meta device shapes only. Config and mesh outlive the model. Throws what make_attention, load_weights and
  // validate(config) throw.
  ShardedModel(const ModelConfig& config, const Mesh& mesh, const std::filesystem::path& directory, uint64_t seed,
               at::ScalarType dtype, at::Device device = at::kCPU);
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  // Collective over the sequence and expert ranks. The sum of the losses of this rank's tokens; `batch` holds the
  // sequences of its data index.
  Tensor loss_sum(const Batch& batch, const Transformer::Observer& observe = nullptr) const;
  // Collective over the world: the first stage of the forward pass, on whichever rank, whose activation is not finite
  // ("head" where only the loss is not); empty if all are.
  std::string first_non_finite(const Batch& batch) const;

  std::vector<FlatGroup>& groups() { return groups_; }
  const std::vector<WeightRow>& table() const { return table_; }
  const ModelWeights& weights() const { return weights_; }

 private:
  Tensor hidden(const Batch& batch, const Transformer::Observer& observe) const;
  Tensor local(const Tensor& x_BS) const;
  SequenceShards shards(int64_t sequence) const;

  const ModelConfig& config_;
  const Mesh& mesh_;
  ModelWeights weights_;
  std::vector<WeightRow> table_;
  std::vector<FlatGroup> groups_;  // dense, experts
  std::unique_ptr<Attention> attention_;
  Transformer transformer_;
};

}  // namespace parlat
