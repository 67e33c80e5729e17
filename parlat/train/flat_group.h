#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "parlat/base/range.h"
#include "parlat/train/mesh.h"
#include "parlat/weights/weight_table.h"

namespace parlat {

// Tensors one after the other in one buffer, each at a cache line.
struct FlatLayout {
  struct Slot {
    std::string name;
    std::vector<int64_t> shape;
    Range range;
  };
  std::vector<Slot> slots;
  int64_t size = 0;
};

// The trained tensors that the same ranks hold copies of, as one buffer of weights (the model's tensors become views of
// it) and one fp32 buffer that gradients are summed into as the backward pass produces them. What is done once a step
// is split: each of the R ranks that hold the same tensors owns one of R even shares.
class FlatGroup {
 public:
  // Moves the dense weights of the table (replicated over the world) or its experts (over mesh.expert_replicas) here.
  // The group may be empty. The table's tensors are leaves of autograd then, and must not outlive the group.
  FlatGroup(bool experts, const ModelConfig& config, const std::vector<WeightRow>& table, const Mesh& mesh);

  const FlatLayout& layout() const { return layouts_[kind_]; }
  // World rank r holds layouts()[r % K], and of it share r / K of world size / K, where K is the number of layouts: one
  // for dense weights, one for each part of the experts.
  const std::vector<FlatLayout>& layouts() const { return layouts_; }
  Range shard() const { return shard_; }
  // fp32 copy of the weights of this rank's shard.
  Tensor shard_weights() const;

  // Starts to sum the gradients over the replicas; waiting gives this rank's shard, fp32. The buffer is spent then.
  Handle reduce_gradients(const Tensor& shard_sum);
  void zero_gradients();
  // Rounds the shard to the weights' dtype and exchanges: every replica then has all new weights.
  Handle gather_weights(const Tensor& shard_master);

 private:
  std::vector<Tensor> shares(const Tensor& flat) const;

  std::vector<FlatLayout> layouts_;
  size_t kind_ = 0;
  Communicator& replicas_;
  Range shard_;
  Tensor weights_, gradients_;
};

}  // namespace parlat
